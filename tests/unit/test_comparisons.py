"""Comparisons of masks and counts with numbers agree with what they are of zeros and ones."""

import operator

import pytest

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.index_notation.pointwise import threshold

NAMES = ("eq", "ne", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("number", [0, 0.5, 1])
@pytest.mark.parametrize("name", NAMES)
def test_of_a_mask(name, number):
    algebra = Evaluator().algebra
    mask = algebra.eq(algebra.var(0, 4, "r"), algebra.const(1))
    found = threshold(algebra, name, [mask, algebra.const(number)])
    negated = algebra.add(algebra.one, algebra.mul(algebra.const(-1), mask))
    values = {mask: (0, 1), negated: (1, 0), algebra.zero: (0, 0), algebra.one: (1, 1)}
    assert values[found] == tuple(int(getattr(operator, name)(truth, number)) for truth in (0, 1))


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in NAMES for number in (0, 0.5, 1)])
def test_of_a_count(name, number):
    """It is a mask where none and some are told apart, and what is one, two or three makes no difference."""
    algebra = Evaluator().algebra
    slot = algebra.var(1, 3, "r")
    count = algebra.sum(slot, algebra.eq(slot, algebra.var(0, 4, "r")))
    outcomes = [getattr(operator, name)(truth, number) for truth in (0, 1, 2, 3)]
    found = threshold(algebra, name, [count, algebra.const(number)])
    assert found is None or (found.kind == "any" and outcomes == [False, True, True, True])


@pytest.mark.parametrize(("name", "number"), [("gt", 0), ("ne", 0), ("ge", 1)])
def test_counts_above_zero(name, number):
    algebra = Evaluator().algebra
    slot = algebra.var(1, 3, "r")
    count = algebra.sum(slot, algebra.eq(slot, algebra.var(0, 4, "r")))
    assert threshold(algebra, name, [count, algebra.const(number)]) is algebra.any(slot, algebra.eq(slot, algebra.var(0, 4, "r")))


def test_other_numbers_are_left_alone():
    """A narrow dtype may hold another number in their place."""
    algebra = Evaluator().algebra
    mask = algebra.eq(algebra.var(0, 4, "r"), algebra.const(1))
    assert threshold(algebra, "gt", [mask, algebra.const(1e-10)]) is None
    assert threshold(algebra, "add", [mask, algebra.const(1)]) is None
