"""Which ids are numbers of experts, by how they were made: a loop over all experts may stand for one over those that occur."""

import operator
from collections.abc import Callable

import torch
from torch import fx

import moeblaze_ops.lowering.canonical_indexing
import moeblaze_ops.lowering.canonical_products  # noqa: F401  (both fill the table)
from moeblaze_ops.lowering.canonical import TABLE
from moeblaze_ops.lowering.elements import Evaluator, Unroll
from moeblaze_ops.lowering.values import GraphView, Value


def without_known_ids(graph: fx.Graph, checks: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The checks that ids are below a number, but for those that are proven, which are removed.

    ``checks`` tells the nodes of such a check, ``ids < number`` among them, from others.
    """
    if not any(node.target is torch._assert_async for node in graph.nodes):
        return []
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method") and checks(node)]
    view, evaluator = GraphView(graph, TABLE), Evaluator()
    compared = [node for node in nodes if node.target is operator.lt]
    unknown = [node for node in compared if not _is_true(evaluator, view.value(node))]
    if unknown or not compared:
        return unknown or nodes
    for node in reversed(nodes):
        graph.erase_node(node)
    return []


def _is_true(evaluator: Evaluator, compared: Value) -> bool:
    """Whether all elements are true; what is proven to be less than a number is proven not to be negative, too."""
    indices = tuple(evaluator.algebra.var(axis, size, "r") for axis, size in enumerate(compared.shape))
    try:
        return evaluator.element(compared, indices) is evaluator.algebra.one
    except Unroll:
        return False
