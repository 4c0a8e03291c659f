"""Proofs that statements do nothing where a group is empty, so that a guard around them can be dropped."""

import ast
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from moeblaze_ops.capture import row_groups
from moeblaze_ops.capture.appended_parts import is_append
from moeblaze_ops.capture.emptiness import Reader
from moeblaze_ops.capture.trees.syntax import without_views

_MODES = (torch.no_grad, torch.enable_grad, torch.autocast, torch.amp.autocast)
_VALUES = frozenset(("sum", "mean", "unsqueeze", "squeeze", "view", "reshape", "expand", "flatten", "new_zeros", "new_empty"))
"""Methods that only make a value, of the dtype of what they are called on, whatever that is."""

TO_ROWS = frozenset(("index_add", "index_copy", "scatter_add", "scatter_reduce"))
"""Methods that add or store rows of one tensor at those of another, here and with an underscore in place."""


class Unproven(Exception):
    """Statements may do something where the group is empty."""

    def __init__(self, statement: ast.AST, reason: str):
        super().__init__(f"line {getattr(statement, 'lineno', '?')}: {reason}")


@dataclass
class Effects:
    """What guarded statements do to names: ``temporary`` ones they set, ``read_first`` ones they read before that.

    ``certain``: temporary names that are set whatever conditions say. ``parts``: statements that append to lists which are only
    concatenated, each with a name of rows of the group.
    """

    temporary: set[str] = field(default_factory=set)
    read_first: set[str] = field(default_factory=set)
    certain: set[str] = field(default_factory=set)
    parts: list[tuple[ast.stmt, str]] = field(default_factory=list)

    def loads(self, node: ast.AST) -> None:
        self.read_first |= loaded(node) - self.certain

    def sets(self, *names: str) -> None:
        self.temporary.update(names)
        self.certain.update(names)


def loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load | ast.Del)}


def stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def prove_no_effect(statements: Sequence[ast.stmt], group: Hashable, reader: Reader, *, may_continue: bool) -> Effects:
    """Prove that ``statements`` leave nothing behind where ``group`` is empty, apart from names that are temporary.

    Calls are taken to have no effect of their own here; who traces them watches for one. An expression may be anything
    that only makes values.

    Args:
        statements: what stands behind the guard.
        group: of ``reader``; empty where the guard skips.
        reader: what is known before the statements; it is taken through them.
        may_continue: a ``continue`` under a condition may stand among them: nothing follows that has an effect.

    Raises:
        Unproven: there may be an effect.
    """
    proof = _Proof(group, reader, may_continue)
    proof.block(statements)
    return proof.effects


def prove_adds_zero(statements: Sequence[ast.stmt], guarded: Sequence[ast.stmt], reader: Reader) -> set[str]:
    """Prove that ``statements`` only add zero times something to what ``guarded`` writes to.

    Such branches keep parameters of experts without tokens in the graph. They call what ``guarded`` calls, too, whose
    effects are seen there, or what only makes a value.

    Returns:
        The names they set beside.

    Raises:
        Unproven: there may be another effect.
    """
    sums = {name for s in guarded for name in _written_names(s)}
    changed = set().union(*(stored(s) for s in (*statements, *guarded)))
    calls = {ast.unparse(call.func) for s in guarded for call in _certain_calls(s) if not loaded(call.func) & changed}
    temporary: set[str] = set()
    for s in statements:
        _prove_only_values(s, calls, reader)
        match s:
            case ast.Pass():
                pass
            case ast.If(body=body, orelse=orelse):
                temporary |= prove_adds_zero([*body, *orelse], guarded, reader)
            case ast.AugAssign(target=target, op=ast.Add(), value=value) if _base_name(target) in sums and _is_zero(value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(left=left, op=ast.Add(), right=right)) if name in sums:
                if not any(isinstance(a, ast.Name) and a.id == name and _is_zero(b) for a, b in ((left, right), (right, left))):
                    raise Unproven(s, f"{name} is changed")
            case ast.Assign(targets=[ast.Name(id=name)]) if name not in sums:
                temporary.add(name)
            case _:
                raise Unproven(s, "it is not zero times something that is added")
    return temporary


