"""Which counts and weights are zero where a comparison of their sum comes out one way, against all that they may be."""

import math
import operator
import random
from itertools import product

import pytest

from moeblaze_ops.lowering.index_notation.comparisons import opposite
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.obligations.zero import all_zero, zero_where

ALGEBRA = Algebra()
E, T = ALGEBRA.var(0, 4, "r"), ALGEBRA.var(1, 6, "r")
FLAG = ALGEBRA.eq(E, ALGEBRA.const(1))
COUNT = ALGEBRA.sum(T, ALGEBRA.eq(ALGEBRA.linear(0, [(1, E), (1, T)]), ALGEBRA.const(2)))
WEIGHT = ALGEBRA.call("sigmoid", (E,))
VALUES = {FLAG: (0, 1), COUNT: (0, 1, 2, 3, 4), WEIGHT: (0, math.ulp(0.0), 0.25, 0.5, 1.0, 1.5, 2.0, 4.0)}
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


@pytest.mark.parametrize("count", (1, 2))
def test_all_zero(count):
    draw, found = random.Random(0), 0
    for _ in range(4000):
        terms = dict.fromkeys(draw.sample(list(VALUES), count))
        terms = {term: draw.choice((1, 2, 0.5, -1, -2)) for term in terms}
        constant, compare, truth = draw.choice((-2, -1, -0.5, 0, 0.5, 1, 2)), draw.choice(COMPARISONS), draw.random() < 0.5
        sums = {values: constant + sum(map(operator.mul, terms.values(), values)) for values in product(*map(VALUES.get, terms))}
        where = [values for values, total in sums.items() if compare(total, 0) is truth]
        expected = bool(where) and not any(map(any, where))
        known = all_zero(compare, constant, terms, truth)
        if count == 1:
            assert bool(known) is expected, (compare, constant, terms, truth)
        assert not known or expected, (compare, constant, terms, truth)
        assert not known or known == list(terms)
        found += bool(known)
    assert found > 100


@pytest.mark.parametrize("times, known", [(2, [COUNT]), (1.0004, [])])
def test_products_that_round(times, known):
    """Of fp16 ``count * 1.0004`` is no more than ``count`` where there is one."""
    asked = ALGEBRA.call("le", (ALGEBRA.mul(ALGEBRA.const(times), COUNT), COUNT))
    assert zero_where(ALGEBRA, asked, True) == known


def test_counts_that_are_not_zero():
    """``count != 0`` is what is left of one by ``count == 0``."""
    hit = ALGEBRA.eq(COUNT, ALGEBRA.zero)
    asked = opposite(ALGEBRA, hit)
    assert zero_where(ALGEBRA, asked, False) == [COUNT] and zero_where(ALGEBRA, asked, True) == [hit]
