"""Experts that give a token back as it is: numbers behind those of the experts that have weights, as in LongCat-Flash.

    out.index_add_(0, token, x[token] * weights[token, slot, None])        token, slot = where(ids == e), for e from E on

All of them together add ``x`` times the sum of the weights whose ids are such numbers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeblaze_ops.lowering.evaluate.evaluator import MAX_PROJECTIONS, Evaluator, Unroll
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand
from moeblaze_ops.lowering.match.operands.find_routing import find_routing
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.terms.expert_coverage import prove_distinct
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.terms.routing_term import read_compared

Routed = tuple[Operand, Operand | None, int]
"""Ids, weights and K, as ``find_routing`` gives them."""


def split_off(total: Value, has_only_experts: Callable[[Value], bool]) -> tuple[Value, tuple[Value, ...]]:
    """The sum of the experts with weights, and every later one up to ``total``, each with the rows of one more number."""
    inner, later = total, []
    while not has_only_experts(inner):
        if inner.op != "put" or not inner.args[-1] or len(inner.shape) != 2:
            return total, ()
        later.append(inner)
        inner = inner.args[0]
    return inner, tuple(later)


@dataclass(frozen=True)
class Passed:
    """Ids from E on, below E + ``count``, give ``x``."""

    x: Operand
    count: int


def prove_passed(
    evaluator: Evaluator, finder: Finder, later: Sequence[Value], feature: Expr, expert: ExpertTerm, routed: Routed, first: int
) -> Passed:
    """What ``later`` sums add: what ``expert`` is given, to the numbers from ``first`` on, routed as the experts are."""
    algebra = evaluator.algebra
    added = [_added(evaluator, total, feature) for total in later]
    x = _given(algebra, expert, feature, added[0])
    numbers = []
    for term in added:
        routing = read_compared(algebra, None, (), _without(term, algebra.substitute(x, {expert.feature_in: feature})))
        prove(routing.kept is None, Reason.SLOT_WEIGHTS, "tokens that are passed on are dropped")
        own = find_routing(algebra, finder, [routing], MAX_PROJECTIONS)
        prove(own == routed, Reason.SLOT_WEIGHTS, "tokens that are passed on are routed in another way")
        prove_distinct(algebra, [routing], of_all=False)
        numbers.append(routing.expert.args[0])
    expected = list(range(first, first + len(later)))
    prove(sorted(numbers) == expected, Reason.EXPERT_COVERAGE, f"tokens are passed on for the numbers {sorted(numbers)}")
    prove(routed[1] is not None and not routed[1].gathered, Reason.SLOT_WEIGHTS, "no weights of slots for what is passed on")
    found = finder.find((x,), (expert.feature_in,), expert.feature_in.args[1], MAX_PROJECTIONS)
    prove(found is not None, Reason.DIFFERENT_INPUTS, "what is passed on is no tensor")
    return Passed(found, len(later))


def _given(algebra: Algebra, expert: ExpertTerm, feature: Expr, added: Expr) -> Expr:
    """What the expert is given, before its products cast it if that is what was ``added``."""
    x = expert.x
    while x.kind == "cast" and not _has(added, algebra.substitute(x, {expert.feature_in: feature})):
        x = x.args[1]
    return x


def _has(product: Expr, x: Expr) -> bool:
    return Counter(factors_of(x)) <= Counter(factors_of(product))


def _added(evaluator: Evaluator, total: Value, feature: Expr) -> Expr:
    """What rows that were added last are to one token, in the operands of the layer."""
    algebra = evaluator.algebra
    _, (rows, *_), _, source, _ = total.args
    token = algebra.zero if total.shape[0] == 1 else algebra.var(0, total.shape[0], "t")
    while source.op == "cast" and source.args[0].dtype.is_floating_point:
        source = source.args[0]
    prove(len(rows.shape) == 1 and len(source.shape) == 2, Reason.OTHER_TERMS)
    row = algebra.fresh((token, feature), rows.shape[0])
    try:
        body = evaluator.element(source, (row, feature), MAX_PROJECTIONS)
        return evaluator.landed(row, [evaluator.element(rows, (row,))], (token,), total.shape, body, MAX_PROJECTIONS)
    except Unroll:
        raise Declined(Reason.OTHER_TERMS) from None


def _without(product: Expr, x: Expr) -> tuple[Expr, ...]:
    """The other factors of a product that has those of ``x``."""
    prove(_has(product, x), Reason.OTHER_TERMS, "rows that are no tokens as they were given to the experts")
    return tuple((Counter(factors_of(product)) - Counter(factors_of(x))).elements())
