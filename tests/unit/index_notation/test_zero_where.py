"""Which counts and weights are zero where a comparison of their sum comes out one way, against all that they may be."""

import math
import operator
import random
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.kernels.formulas.composites import COMPOSITES
from moeblaze_ops.kernels.formulas.expression import ARITY
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.pointwise import apply_pointwise, opposite
from moeblaze_ops.lowering.obligations.zero import all_zero, zero_where

ALGEBRA = Algebra()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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


def test_functions_of_zero():
    """What becomes zero of zero is zero exactly, in each dtype, with a gradient that is a number; other functions are left."""
    of_one = {*COMPOSITES, *(name for name, number in ARITY.items() if number == 1)} - {"prelu", "threshold"}
    functions = {name: getattr(F, name, None) or getattr(torch, name, None) for name in of_one}
    functions |= {"gelu_tanh": partial(F.gelu, approximate="tanh"), "hardshrink": F.hardshrink}
    kept = [e for e in functions if apply_pointwise(ALGEBRA, e, [ALGEBRA.zero], (), integers=False) is ALGEBRA.zero]
    assert {"relu", "gelu", "gelu_tanh", "tanh", "erf", "selu", "mish", "relu6", "hardswish", "sin", "softsign"} <= {*kept}
    assert {"sqrt", "exp", "softplus", "sigmoid", "rsqrt", "log", "logsigmoid"}.isdisjoint(kept)
    for name, zero, dtype in product(kept, (0.0, -0.0), DTYPES):
        x = torch.tensor([zero], dtype=dtype, requires_grad=True)
        y = functions[name](x)
        y.sum().backward()
        assert not y.any() and x.grad.isfinite().all(), name
    for low, high in ((None, -1.0), (-1.0, None), (-1.0, 1.0), (0.0, 0.0), (0.5, 1.0), (-1.0, -0.5), (None, -0.5)):
        found = apply_pointwise(ALGEBRA, "clamp", [ALGEBRA.zero], (low, high), integers=False)
        is_zero = torch.zeros(1).clamp(low, high).item() == 0
        assert (found is ALGEBRA.zero) is is_zero
    assert apply_pointwise(ALGEBRA, "exp", [ALGEBRA.zero], (), integers=False) is not ALGEBRA.zero
