"""The form that layers are compared in: what it makes of a formula is the same number."""

import math

import pytest

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.statement.rules import LayerForm
from tests.corpus.element_values import Run

_BODIES = {
    "expert_apart": lambda algebra, expert, place, both: algebra.mul(expert, both),
    "both_apart": lambda algebra, expert, place, both: algebra.mul(expert, place, both),
    "twice": lambda algebra, expert, place, both: algebra.mul(expert, expert, both, both),
    "multiple": lambda algebra, expert, place, both: algebra.mul(algebra.const(3), expert, both),
    "nothing_apart": lambda algebra, expert, place, both: both,
    "of_a_sum": lambda algebra, expert, place, both: algebra.add(expert, algebra.mul(place, both)),
}


@pytest.mark.parametrize("body", _BODIES)
def test_order_of_sums(body):
    """A factor that no place has stands before the sum over the places, whichever sum is written first."""
    evaluator = Evaluator()
    algebra, number = evaluator.algebra, object.__new__(Run).number
    e, c = algebra.var(0, 3, "r"), algebra.var(1, 4, "r")
    expert, place = algebra.call("tanh", (algebra.linear(1, [(1, e)]),)), algebra.call("exp", (c,))
    both = algebra.call("sigmoid", (algebra.linear(0, [(5, e), (-3, c)]),))
    summed = _BODIES[body](algebra, expert, place, both)
    forms = [LayerForm(evaluator).of(algebra.sum(a, algebra.sum(b, summed))) for a, b in ((e, c), (c, e))]
    expected = sum(number(summed, {e: i, c: j}) for i in range(3) for j in range(4))
    assert all(math.isclose(number(form, {}), expected, rel_tol=1e-12) for form in forms)
    assert (forms[0] is forms[1]) == (body in ("expert_apart", "twice", "multiple"))


def test_a_factor_of_all_terms():
    """A sum in which all terms have a factor is the same, whichever of both is written; of two factors it is another."""
    evaluator = Evaluator()
    algebra, number = evaluator.algebra, object.__new__(Run).number
    a, b, w, v = (algebra.call("tanh", (algebra.linear(i, [(1, algebra.var(0, 3, "t"))]),)) for i in range(1, 5))
    mul, add, number_2 = algebra.mul, algebra.add, algebra.const(-2)
    pairs = (
        (mul(w, add(a, b)), add(mul(w, a), mul(w, b))),
        (mul(w, w, add(a, v, b)), add(mul(w, w, a), mul(w, w, v), mul(w, w, b))),
        (mul(w, add(a, mul(number_2, b))), add(mul(w, a), mul(number_2, w, b))),
        (mul(v, add(mul(w, add(a, b)), a)), add(mul(v, w, a), mul(v, w, b), mul(v, a))),
        (add(mul(w, a), w), mul(w, add(a, algebra.one))),
    )
    of = LayerForm(evaluator).of
    for pair in pairs[:3] + pairs[4:]:
        assert of(pair[0]) is of(pair[1])
    for e in (e for pair in pairs for e in pair):
        assert math.isclose(number(of(e), {algebra.var(0, 3, "t"): 1}), number(e, {algebra.var(0, 3, "t"): 1}), rel_tol=1e-12)
    assert of(add(mul(w, a), mul(v, b))) is not of(mul(w, add(a, b)))
