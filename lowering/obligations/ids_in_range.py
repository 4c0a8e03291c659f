"""Which ids are numbers of experts, and which masks are never negative, by how they were made.

A loop over all experts may stand for one over those that occur among such ids, or that such a mask hits.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.facts.non_negative import never_negative
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.indicators import is_count
from moeblaze_ops.lowering.obligations.markers import counts_below


def without_known_ids(graph: fx.Graph, checks: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The checks that ids are below a number, but for those that are proven, which are removed.

    ``checks`` tells the nodes of such a check, ``ids < number`` among them, from others. What is proven to be less than a
    number is proven not to be negative, too.
    """
    return _without_proven(graph, checks, operator.lt, _is_true)


def without_known_masks(graph: fx.Graph, checks: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The checks that a mask is not negative, but for those that are proven, which are removed."""
    return _without_proven(graph, checks, operator.ge, _is_of_counts)


def unknown_counted_ids(graph: fx.Graph) -> bool:
    """Whether as many counts as experts were taken of ids that may be none of them."""
    counted = [node for node in graph.nodes if node.target is counts_below]
    if not counted:
        return False
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    return not all(_are_below(evaluator, view.value_at(node.args[0], view.position[node]), node.args[1]) for node in counted)


def _are_below(evaluator: Evaluator, ids: Value, number: int) -> bool:
    element = _element(evaluator, ids)
    return element is not None and never_negative(element) and evaluator.algebra.fits(element, number)


def _without_proven(
    graph: fx.Graph,
    checks: Callable[[fx.Node], bool],
    comparison: Callable,
    holds: Callable[[GraphView, Evaluator, fx.Node], bool],
) -> list[fx.Node]:
    if not any(node.target is torch._assert_async for node in graph.nodes):
        return []
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method") and checks(node)]
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    compared = [node for node in nodes if node.target is comparison]
    unknown = [node for node in compared if not holds(view, evaluator, node)]
    if unknown or not compared:
        return unknown or nodes
    for node in reversed(nodes):
        graph.erase_node(node)
    return []


def _is_true(view: GraphView, evaluator: Evaluator, compared: fx.Node) -> bool:
    """Whether all elements are true."""
    return _element(evaluator, view.value(compared)) is evaluator.algebra.one


def _is_of_counts(view: GraphView, evaluator: Evaluator, compared: fx.Node) -> bool:
    """Whether what is compared is made of comparisons by sums and products."""
    element = _element(evaluator, view.value_at(compared.args[0], view.position[compared]))
    return element is not None and is_count(element)


def _element(evaluator: Evaluator, value: Value) -> Expr | None:
    indices = tuple(evaluator.algebra.var(axis, size, "r") for axis, size in enumerate(value.shape))
    try:
        return evaluator.element(value, indices)
    except Unroll:
        return None
