"""That a graph computes what a match states: the element of the layer's root is the statement, as one object.

What equality of formulas does not cover is proven elsewhere: that ids differ and are in range, rounding, gradients, writes.
"""

from moeblaze_ops.lowering.evaluate.evaluator import Unroll
from moeblaze_ops.lowering.graph.functional_view import GraphView
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.statement.layer import Form, Statement
from moeblaze_ops.lowering.statement.operands import Elements
from moeblaze_ops.lowering.statement.rules import LayerForm


class NotStated(RuntimeError):
    """A match states something else than its graph computes: an error of the matcher."""


def require_stated(view: GraphView, match: MoEMatch) -> None:
    """Check a match against its graph.

    Raises:
        NotStated: the graph is not proven to compute what the match states.
    """
    if certified(view, match) is None:
        raise NotStated(f"the layer at '{match.root.name}' ({match.spelling}, {match.activation}) is not what its operands state")


def certified(view: GraphView, match: MoEMatch) -> Form | None:
    """The form in which the statement of a match is what its root computes, or None if it is not."""
    reading = match.reading
    elements = Elements(view, reading.evaluator, match.root, reading.tokens, reading.sizes)
    algebra, form_of = elements.algebra, LayerForm(reading.evaluator).of
    computed = form_of(algebra.add(*reading.experts, *reading.others))
    statement = Statement(match, elements, reading.formulas, reading.feature)
    for activation in reading.formulas.spellings(match.activation):
        for form in statement.forms(len(reading.experts)):
            try:
                stated = form_of(algebra.add(*statement.terms(form, activation)))
            except Unroll:  # what slots have is a formula of its own for each
                continue
            if stated is computed:
                return form
    return None
