"""Lists of rows of one group after another that are only concatenated: a part without rows may as well be missing.

    parts = []                                       parts = []
    for e in range(E):                               for e in range(E):
        token, slot = torch.where(ids == e)              token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        parts.append(experts[e](x[token]))               parts = row_groups.appended(parts, experts[e](x[token]), token)
    y = torch.cat(parts)                             y = torch.cat(parts)
"""

import ast
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moeblaze_ops.capture.trees.build import located, name_of, row_groups_call
from moeblaze_ops.capture.trees.syntax import is_empty_list, is_zero

CATS = (torch.cat, torch.concat, torch.concatenate)
"""Functions that concatenate a list of tensors."""


def joined_lists(function: ast.FunctionDef, resolve: Callable[[ast.expr], Any]) -> frozenset[str]:
    """Names that only hold lists which are empty at first, are appended to by statements, and concatenated along axis 0."""
    served = {id(name) for node in ast.walk(function) for name in _served(node, resolve)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    arguments = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
    appended = {node.value.func.value.id for node in ast.walk(function) if is_append(node)}
    return frozenset(appended - arguments - {node.id for node in names if id(node) not in served})


def is_append(node: ast.AST) -> bool:
    """Whether a statement appends one thing to a list that has a name."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr="append"), args=[part], keywords=[])):
            return not isinstance(part, ast.Starred)
    return False


def is_cat(call: ast.Call, resolve: Callable[[ast.expr], Any]) -> bool:
    """Whether a call concatenates its first argument along the first axis."""
    match call:
        case ast.Call(func=func, args=[_, *along], keywords=keywords):
            dims = [*along, *(k.value for k in keywords if k.arg in ("dim", "axis"))]
            alone = len(dims) == len(along) + len(keywords) <= 1
            return resolve(func) in CATS and alone and all(is_zero([dim]) for dim in dims)
    return False


def without_appending(function: ast.FunctionDef, parts: dict[int, str]) -> None:
    """Make statements that append new lists instead; ``parts``: by their identity, a name of rows that each part has."""
    _Appended(parts).visit(function)


def _served(node: ast.AST, resolve: Callable[[ast.expr], Any]) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(targets=[ast.Name() as name], value=value) if is_empty_list(value):
            yield name
        case ast.Call(args=[ast.Name() as name, *_]) if is_cat(node, resolve):
            yield name
        case ast.Expr() if is_append(node):
            yield node.value.func.value


class _Appended(ast.NodeTransformer):
    def __init__(self, parts: dict[int, str]):
        self.parts = parts

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        rows = self.parts.get(id(node))
        if rows is None:
            return node
        name = node.value.func.value.id
        longer = row_groups_call("appended", name_of(name), *node.value.args, name_of(rows))
        return located(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], longer), node), node)
