"""Counts of ids that are as many as experts, where a ``bincount`` gives as many as the ids need.

    sizes = torch.bincount(ids, minlength=E).tolist()       becomes     sizes = row_groups.counts(ids, E).tolist()

So that Dynamo knows how many numbers there are. That all ids are below E is proven in the graph.
"""

import ast
from collections.abc import Callable
from types import CodeType
from typing import Any

from moeblaze_ops.capture.host_counts import counted_below
from moeblaze_ops.capture.trees.build import located, row_groups_call


def may_count(code: CodeType) -> bool:
    return "bincount" in code.co_names


def count_below(function: ast.FunctionDef, resolve: Callable[[ast.expr], Any]) -> list[int]:
    """Change every ``bincount`` of a function that has a least length; returns their lines."""
    counts = _Counts(resolve)
    counts.visit(function)
    return counts.lines


class _Counts(ast.NodeTransformer):
    def __init__(self, resolve: Callable[[ast.expr], Any]):
        self.resolve, self.lines = resolve, []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        named = isinstance(node.func, ast.Attribute) and node.func.attr == "bincount"
        if named and (counted := counted_below(node, self.resolve)) is not None:
            self.lines.append(node.lineno)
            node = located(row_groups_call("counts", *counted), node)
        return self.generic_visit(node)
