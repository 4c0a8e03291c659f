"""Which ends of groups are running counts: they never fall, so that every row is in one group."""

from collections.abc import Callable

from torch import fx

import moeblaze_ops.lowering.canonical_indexing
import moeblaze_ops.lowering.canonical_products  # noqa: F401  (both fill the table)
from moeblaze_ops.lowering.canonical import TABLE
from moeblaze_ops.lowering.elements import Evaluator, Unroll
from moeblaze_ops.lowering.expressions import Expr
from moeblaze_ops.lowering.values import GraphView, Value


def without_running_counts(graph: fx.Graph, searches: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The nodes that search for a row's group among ends that may fall."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and searches(node)]
    if not nodes:
        return []
    view, evaluator = GraphView(graph, TABLE), Evaluator()
    return [node for node in nodes if not _is_running_count(evaluator, view.value(node))]


def _is_running_count(evaluator: Evaluator, found: Value) -> bool:
    if found.op != "searched":
        return False
    ends = found.args[0]
    number = evaluator.algebra.var(0, ends.shape[0], "r")
    try:
        if ends.shape[0] == 1:
            return _is_count(evaluator.element(ends, (evaluator.algebra.zero,)))
        end = evaluator.element(ends, (number,))
    except Unroll:
        return False
    return end.kind == "prefix" and end.args[2] is number and _is_count(end.args[1])


def _is_count(e: Expr) -> bool:
    """Built from comparisons by sums and products: nothing in it is negative."""
    if e.kind == "const":
        return e.args[0] >= 0
    if e.kind == "sum":
        return _is_count(e.args[1])
    return e.kind in ("eq", "any", "distinct") or (e.kind in ("mul", "add") and all(map(_is_count, e.args)))
