"""Which ends of groups are running counts: they never fall, so that no row is in two groups.

Counts of all ids cover all rows, too: as many as there are ids, each of which is one of the numbers that are counted.
"""

from collections.abc import Callable

from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.evaluate.groups import rows_counted
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.index_notation.expr import Expr


def without_running_counts(graph: fx.Graph, searches: Callable[[fx.Node], bool], *, covering: bool) -> list[fx.Node]:
    """The nodes that search for a row's group among ends that may fall, or may leave rows out if ``covering``."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and searches(node)]
    if not nodes:
        return []
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    return [node for node in nodes if not _is_running_count(evaluator, view.value(node), covering)]


def _is_running_count(evaluator: Evaluator, found: Value, covering: bool) -> bool:
    if found.op != "searched":
        return False
    ends = found.args[0]
    number = evaluator.algebra.var(0, ends.shape[0], "r")
    try:
        if ends.shape[0] == 1:
            return not covering and _is_count(evaluator.element(ends, (evaluator.algebra.zero,)))
        end = evaluator.element(ends, (number,))
    except Unroll:
        return False
    if end.kind != "prefix" or end.args[2] is not number or not _is_count(end.args[1]):
        return False
    num_groups = None if _of_bincount(ends) else ends.shape[0]
    return not covering or rows_counted(evaluator.algebra, *evaluator.algebra.open(end), found.shape[0], num_groups)


def _of_bincount(ends: Value) -> bool:
    """Whether there are as many numbers as the ids need, however large they are."""
    while ends.op in ("prefix", "cast", "reshape"):
        ends = ends.args[0]
    return ends.op == "sum" and target_name(ends.node) == "bincount"


def _is_count(e: Expr) -> bool:
    """Built from comparisons by sums and products: nothing in it is negative."""
    if e.kind == "const":
        return e.args[0] >= 0
    if e.kind == "sum":
        return _is_count(e.args[1])
    return e.kind in ("eq", "any", "distinct") or (e.kind in ("mul", "add") and all(map(_is_count, e.args)))
