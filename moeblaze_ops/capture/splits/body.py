"""One round of a loop over groups of rows: which slices it takes, shown by going through its numbers.

The numbers of group ``e`` are sums of where it starts, where it ends, and constants. A slice from the one to the other
becomes a gather by ``rows``, the positions of the group; a condition on its size one on how many positions there are.
"""

import ast
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeblaze_ops.capture.guards import Unproven, stored
from moeblaze_ops.capture.trees.build import located, name_of, row_groups_call

START, END, SIZE, NOTHING = (1, 0, 0), (0, 1, 0), (-1, 1, 0), (0, 0, 0)
"""Coefficients of the start and the end of a group, and a constant."""

Number = tuple[int, int, int]

ROWS, LIKE = "_moeblaze_rows", "_moeblaze_like"
"""Names in the changed code: of the rows of one group, and of a tensor that has all rows."""


@dataclass
class Round:
    """What is known of the names that a round reads.

    ``lists``: names of lists for one result per group. ``parts``: names of tuples of slices, and what they are of.
    ``numbers``: the numbers of all groups, by name, and what one of them is.
    """

    resolve: Callable[[ast.expr], Any]
    indices: frozenset[str]
    numbers: dict[str, Number]
    from_zero: bool
    parts: dict[str, ast.expr]
    lists: set[str]
    values: dict[str, Number]
    running: frozenset[str]
    taken: list[ast.expr] = field(default_factory=list)
    appended: list[str] = field(default_factory=list)

    def block(self, statements: Sequence[ast.stmt], *, certain: bool) -> list[ast.stmt]:
        """The statements without numbers; ``certain``: they run for every group that has rows."""
        return [new for statement in statements for new in self.statement(statement, certain)]

    def finish(self, at: ast.stmt) -> None:
        """A round is over: the next starts where it ended."""
        for name in self.running:
            if self.values.get(name) != END:
                raise Unproven(at, f"{name} may not be where the next group starts")

    def statement(self, s: ast.stmt, certain: bool) -> list[ast.stmt]:
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (number := self._host_number(value)) is not None:
                self.values[name] = number
                return []
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if self._are_numbers(names, values):
                numbers = [self.number(value) for value in values]
                self.values |= {target.id: number for target, number in zip(names, numbers, strict=True)}
                return []
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if name in self.values:
                number = self.number(ast.BinOp(ast.Name(name, ast.Load()), ast.Add(), value))
                if number is None:
                    raise Unproven(s, f"{name} is no number of a group")
                self.values[name] = number
                return []
            case ast.If():
                return [self._branch(s, certain)]
            case ast.With():
                s.items = [self.visited(item) for item in s.items]
                s.body = self.block(s.body, certain=certain)
                return [s]
            case ast.Break() | ast.Return():
                raise Unproven(s, "the loop may end early")
            case ast.Continue():
                self.finish(s)
                return [s]
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value], keywords=[])):
                if name in self.lists:
                    return [self._appended(s, name, value, certain)]
        if stored(s) & set(self.values):
            raise Unproven(s, "a number of a group is set to something else")
        if any(isinstance(node, ast.Break | ast.Continue | ast.Return) for node in ast.walk(s)):
            raise Unproven(s, "the round may end inside")
        return [self.visited(s)]

    def _are_numbers(self, names: list[ast.expr], values: list[ast.expr]) -> bool:
        named = all(isinstance(name, ast.Name) for name in names)
        return named and len(names) == len(values) and all(self._host_number(value) is not None for value in values)

    def _host_number(self, e: ast.expr) -> Number | None:
        return self.number(e) if self.reads_numbers(e) else None

    def _branch(self, s: ast.If, certain: bool) -> ast.If:
        empty = self._empty_when(s.test)
        if empty is None:
            before = dict(self.values)
            s.test = self.visited(s.test)
            for block in (s.body, s.orelse):
                block[:] = self.block(block, certain=False)
            if self.values != before:
                raise Unproven(s, "a number of a group depends on a condition")
            return s
        if s.orelse:
            raise Unproven(s, "there is an else branch")
        if empty:
            if not isinstance(s.body[-1], ast.Continue):
                raise Unproven(s, "it is no `continue`")
            skipped = copy.copy(self)
            skipped.values = dict(self.values)
            if skipped.block(s.body[:-1], certain=False):
                raise Unproven(s, "something is done for a group without rows")
            if any(skipped.values.get(name) not in (START, END) for name in self.running):
                raise Unproven(s, "the next group starts elsewhere")
            s.body = s.body[-1:]
        else:
            # Where there are no rows, start and end are the same: what the branch sets it may as well set always.
            s.body = self.block(s.body, certain=certain) or [ast.copy_location(ast.Pass(), s)]
        count = ast.Call(ast.Attribute(name_of(ROWS), "numel", ast.Load()), [], [])
        s.test = located(ast.Compare(count, [ast.Eq() if empty else ast.Gt()], [ast.Constant(0)]), s.test)
        return s

    def _empty_when(self, test: ast.expr) -> bool | None:
        """True for a condition that holds where a group is empty and only there, False for its opposite."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                found = self._empty_when(inner)
                return None if found is None else not found
            case ast.Compare(left=left, ops=[op], comparators=[right]) if self.reads_numbers(test):
                a, b = self.number(left), self.number(right)
                return _EMPTY.get((type(op), tuple(x - y for x, y in zip(a, b, strict=True)))) if a and b else None
        return False if self._host_number(test) == SIZE else None

    def _appended(self, s: ast.stmt, name: str, value: ast.expr, certain: bool) -> ast.stmt:
        if not certain or name in self.appended:
            raise Unproven(s, f"{name} may not get one result of each group")
        self.appended.append(name)
        target, held = ast.Name(name, ast.Store()), name_of(name)
        put = row_groups_call("put", held, self.visited(value), name_of(ROWS), name_of(LIKE))
        return located(ast.Assign([target], put), s)

    # Expressions.

    def reads_numbers(self, e: ast.AST) -> bool:
        names = {*self.values, *self.numbers}
        return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(e))

    def number(self, e: ast.expr) -> Number | None:
        """What an expression is, as a sum of what is known of the group."""
        match e:
            case ast.Name(id=name):
                return self.values.get(name)
            case ast.Constant(value=value) if type(value) is int:
                return 0, 0, value
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                a, b = self.number(left), self.number(right)
                sign = 1 if isinstance(op, ast.Add) else -1
                return None if a is None or b is None else tuple(x + sign * y for x, y in zip(a, b, strict=True))
            case ast.Call(func=ast.Name() as func, args=[inner], keywords=[]) if self.resolve(func) is int:
                return self.number(inner)
            case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[], keywords=[]):
                return self.number(inner)
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name in self.numbers:
                return self._of_group(self.numbers[name], index)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._before(test, body, orelse)
        return None

    def _of_group(self, number: Number, index: ast.expr) -> Number | None:
        if self._is_index(index):
            return START if self.from_zero else number
        match index:
            case ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=1)) if self._is_index(left) and self.from_zero:
                return END
        return None

    def _before(self, test: ast.expr, first: ast.expr, later: ast.expr) -> Number | None:
        """``0 if e == 0 else ends[e - 1]``."""
        match test:
            case ast.Compare(left=index, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
                pass
            case ast.Compare(left=index, ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=0)]) | (
                ast.Name() as index
            ):
                first, later = later, first
            case _:
                return None
        match later:
            case ast.Subscript(
                value=ast.Name(id=name), slice=ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant(value=1))
            ) if self.numbers.get(name) == END and not self.from_zero:
                zero = isinstance(first, ast.Constant) and type(first.value) is int and first.value == 0
                return START if zero and self._is_index(index) and self._is_index(left) else None
        return None

    def _is_index(self, e: ast.expr) -> bool:
        return isinstance(e, ast.Name) and e.id in self.indices

    def visited(self, node: Any) -> Any:
        return _Slices(self).visit(node)

    def taken_from(self, value: ast.expr, place: ast.AST) -> ast.expr:
        """The rows of the group, of ``value``."""
        self.taken.append(value)
        return located(row_groups_call("take", copy.deepcopy(value), name_of(ROWS), name_of(LIKE)), place)


class _Slices(ast.NodeTransformer):
    def __init__(self, round_: Round):
        self.round = round_

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=index)) if name in self.round.parts:
                if index in self.round.indices:
                    return self.round.taken_from(self.round.parts[name], node)
            case ast.Subscript(value=value, slice=ast.Slice(lower=ast.expr() as lower, upper=ast.expr() as upper, step=None)):
                if self._are_rows(lower, upper):
                    value = self.visit(value)
                    if isinstance(node.ctx, ast.Load):
                        return self.round.taken_from(value, node)
                    self.round.taken.append(value)
                    return ast.copy_location(ast.Subscript(value, located(name_of(ROWS), node.slice), node.ctx), node)
        return self.generic_visit(node)

    def _are_rows(self, lower: ast.expr, upper: ast.expr) -> bool:
        return self.round.number(lower) == START and self.round.number(upper) == END

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = self.round
        if node.id in known.values or node.id in known.numbers or node.id in known.parts or node.id in known.lists:
            raise Unproven(node, f"{node.id} is more than the bound of a slice")
        return node


_EMPTY = {
    (ast.Eq, SIZE): True, (ast.Eq, (1, -1, 0)): True, (ast.NotEq, SIZE): False, (ast.NotEq, (1, -1, 0)): False,
    (ast.Gt, SIZE): False, (ast.LtE, SIZE): True, (ast.GtE, (1, -1, 0)): True, (ast.Lt, (1, -1, 0)): False,
    (ast.GtE, (-1, 1, -1)): False, (ast.Lt, (-1, 1, -1)): True,
}  # fmt: skip
"""By how two numbers are compared and their difference; no group has fewer than no rows."""