def differs_by_zero(branch: ast.If, reader: Reader) -> bool:
    """Whether the ``else`` branch stores what the other stores, plus zero times something: the condition decides nothing."""
    match branch:
        case ast.If(
            body=[ast.Assign(targets=[ast.Subscript() as target], value=value) as kept],
            orelse=[ast.Assign(targets=[other], value=ast.BinOp(left=left, op=ast.Add(), right=right)) as with_zero],
        ):
            same = ast.dump(value)
            sums = any(ast.dump(a) == same and _is_zero(b) for a, b in ((left, right), (right, left)))
            try:
                _prove_only_values(with_zero, {ast.unparse(call.func) for call in _certain_calls(kept)}, reader)
            except Unproven:
                return False
            return sums and ast.dump(target) == ast.dump(other) and reader.only_makes(branch.test)
    return False


def _prove_only_values(s: ast.stmt, calls: set[str], reader: Reader) -> None:
    """A statement calls nothing else than ``calls`` and what only makes a value."""
    _prove_plain(s, reader)
    for call in (n for n in ast.walk(s) if isinstance(n, ast.Call)):
        attr = call.func.attr if isinstance(call.func, ast.Attribute) else None
        makes_value = attr in _VALUES or (attr == "parameters" and not call.args)
        known = reader.is_pure(call) and (attr is None or reader.resolve(call.func) is not None)
        if not (makes_value or known or ast.unparse(call.func) in calls):
            raise Unproven(s, f"{ast.unparse(call.func)} may have an effect")


def _prove_plain(s: ast.stmt, reader: Reader) -> None:
    """No expression of a statement sets a name or moves an iterator on."""
    if any(isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for n in ast.walk(s)):
        raise Unproven(s, "an expression with an effect")
    if any(isinstance(n, ast.Call) and reader.resolve(n.func) is next for n in ast.walk(s)):
        raise Unproven(s, "an iterator is moved on")


def _certain_calls(s: ast.stmt) -> list[ast.Call]:
    """Calls of a statement that always happen; none where a part of it may be passed over."""
    nodes = list(ast.walk(s))
    passes = ast.If | ast.IfExp | ast.BoolOp | ast.Lambda | ast.For | ast.While | ast.comprehension
    return [] if any(isinstance(n, passes) for n in nodes) else [n for n in nodes if isinstance(n, ast.Call)]


