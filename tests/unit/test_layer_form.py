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
