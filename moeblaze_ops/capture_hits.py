"""Loops over the experts that were hit, as loops over all experts.

    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()        mask one-hot, [E, K, T]
    for e in hit: ...                                               becomes   for e in range(mask.shape[0]): ...

``e`` was a tensor, of shape [1] or [], and becomes a number; every use of it has to mean the same for both.
"""

import ast
from dataclasses import dataclass

from moeblaze_ops.capture_emptiness import Reader, Value
from moeblaze_ops.capture_guards import Unproven, stored

_AS_NUMBER = frozenset(("item", "squeeze"))


@dataclass(frozen=True)
class HitLoop:
    """A loop over hit experts: the name of the one-hot tensor, and what an iteration gives."""

    container: str
    expert: Value
    group: tuple


def hit_loop(loop: ast.For, outer: Reader, inner: Reader) -> HitLoop | None:
    """The loop as one over hit experts, or None; ``inner`` learns of the loop's variable."""
    hits = outer.read(loop.iter)
    if hits.kind not in ("hits", "hit_ids") or not isinstance(loop.target, ast.Name) or loop.orelse:
        return None
    container = next((name for name, value in inner.values.items() if value.key == hits.of), None)
    if container is None:
        return None
    key = "expert", loop.lineno
    expert = Value(key, key, "expert_row" if hits.kind == "hits" else "expert")
    inner.values[loop.target.id] = expert
    return HitLoop(container, expert, ("item", hits.of, key))


def over_all_experts(loop: ast.For, found: HitLoop) -> None:
    """Make the loop one over all experts.

    Raises:
        Unproven: a use of the variable may mean something else for a number.
    """
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
    loop.body = body
    size = f"range({found.container}.shape[0])"
    loop.iter = ast.copy_location(ast.parse(size, mode="eval").body, loop.iter)
    for node in ast.walk(loop.iter):
        ast.copy_location(node, loop.iter)


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
        if not self.row and isinstance(node.slice, ast.Tuple):
            node.value = self.visit(node.value)
            node.slice.elts = [e if self._is(e) else self.visit(e) for e in node.slice.elts]
            return node
        if self._is(node.slice):
            if not self.row:
                return node
            if isinstance(node.value, ast.Name) and node.value.id == self.container:
                variable = node.slice
                node.slice = ast.Slice(lower=variable, upper=ast.BinOp(variable, ast.Add(), ast.Constant(1)))
                return ast.fix_missing_locations(node)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if not self.row and self._is(node.left):
            node.comparators = [self.visit(comparator) for comparator in node.comparators]
            return node
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self._is(node):
            raise Unproven(node, f"{self.name} may differ for a number")
        return node
