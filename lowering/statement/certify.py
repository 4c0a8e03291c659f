"""That a graph computes what a match states: the element of the layer's root is the statement, as one object.

What equality of formulas does not cover is proven elsewhere: that ids are in range, rounding, gradients, writes.
"""

from collections import Counter
from collections.abc import Iterator

import torch

from moeblaze_ops.kernels.formulas.expression import GATED_SYMBOLS, PARAMETER_SYMBOLS, UNGATED_SYMBOLS, symbol
from moeblaze_ops.kernels.formulas.named import is_formula_of, is_gated
from moeblaze_ops.lowering.evaluate.evaluator import Unroll
from moeblaze_ops.lowering.facts.subscripts import of_experts_alone
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.index_notation.distribution import terms_of
from moeblaze_ops.lowering.index_notation.expr import Expr, is_changing, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.match_result import MoEMatch, Reading
from moeblaze_ops.lowering.match.reasons import Reason
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.padding import without_padding, written
from moeblaze_ops.lowering.match.terms.pointwise_formula import to_formula
from moeblaze_ops.lowering.match.terms.sums import sums_of_experts, sums_of_vectors
from moeblaze_ops.lowering.statement.layer import Form, Statement
from moeblaze_ops.lowering.statement.operands import Elements
from moeblaze_ops.lowering.statement.rules import LayerForm


def refusal(view: GraphView, match: MoEMatch) -> Reason | None:
    """Why what a match states is not what its root computes, or None if it is."""
    if certified(view, match) is not None:
        return None
    computed = map(LayerForm(match.reading.evaluator).of, _terms(match.reading, view.result(match.root)))
    stored = any(True for term in computed for _ in subexpressions(term, lambda e: e.kind in ("any", "distinct")))
    return Reason.DISTINCT_EXPERTS if stored else Reason.STATEMENT


def certified(view: GraphView, match: MoEMatch) -> Form | None:
    """The form in which the statement of a match is what its root computes, or None if it is not."""
    reading, result = match.reading, view.result(match.root)
    tokens, feature = reading.evaluator.of_token(result)
    elements = Elements(view, reading.evaluator, match.root, tokens, result.shape[:-1])
    algebra, formulas, form_of = elements.algebra, reading.formulas, LayerForm(reading.evaluator).of
    computed = Counter(_terms(reading, result))
    for term, expert in reading.experts:
        placed = without_padding(algebra, expert, elements.token)
        # A term of tokens stands in place of one of places, if that is what it was read as.
        spelled = formulas.spellings(expert.activation)[0]
        if placed is not expert and computed[term] and form_of(written(algebra, formulas, expert, spelled)) is form_of(term):
            computed += Counter({term: -1, written(algebra, formulas, placed, spelled): 1})
    base = () if match.base is None else _terms(reading, _base(view, match))
    added, statement = Counter(base), Statement(match, elements, formulas, feature)
    for activation in formulas.spellings(match.activation):
        if not _is_activation(algebra, match, formulas, activation):
            continue
        for form in statement.forms(len(reading.experts)):
            try:
                stated = added + Counter(statement.terms(form, activation))
                # Terms that are the same as they stand need no rule.
                left, right = (algebra.add(*rest.elements()) for rest in (computed - stated, stated - computed))
                if left is right or form_of(left) is form_of(right):
                    return form
            except Unroll:  # what slots have is a formula of its own for each
                continue
    return None


def _is_activation(algebra: Algebra, match: MoEMatch, formulas: Formulas, read: Expr) -> bool:
    """True if ``read`` is the activation of a match, in the symbols of ``formulas``: numbers that may change stay as they are."""
    numbers = {e: e.args[0].args[0] for e in subexpressions(read, is_changing)}
    present = algebra.substitute(read, {e: algebra.const(number.present) for e, number in numbers.items()})
    halves = GATED_SYMBOLS if is_gated(match.activation) else UNGATED_SYMBOLS
    symbols = dict(zip((formulas.gate, formulas.up), map(symbol, halves), strict=False))
    symbols |= dict(zip(formulas.parameters, map(symbol, PARAMETER_SYMBOLS), strict=True))
    double = any(value.dtype == torch.float64 for view in match.views for value in view.values)
    try:
        alike = is_formula_of(match.activation, to_formula(present, symbols), double=double)
    except ValueError:
        return False
    for number in numbers.values() if alike else ():
        number.guard()
    return alike


def _terms(reading: Reading, value: Value) -> Iterator[Expr]:
    """The terms that add up to the element of a value ``[..., D]``; which sums are multiplied out is as it was read."""
    evaluator, experts = reading.evaluator, {term for term, _ in reading.experts}
    tokens, feature = evaluator.of_token(value)
    for term in terms_of(evaluator.algebra, evaluator.element(value, (*tokens, feature)), sums_of_experts):
        expert = of_experts_alone(evaluator.algebra, term, feature)
        yield from [expert] if expert in experts else terms_of(evaluator.algebra, term, sums_of_vectors(feature))


def _base(view: GraphView, match: MoEMatch) -> Value:
    """What a layer is added to. In the buffer that its sum is written to, it is there again once these writes are gone."""
    is_written = match.root in view.writes and match.base in view.aliases(view.writes[match.root])
    return view.value(match.base) if is_written else view.value_at(match.base, view.position[match.root])
