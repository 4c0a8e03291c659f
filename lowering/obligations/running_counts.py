"""Which ends of groups are running counts: they never fall, so that no row is in two groups.

Counts of all ids cover all rows, too: as many as there are ids, each of which is one of the numbers that are counted.
"""

import math
from collections.abc import Callable

from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.facts.unique_ids import are_distinct
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.index_notation.expr import Expr, Size, factors_of, same_size
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


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
    return not covering or _counts_all(evaluator.algebra, *evaluator.algebra.open(end), num_groups, found.shape[0])


def _of_bincount(ends: Value) -> bool:
    """Whether there are as many numbers as the ids need, however large they are."""
    while ends.op in ("prefix", "cast", "reshape"):
        ends = ends.args[0]
    return ends.op == "sum" and target_name(ends.node) == "bincount"


def _counts_all(algebra: Algebra, number: Expr, counts: Expr, num_groups: Size | None, num_rows: Size) -> bool:
    """Whether ``counts`` of the numbers below ``num_groups``, of all if None, add up to ``num_rows``."""
    axes: list[Expr] = []
    while counts.kind == "sum":
        axis, counts = algebra.open(counts)
        axes.append(axis)
    hits = [e for e in factors_of(counts) if e.kind == "eq"]
    keys = [side for hit in hits for side in hit.args if side is not number]
    if len(hits) != 1 or len(keys) != 1 or not axes:
        return False
    once = algebra.mul(hits[0], algebra.distinct(keys[0], axes[-1]))
    exact = counts is hits[0] or (counts is once and are_distinct(keys[0]))
    bound = algebra.extent(keys[0])
    known = num_groups is None or (isinstance(bound, int) and isinstance(num_groups, int) and bound <= num_groups)
    return exact and known and same_size(math.prod(axis.args[1] for axis in axes), num_rows)


def _is_count(e: Expr) -> bool:
    """Built from comparisons by sums and products: nothing in it is negative."""
    if e.kind == "const":
        return e.args[0] >= 0
    if e.kind == "sum":
        return _is_count(e.args[1])
    return e.kind in ("eq", "any", "distinct") or (e.kind in ("mul", "add") and all(map(_is_count, e.args)))
