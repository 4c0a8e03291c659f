"""One result of each group of rows: collected in a list, or by a comprehension, and concatenated in the end.

    outputs = []                                                 out = None
    for e in range(E):                                           for e in range(E):
        outputs.append(f(x[start:end]))                              out = row_groups.put(out, f(x[rows]), rows, x)
    y = torch.cat(outputs)                                       y = out

Both are the same where the groups stand one behind another and cover all rows.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moeblaze_ops.capture.appended_parts import is_cat
from moeblaze_ops.capture.guards import Unproven, loaded, stored
from moeblaze_ops.capture.trees.build import located, name_of
from moeblaze_ops.capture.trees.syntax import is_empty_list


def collected_in(loop: ast.For, above: Sequence[ast.stmt]) -> set[str]:
    """Names of lists that are empty before ``loop``, and are appended to inside."""
    return {name for name in _appended_to(loop) if last_value(above, name, is_empty_list)}


def as_tensor(name: str, above: Sequence[ast.stmt], below: Sequence[ast.stmt], resolve: Callable[[ast.expr], Any]) -> None:
    """Make a list of results, one of each group, the tensor that they are concatenated to.

    Raises:
        Unproven: it is read in another way.
    """
    start = last_value(above, name, is_empty_list)
    start.value = ast.copy_location(ast.Constant(None), start)
    joined = _Joined(name, resolve)
    for statement in below:
        joined.visit(statement)
        if isinstance(statement, ast.Assign) and name in stored(statement):
            break


def as_loop(statement: ast.Assign, cells: Sequence[str]) -> list[ast.stmt]:
    """``name = [f(i) for i in it if test(i)]`` as a loop that appends to a list.

    Raises:
        Unproven: it is another kind of comprehension.
    """
    comprehension, name = statement.value, statement.targets[0].id
    generator = comprehension.generators[0]
    append = ast.Call(ast.Attribute(name_of(name), "append", ast.Load()), [comprehension.elt], [])
    skips = [ast.If(ast.UnaryOp(ast.Not(), test), [ast.Continue()], []) for test in generator.ifs]
    loop = ast.For(generator.target, generator.iter, [*skips, ast.Expr(append)], [])
    start = ast.Assign([ast.Name(name, ast.Store())], ast.List([], ast.Load()))
    # What the comprehension shares with the function stays in cells, as in the code that it takes the place of.
    shared = ast.Lambda(ast.arguments([], [], None, [], [], None, []), ast.Tuple([name_of(c) for c in cells], ast.Load()))
    kept = [ast.If(ast.Constant(False), [ast.Expr(shared)], [])] if cells else []
    return [located(s, statement) for s in (start, loop, *kept)]


def last_value(above: Sequence[ast.stmt], name: str, accept: Callable[[ast.expr], bool]) -> ast.Assign | None:
    """The statement that set a name last, where it gives it a value of a kind and nothing reads it since."""
    for statement in reversed(above):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return statement if accept(value) else None
        if name in stored(statement) | loaded(statement):
            return None
    return None


def _appended_to(loop: ast.For) -> Iterator[str]:
    for node in ast.walk(loop):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))):
                yield name


class _Joined(ast.NodeTransformer):
    def __init__(self, name: str, resolve):
        self.name, self.resolve = name, resolve

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(args=[ast.Name(id=name), *_]) if name == self.name and is_cat(node, self.resolve):
                return node.args[0]
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        # With no part at all, of no tokens, torch.cat would raise.
        match node.test:
            case (
                ast.Name(id=name)
                | ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)])
                | ast.Compare(
                    left=ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]),
                    ops=[ast.Gt() | ast.NotEq()],
                    comparators=[ast.Constant(value=0)],
                )
            ) if name == self.name:
                return self.visit(node.body)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.name and isinstance(node.ctx, ast.Load):
            raise Unproven(node, f"{self.name} is more than what is concatenated")
        return node
