"""Which ids are numbers of experts, by how they were made: as many counts as experts are those of all of them."""

from typing import Any

from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative
from moeblaze_ops.lowering.obligations.markers import counts_below


def unknown_counted_ids(graph: fx.Graph) -> bool:
    """True if as many counts as experts were taken of ids that may be none of them."""
    counted = [node for node in graph.nodes if node.target is counts_below]
    if not counted:
        return False
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    return not all(_are_below(evaluator, view.value_at(node.args[0], view.position[node]), node.args[1]) for node in counted)


def ids_below(graph: fx.Graph, ids: fx.Node) -> int | None:
    """A number that ids are known to be below at the end of a graph, and not negative."""
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    element = natural_number(evaluator, view.value_at(ids, len(view.position)))
    number = None if element is None else evaluator.algebra.extent(element)
    return number if isinstance(number, int) else None


def natural_number(evaluator: Evaluator, ids: Any) -> Expr | None:
    """An element of ids of which it is known that it is not negative, None of any others."""
    element = evaluator.try_element(ids) if isinstance(ids, Value) else None
    return element if element is not None and never_negative(element) else None


def _are_below(evaluator: Evaluator, ids: Any, number: int) -> bool:
    element = natural_number(evaluator, ids)
    return element is not None and evaluator.algebra.fits(element, number)
