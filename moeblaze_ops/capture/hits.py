"""Loops over the experts that were hit, as loops over all experts.

    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()        mask one-hot, [E, K, T]
    for e in hit: ...                                               becomes   for e in range(mask.shape[0]): ...
    for e in hit: w = weights[e]; ...                                         row_groups.hit_numbers(mask, ids, len(weights))

    of a mask that is not known to be one-hot, or to have these axes:         row_groups.masked_numbers(mask, 0, 3)

    for e in ids.unique(): ...                                      becomes   for e in row_groups.numbers(ids, len(experts)): ...

That all ids are numbers of experts, and no element of a mask negative, is proven in the graph. Where ``e`` was a tensor, of
shape [1] or [], it becomes a number; every use of it has to mean the same for both.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moeblaze_ops.capture.emptiness import Reader, Value
from moeblaze_ops.capture.guards import Unproven, loaded, stored
from moeblaze_ops.capture.trees.build import located, name_of, row_groups_call
from moeblaze_ops.capture.trees.syntax import axis_left, elements_of, is_path

_AS_NUMBER = frozenset(("item", "squeeze"))
_COMPARED_ALIKE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_HITS = frozenset(("hits", "hit_ids", "hit_list"))
_SELECTIONS = _HITS | {"hit", "hit_split", "listed", "counts", "bins"}


def selects(value: Value) -> bool:
    """Whether a value says which experts have tokens."""
    return value.kind in _SELECTIONS or bool(value.summed)


def _as_hits(value: Value) -> Value | None:
    """A value as one of hit experts, which rows of sums are, too, where one axis is left of what was summed."""
    if value.kind == "rows" and value.summed:
        return replace(value, kind="hits" if value.dims == 2 else "hit_list" if value.listed else "hit_ids")
    return value if value.kind in _HITS else None


@dataclass(frozen=True)
class HitLoop:
    """A loop over hit experts: the name of the mask or of the ids, and what an iteration gives.

    ``onehot``: the mask is known to be one-hot. ``ids``: the name of what it was made of, where that is known.
    ``axis``: of the mask, that of the experts, and how many there are; None where these are the first of three for certain.
    ``groups``: any of which is empty for an expert that was not hit, each with the tensor whose elements it is selected by.
    ``present``: the loop is over the numbers among ids. ``listed``: its variable is a number already.
    """

    container: str
    onehot: bool
    ids: str | None
    axis: tuple[int, int] | None
    expert: Value
    groups: list[tuple[str, tuple]]
    present: bool
    listed: bool


def loops_over_hits(block: Sequence[ast.stmt], reader: Reader) -> Iterator[ast.For]:
    """Those in a block that go over hit experts; ``reader`` is taken through it."""
    for statement in block:
        match statement:
            case ast.For():
                if _as_hits(reader.read(statement.iter)) is not None:
                    yield statement
                names = stored(statement)
                yield from loops_over_hits(statement.body, reader.in_every_round(statement, names))
                reader.forget(names)
                reader.forget_masks()
            case ast.With():
                yield from loops_over_hits(statement.body, reader)
            case ast.If():
                for branch in (statement.body, statement.orelse):
                    yield from loops_over_hits(branch, reader.copy())
                reader.execute(statement)
            case _:
                reader.execute(statement)


def hit_loop(loop: ast.For, iterated: Value, inner: Reader) -> HitLoop | None:
    """A loop over hits as one over hit experts, or None; ``inner`` learns of the loop's variable."""
    hits = _as_hits(iterated)
    axis = axis_left(hits.summed) if hits is not None and hits.summed else None
    if hits is None or not isinstance(loop.target, ast.Name) or loop.orelse or (hits.summed and axis is None):
        return None
    keys = {name: elements_of(value.key) if hits.present else value.key for name, value in inner.values.items()}
    container = next((name for name, key in keys.items() if key == hits.of), None)
    if container is None:
        return None
    made_of = inner.values[container].of
    ids = next((name for name, value in inner.values.items() if elements_of(value.key) == made_of), None)
    key = "expert", loop.lineno
    expert = Value(key, key, "expert_row" if hits.kind == "hits" else "expert")
    inner.values[loop.target.id] = expert
    if hits.present:
        groups = [(container, (ast.Eq, hits.of, key))]
    else:
        groups = [(container, inner.part_key(hits.of, key, *place)) for place in _places(axis or (0, 3))]
    for name, value in inner.values.items() if hits.present else ():
        if value.kind in ("onehot", "mask") and value.dims == 3 and value.of == hits.of and not value.summed:
            groups.append((name, inner.part_key(value.key, key, 0)))
    onehot = inner.values[container].kind == "onehot" and axis is None
    return HitLoop(container, onehot, ids, axis, expert, groups, hits.present, listed=hits.kind == "hit_list")


