"""That a graph computes what a match states: the element of the layer's root is the statement, as one object.

What equality of formulas does not cover is proven elsewhere: that ids are in range, rounding, gradients, writes.
"""

from collections import Counter

from moeblaze_ops.lowering.evaluate.evaluator import Unroll
from moeblaze_ops.lowering.graph.functional_view import GraphView
from moeblaze_ops.lowering.index_notation.expr import Expr, subexpressions
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.reasons import Reason
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.terms.padding import without_padding, written
from moeblaze_ops.lowering.statement.layer import Form, Statement
from moeblaze_ops.lowering.statement.operands import Elements
from moeblaze_ops.lowering.statement.rules import LayerForm


def refusal(view: GraphView, match: MoEMatch) -> Reason | None:
    """Why what a match states is not what its root computes, or None if it is."""
    if certified(view, match) is not None:
        return None
    form_of, experts = LayerForm(match.reading.evaluator).of, [term for term, _ in match.reading.experts]
    computed = map(form_of, (*experts, *match.reading.others))
    stored = any(True for term in computed for _ in subexpressions(term, lambda e: e.kind in ("any", "distinct")))
    return Reason.DISTINCT_EXPERTS if stored else Reason.STATEMENT


def certified(view: GraphView, match: MoEMatch) -> Form | None:
    """The form in which the statement of a match is what its root computes, or None if it is not."""
    reading = match.reading
    elements = Elements(view, reading.evaluator, match.root, reading.tokens, reading.sizes)
    algebra, form_of = elements.algebra, LayerForm(reading.evaluator).of

    def of_tokens(term: Expr, expert: ExpertTerm) -> Expr:
        """A term of tokens in place of one of places, if it is what it was read as."""
        placed = without_padding(algebra, expert, elements.token)
        if placed is expert or form_of(written(algebra, reading.formulas, expert)) is not form_of(term):
            return term
        return written(algebra, reading.formulas, placed)

    computed = Counter((*(of_tokens(*own) for own in reading.experts), *reading.others))
    statement = Statement(match, elements, reading.formulas, reading.feature)
    for activation in reading.formulas.spellings(match.activation):
        for form in statement.forms(len(reading.experts)):
            try:
                stated = Counter(statement.terms(form, activation))
                # Terms that are the same as they stand need no rule.
                left, right = (algebra.add(*rest.elements()) for rest in (computed - stated, stated - computed))
                if left is right or form_of(left) is form_of(right):
                    return form
            except Unroll:  # what slots have is a formula of its own for each
                continue
    return None
