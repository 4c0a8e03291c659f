"""Pieces of the trees that take the place of a function's own."""

import ast
from typing import Any

from moeblaze_ops.capture.emptiness import MODULE


def name_of(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def row_groups_call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(name_of(MODULE), function, ast.Load()), list(args), [])


def located(new: ast.AST, place: ast.AST) -> Any:
    """``new``, and what it holds that has no place yet, where ``place`` is."""
    for node in ast.walk(new):
        if "lineno" in node._attributes and not hasattr(node, "lineno"):
            ast.copy_location(node, place)
    return new


def import_row_groups(function: ast.FunctionDef) -> None:
    """Let the function know ``row_groups``, behind its docstring."""
    documented = ast.get_docstring(function, clean=False) is not None
    name = ast.Import([ast.alias("moeblaze_ops.capture.row_groups", MODULE)])
    function.body.insert(int(documented), located(name, function.body[0]))
