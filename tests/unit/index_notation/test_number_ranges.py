"""What is said of the numbers that an index may be is true of all that it is."""

import random
from itertools import product

import pytest
import sympy
import torch

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import complement_of
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative
from moeblaze_ops.lowering.index_notation.pointwise import opposite

SIZE = sympy.Symbol("s", integer=True, positive=True)


@pytest.fixture
def algebra():
    return Evaluator().algebra


def test_bounds_of_a_linear_index(algebra):
    rng = random.Random(0)
    for _ in range(300):
        extents = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        scales, constant = [rng.choice((-3, -1, 1, 2)) for _ in extents], rng.randint(-4, 9)
        e = algebra.linear(constant, zip(scales, (algebra.var(level, n, "r") for level, n in enumerate(extents)), strict=True))
        values = [constant + sum(map(int.__mul__, scales, at)) for at in product(*map(range, extents))]
        assert never_negative(e) == (min(values) >= 0)
        assert algebra.extent(e) == (max(values) + 1 if min(values) >= 0 else None)


@pytest.mark.parametrize("least", [-1, 0])
def test_bounds_of_a_quotient(algebra, least):
    """It is negative where what is divided is: -1 // 2 is -1."""
    whole, mask = (algebra.var(level, 5, "r") for level in (0, 1))
    e = algebra.call("where", (algebra.eq(mask, algebra.zero), whole, algebra.const(least)))
    quotients = [algebra.div(e, 2), algebra.div(algebra.linear(least, [(1, whole)]), 2)]
    assert [never_negative(quotient) for quotient in quotients] == [least == 0] * 2


def test_bounds_of_an_index_that_a_mask_makes_zero(algebra):
    index, at = algebra.var(0, 5, "r"), algebra.var(1, 5, "r")
    is_index, is_at = (algebra.eq(var, algebra.const(3)) for var in (index, at))
    kept, two = opposite(algebra, is_index), algebra.const(2)
    assert [algebra.extent(algebra.mul(kept, e)) for e in (index, algebra.linear(1, [(1, index)]), two)] == [5, 6, 3]
    assert [algebra.extent(algebra.mul(kept, e, is_at)) for e in (index, algebra.mul(index, at))] == [5, None]
    assert algebra.extent(algebra.mul(kept, algebra.linear(-1, [(1, index)]))) is None
    whole = algebra.var(2, 15, "r")
    number, other = algebra.mod(whole, 5), algebra.div(whole, 3)
    marks = [opposite(algebra, algebra.eq(each, algebra.const(n))) for each, n in ((number, 4), (number, 3), (other, 4))]
    assert [algebra.extent(algebra.mul(mark, number)) for mark in marks] == [4, 5, 5]
    only = Value("argmax", (), (5,), torch.int64, None)
    only.bound = 1
    zero = algebra.leaf(only, (index,))
    assert algebra.extent(algebra.mul(opposite(algebra, algebra.eq(zero, algebra.zero)), zero)) == 1


def test_bounds_where_sizes_are_symbols(algebra):
    row = algebra.var(0, SIZE, "r")
    assert never_negative(algebra.linear(SIZE - 1, [(-1, row)])) and never_negative(algebra.linear(0, [(SIZE, row)]))
    assert not never_negative(algebra.linear(SIZE - 2, [(-1, row)])) and not never_negative(algebra.linear(0, [(SIZE - 3, row)]))
    assert algebra.extent(algebra.linear(SIZE - 1, [(-1, row)])) == SIZE  # the rows from the last one on
    assert not never_negative(algebra.linear(9 - 3 * SIZE, [(SIZE - 3, algebra.var(0, 4, "r"))]))  # 9 - 3 s, at 0


def test_extents_of_numbers(algebra):
    numbers = 3, 0.5, SIZE, SIZE - 2, -1, float("nan"), float("-inf")
    assert [algebra.extent(algebra.const(number)) for number in numbers] == [4, 1.5, SIZE + 1, None, None, None, None]


def test_what_is_taken_from_one(algebra):
    m, n = (algebra.eq(algebra.var(level, 4, "r"), algebra.const(1)) for level in (0, 1))
    without = opposite(algebra, algebra.mul(m, n))
    assert set(complement_of(without)) == {m, n} and is_indicator(without)
    assert opposite(algebra, without) is algebra.mul(m, n)
    two, minus = algebra.const(2), algebra.const(-1)
    others = algebra.add(algebra.one, m), algebra.add(two, algebra.mul(minus, m)), algebra.add(algebra.one, algebra.mul(two, m))
    assert not any(complement_of(e) or is_indicator(e) for e in (*others, algebra.add(m, algebra.mul(minus, n))))