def _places(axis: tuple[int, int]) -> Iterator[tuple[int, bool]]:
    """Ways to write an index along one axis of several: behind how many ``:``, or behind ``...``."""
    index, rank = axis
    yield index, False
    if index == rank - 1:
        yield 0, True


def over_all_experts(loop: ast.For, found: HitLoop, reader: Reader) -> None:
    """Make the loop one over all experts; ``reader`` knows what holds before it.

    Raises:
        Unproven: a use of the variable may mean something else for a number, or it is not known how many experts there are.
    """
    name, container = loop.target.id, name_of(found.container)
    own = next(_taken_every_round(loop, found, reader), None) if found.ids else None
    if found.present:
        experts = next(_indexed_by(loop, name), None)
        if experts is None:
            raise Unproven(loop, f"{name} is no index of anything outside")
        numbers = row_groups_call("numbers", container, ast.Call(name_of("len"), [experts], []))
    elif not found.onehot:
        numbers = row_groups_call("masked_numbers", container, *map(ast.Constant, found.axis or (0, 3)))
    elif own is not None:
        numbers = row_groups_call("hit_numbers", container, name_of(found.ids), ast.Call(name_of("len"), [own], []))
    else:
        size = ast.Subscript(ast.Attribute(container, "shape", ast.Load()), ast.Constant(0), ast.Load())
        numbers = ast.Call(name_of("range"), [size], [])
    if not found.listed:
        loop.body = _with_numbers(loop, found)
    elif any(name in stored(statement) for statement in loop.body):
        raise Unproven(loop, f"{name} is set")
    loop.iter = located(numbers, loop.iter)


def _indexed_by(loop: ast.For, name: str) -> Iterator[ast.expr]:
    """What a round takes an item of by its own number, or by a name with this number in it: modules first."""
    found, numbers = [], {name}
    for node in ast.walk(loop):
        match node:
            case ast.Assign(targets=[ast.Name(id=other)], value=ast.Call() as call) if loaded(call) <= {name, "int"}:
                numbers.add(other)
    for node in ast.walk(loop):
        match node:
            case ast.Subscript(value=of, slice=index, ctx=ast.Load()) if not isinstance(index, ast.Tuple | ast.Slice):
                pass
            case ast.Call(func=ast.Name(id="getattr"), args=[of, index]):
                pass
            case _:
                continue
        if numbers & loaded(index) and is_path(of) and not loaded(of) & stored(loop):
            found.append(of)
    yield from sorted(found, key=lambda of: isinstance(of, ast.Name) and of.id != "self")


def _taken_every_round(loop: ast.For, found: HitLoop, reader: Reader) -> Iterator[ast.expr]:
    """What every round takes its own item of, whatever conditions say: there are as many experts that may be hit."""
    numbers, set_inside = {loop.target.id}, stored(loop)
    for statement in loop.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != found.container:
                pass
            case ast.With(items=items) if all(item.optional_vars is None for item in items):
                continue
            case _:
                return
        if loaded(value) <= {*numbers, "int"}:
            numbers.add(name)
        for node in ast.walk(value):
            match node:
                case ast.Subscript(value=of, slice=ast.Name(id=index)) if index in numbers and found.container not in loaded(of):
                    if not loaded(of) & set_inside and reader.only_makes(of):
                        yield of


def _with_numbers(loop: ast.For, found: HitLoop) -> list[ast.stmt]:
    """The body of the loop with a number in the place of a tensor."""
    name = loop.target.id
    rewrite = _AsNumber(name, found.container, row=found.expert.kind == "expert_row", calls=_only_called(loop))
    body = []
    for statement in loop.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                statement.value = rewrite.scalar(value)
                rewrite.row = False
            case _ if name in stored(statement):
                raise Unproven(statement, f"{name} is set")
            case _:
                statement = rewrite.visit(statement)
        body.append(statement)
    return body


def _only_called(loop: ast.For) -> set[str]:
    """Names that are called wherever they are read: no tensors."""
    calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
    called = {id(f) for f in calls if isinstance(f, ast.Name)}
    names = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {n.id for n in names if id(n) in called} - {n.id for n in names if id(n) not in called}


