"""Lists of the rows of a group that only serve as indices, as the tensors that they are copies of.

    token, slot = torch.where(ids == e)                             token, slot = torch.where(ids == e)
    tokens = token.tolist()                                         tokens = row_groups.kept(token)
    y = expert(x[tokens]) * weights[tokens, slot.tolist(), None]    y = expert(x[tokens]) * weights[tokens, slot, None]

A list of numbers and a tensor of one axis mean the same as an index of a tensor.
"""

import ast
from collections.abc import Iterator

from moeblaze_ops.capture.emptiness import Reader
from moeblaze_ops.capture.host_counts import without_copies
from moeblaze_ops.capture.trees.build import located, row_groups_call


class IndexLists:
    """The lists of one function. ``names`` are those that are indices wherever they are read, or asked for their length."""

    def __init__(self, function: ast.FunctionDef):
        self.done: list[int] = []
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        as_index = {id(e) for node in ast.walk(function) for e in _served(node)}
        lists = {id(s.targets[0]) for s in ast.walk(function) if _is_list(s)}
        self.names = {node.id for node in names} - {node.id for node in names if id(node) not in as_index | lists}

    def without(self, statement: ast.stmt, reader: Reader) -> ast.stmt:
        """The statement with tensors in the place of lists; ``reader`` knows what holds before it."""
        if _is_list(statement) and statement.targets[0].id in self.names:
            rows = statement.value.func.value
            if _are_rows(rows, reader):
                self.done.append(statement.lineno)
                statement.value = located(row_groups_call("kept", without_copies(rows)), statement.value)
        return _Inline(self, reader).visit(statement)


class _Inline(ast.NodeTransformer):
    """Indices that are made into lists where they are used."""

    def __init__(self, lists: IndexLists, reader: Reader):
        self.lists, self.reader = lists, reader

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.slice, ast.Tuple):
            node.slice.elts = [self._index(e) for e in node.slice.elts]
        else:
            node.slice = self._index(node.slice)
        return self.generic_visit(node)

    def _index(self, e: ast.expr) -> ast.expr:
        match e:
            case ast.Call(func=ast.Attribute(value=rows, attr="tolist"), args=[], keywords=[]) if _are_rows(rows, self.reader):
                self.lists.done.append(e.lineno)
                return without_copies(rows)
        return e


def _are_rows(e: ast.expr, reader: Reader) -> bool:
    value = reader.read(e)
    return value.kind == "rows" and value.dims == 1


def _is_list(s: ast.AST) -> bool:
    match s:
        case ast.Assign(targets=[ast.Name()], value=ast.Call(func=ast.Attribute(attr="tolist"), args=[], keywords=[])):
            return True
    return False


def _served(node: ast.AST) -> Iterator[ast.expr]:
    """What a node reads as an index, or for its length."""
    match node:
        case ast.Subscript(slice=ast.Tuple(elts=indices)):
            yield from indices
        case ast.Subscript(slice=index):
            yield index
        case ast.Call(func=ast.Name(id="len"), args=[of], keywords=[]):
            yield of