def _written_names(s: ast.stmt) -> set[str | None]:
    """Names of tensors that a statement writes rows of."""
    targets = [n.value for n in ast.walk(s) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    calls = [n.func for n in ast.walk(s) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    targets += [f.value for f in calls if f.attr in ("index_add_", "index_add", "index_put_", "index_copy_")]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _base_name(target: ast.expr) -> str | None:
    target = target.value if isinstance(target, ast.Subscript) else target
    return target.id if isinstance(target, ast.Name) else None


def _is_zero(e: ast.expr) -> bool:
    """A product with the number zero."""
    if not isinstance(e, ast.BinOp) or not isinstance(e.op, ast.Mult):
        return False
    sides = e.left, e.right
    return any(isinstance(s, ast.Constant) and type(s.value) in (int, float) and s.value == 0 for s in sides) or any(
        map(_is_zero, sides)
    )


class _Proof:
    def __init__(self, group: Hashable, reader: Reader, may_continue: bool):
        self.group, self.reader, self.may_continue = group, reader, may_continue
        self.effects = Effects()

    def block(self, statements: Sequence[ast.stmt], conditional: bool = False) -> None:
        for statement in statements:
            self.statement(statement, conditional)

    def statement(self, s: ast.stmt, conditional: bool) -> None:
        _prove_plain(s, self.reader)
        self.effects.loads(s.test if isinstance(s, ast.If) else s)
        match s:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return
            case ast.Continue() if conditional and self.may_continue:
                return
            case ast.With(items=items, body=body) if all(map(self._is_mode, items)):
                self.block(body, conditional)
                return
            case ast.If(body=body, orelse=orelse):
                self._branches(body, orelse)
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._updates(value, name):
                self.reader.execute(s)
                return
            case ast.Assign(targets=[ast.Name(id=name)]):
                self.reader.execute(s)
                self.effects.sets(name)
                return
            case ast.Assign(targets=[ast.Tuple(elts=targets)]) if all(isinstance(t, ast.Name) for t in targets):
                self.reader.execute(s)
                self.effects.sets(*(target.id for target in targets))
                return
            case ast.Assign(targets=[ast.Subscript() as target]) | ast.AugAssign(target=ast.Subscript() as target):
                if self._is_empty_part(target):
                    return
                raise Unproven(s, f"what {ast.unparse(target)} selects may not be empty")
            case ast.AugAssign(target=ast.Name(id=name)) if name in self.effects.temporary or self._in_group(s.target):
                # A write to something else through a name set here would be a write that the rewrite has to justify.
                return
            case ast.AugAssign(target=ast.Name(id=name)):
                raise Unproven(s, f"{name} is changed")
            case ast.Expr(value=ast.Call() as call) if self._updates_in_place(call):
                return
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr))) if (
                name in self.effects.temporary and attr.endswith("_") and not attr.startswith("_")
            ):
                self.reader.execute(s)
                return
        if is_append(s) and s.value.func.value.id in self.reader.joined and (rows := self._rows_by_name()) is not None:
            self.effects.parts.append((s, rows))
            return
        raise Unproven(s, f"a statement that may have an effect ({ast.unparse(s).partition(chr(10))[0]})")

    def _rows_by_name(self) -> str | None:
        """A name of rows of the group."""
        for name, value in self.reader.values.items():
            if value.kind == "rows" and value.group == self.group and not value.listed:
                return name
        return None

    def _branches(self, *blocks: Sequence[ast.stmt]) -> None:
        """Go through blocks of which one runs: what is known, and set for certain, behind them is so behind each."""
        before, certain = self.reader, self.effects.certain
        readers: list[Reader] = []
        set_behind: list[set[str]] = []
        for block in blocks:
            self.reader, self.effects.certain = before.copy(), set(certain)
            self.block(block, True)
            readers.append(self.reader)
            set_behind.append(self.effects.certain)
        self.reader = readers[0].meeting(readers[1:])
        self.effects.certain = set.intersection(*set_behind)

    def _is_mode(self, item: ast.withitem) -> bool:
        """Whether a context only changes how what is inside is computed."""
        made = isinstance(item.context_expr, ast.Call) and self.reader.resolve(item.context_expr.func)
        return item.optional_vars is None and made in _MODES

    def _in_group(self, e: ast.expr, *kinds: str) -> bool:
        value = self.reader.read(e)
        return value.group == self.group and value.kind in (kinds or ("rows",))

    def _is_empty_part(self, target: ast.Subscript) -> bool:
        first = target.slice.elts[0] if isinstance(target.slice, ast.Tuple) and target.slice.elts else target.slice
        return self._is_accumulator(without_views(target.value)) and self._in_group(first, "rows", "mask")

    def _is_accumulator(self, e: ast.expr) -> bool:
        """A name of something else than the mask, which stays as it is."""
        return isinstance(e, ast.Name) and self.reader.read(e).group != self.group

    def _updates(self, value: ast.expr, name: str) -> bool:
        """``name = name.index_add(0, rows, ...)`` and its like, or rows of a group put into it."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        if self.reader.resolve(value.func) is row_groups.put:
            return isinstance(value.args[0], ast.Name) and value.args[0].id == name and self._in_group(value.args[2])
        if self.reader.resolve(value.func) is not None:
            return False
        base = value.func.value
        if value.func.attr == "index_put":
            return isinstance(base, ast.Name) and base.id == name and self._puts_rows(value, base)
        return value.func.attr in TO_ROWS and self._adds_rows(value, base, name)

    def _updates_in_place(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
            return False
        if call.func.attr.endswith("_") and call.func.attr[:-1] in TO_ROWS:
            return self._adds_rows(call, call.func.value, call.func.value.id)
        return call.func.attr == "index_put_" and self._puts_rows(call, call.func.value)

    def _puts_rows(self, call: ast.Call, base: ast.expr) -> bool:
        """Whether ``base.index_put`` is called with indices that are rows of the group."""
        indices = call.args[0].elts if call.args and isinstance(call.args[0], ast.Tuple) else []
        return bool(indices) and self._is_accumulator(base) and self._in_group(indices[0], "rows", "mask")

    def _adds_rows(self, call: ast.Call, base: ast.expr, name: str) -> bool:
        """Whether a call adds to some rows of ``base``, along axis 0, and these are rows of the group."""
        arguments = dict(zip(("dim", "index", "source"), call.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
        along_rows = isinstance(arguments.get("dim"), ast.Constant) and arguments["dim"].value == 0
        named = isinstance(base, ast.Name) and base.id == name and self._is_accumulator(base)
        return along_rows and named and "index" in arguments and self._in_group(_before_expansion(arguments["index"]))


def _before_expansion(e: ast.expr) -> ast.expr:
    """What is empty wherever an expansion of it is."""
    match e:
        case ast.Call(func=ast.Attribute(value=inner, attr="expand" | "expand_as" | "repeat")):
            return _before_expansion(inner)
    return e