class _AsNumber(ast.NodeTransformer):
    def __init__(self, name: str, container: str, *, row: bool, calls: set[str]):
        self.name, self.container, self.row, self.calls = name, container, row, calls

    def scalar(self, e: ast.expr) -> ast.expr:
        """``e``, one of the ways to read the number from the variable, as the variable."""
        match e:
            case ast.Subscript(value=ast.Name() as variable, slice=ast.Constant(value=0)) if self._is(variable) and self.row:
                return variable
            case ast.Call(func=ast.Attribute(value=ast.Name() as variable, attr=attr), args=[]) if self._is(variable):
                if attr in _AS_NUMBER and not e.keywords:
                    return variable
            case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[], keywords=[]):
                return self.scalar(inner)
            case ast.Call(func=ast.Name(id="int"), args=[ast.Name() as variable], keywords=[]) if self._is(variable):
                return variable
        raise Unproven(e, f"{ast.unparse(e)} may differ for a number")

    def _is(self, e: ast.expr) -> bool:
        return isinstance(e, ast.Name) and e.id == self.name

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Subscript(slice=index)) if (
                self._is(index) and target in self.calls
            ):
                return node  # a module from a list
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Subscript) and self._is(node.func.slice):
            node.args = [self.visit(arg) for arg in node.args]
            node.keywords = [self.visit(keyword) for keyword in node.keywords]
            return node
        if isinstance(node.func, ast.Attribute) and node.func.attr == "eq" and len(node.args) == 1 and not self.row:
            node.func = self.visit(node.func)
            node.args = [e if self._is(e) else self.visit(e) for e in node.args]
            return node
        if any(self._is(n) for n in ast.iter_child_nodes(node)) or (
            isinstance(node.func, ast.Attribute) and self._reads(node.func.value)
        ):
            return self.scalar(node)
        return self.generic_visit(node)

    def _reads(self, e: ast.expr) -> bool:
        return self._is(e) or (isinstance(e, ast.Subscript) and self._is(e.value))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is(node.value):
            return self.scalar(node)
        if self.row and isinstance(node.ctx, ast.Load) and not self._is_container(node.value):
            if self._is(node.slice):
                return located(row_groups_call("item", self.visit(node.value), node.slice), node)
            if isinstance(node.slice, ast.Tuple) and any(map(self._is, node.slice.elts)):
                return self._part(node)
        if not self.row and isinstance(node.slice, ast.Tuple):
            node.value = self.visit(node.value)
            node.slice.elts = [e if self._is(e) else self.visit(e) for e in node.slice.elts]
            return node
        if self._is(node.slice):
            if not self.row:
                return node
            if self._is_container(node.value):
                variable = node.slice
                node.slice = ast.Slice(lower=variable, upper=ast.BinOp(variable, ast.Add(), ast.Constant(1)))
                return ast.fix_missing_locations(node)
        return self.generic_visit(node)

    def _is_container(self, e: ast.expr) -> bool:
        return isinstance(e, ast.Name) and e.id == self.container

    def _part(self, node: ast.Subscript) -> ast.AST:
        """A subscript of several parts: the variable next to a name, and None."""
        parts = [part for part in node.slice.elts if not (isinstance(part, ast.Constant) and part.value is None)]
        names = [part for part in parts if isinstance(part, ast.Name) and not self._is(part)]
        if len(parts) != 2 or len(names) != 1 or abs(node.slice.elts.index(parts[0]) - node.slice.elts.index(parts[1])) != 1:
            raise Unproven(node, f"{ast.unparse(node)} may differ for a number")
        node.value = self.visit(node.value)
        node.slice.elts = [
            located(row_groups_call("beside", part, names[0]), part) if self._is(part) else part for part in node.slice.elts
        ]
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        if node.conversion != -1 and self.name in loaded(node.value):
            raise Unproven(node, f"{self.name} may differ for a number")
        if self._is(node.value) and not self.row:
            return node  # a tensor without axes is formatted as its number
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if self.row or not all(isinstance(op, _COMPARED_ALIKE) for op in node.ops):
            return self.generic_visit(node)
        node.left, *node.comparators = (e if self._is(e) else self.visit(e) for e in (node.left, *node.comparators))
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self._is(node):
            raise Unproven(node, f"{self.name} may differ for a number")
        return node
