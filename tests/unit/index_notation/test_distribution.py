"""A sum as its terms: they add up to it, whichever sums are multiplied out; and as a product with what all of them have."""

import math
import random
from collections import Counter

import pytest

from moeblaze_ops.lowering.index_notation.distribution import factored, terms_of
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from tests.corpus.element_values import Run


def _drawn(algebra: Algebra, rng: random.Random, variables: list[Expr], depth: int) -> Expr:
    """A sum, a product or a function of what is drawn in the same way, of these variables."""
    kind = rng.choice(("add", "mul", "sum", "call")) if depth else "leaf"
    if kind == "leaf":
        index = algebra.linear(rng.randint(0, 3), [(rng.randint(1, 5), var) for var in variables])
        return algebra.call(rng.choice(("tanh", "sigmoid", "exp")), (index,))
    if kind == "sum":
        var = algebra.var(len(variables), 3, "r")
        return algebra.sum(var, _drawn(algebra, rng, [*variables, var], depth - 1))
    parts = [_drawn(algebra, rng, variables, depth - 1) for _ in range(1 if kind == "call" else rng.choice((2, 2, 3)))]
    if kind == "mul" and rng.random() < 0.3:
        parts.append(parts[0])  # a square
    return algebra.call("tanh", tuple(parts)) if kind == "call" else getattr(algebra, kind)(*parts)


def _whatever(rng: random.Random):
    """What names any of the factors of an expression, itself or something else as sums to multiply out."""

    def sums_in(e: Expr) -> list[Expr]:
        known = [e, *factors_of(e), *(part for part in e.args if isinstance(part, Expr))]
        return rng.sample(known, rng.randint(0, len(known)))

    return sums_in


@pytest.mark.parametrize("seed", range(60))
def test_terms_add_up(seed):
    rng, algebra, number = random.Random(seed), Algebra(), object.__new__(Run).number
    e = _drawn(algebra, rng, [algebra.var(0, 4, "t")], 4)
    terms = list(terms_of(algebra, e, _whatever(rng)))
    for at in range(2):
        values = [number(part, {algebra.var(0, 4, "t"): at}) for part in (e, *terms)]
        assert math.isclose(values[0], math.fsum(values[1:]), rel_tol=1e-9)


def test_more_terms_than_factors():
    algebra = Algebra()
    a, b, c = (algebra.call("tanh", (algebra.var(level, 4, "t"),)) for level in range(3))
    both = algebra.add(a, b)
    terms = [*terms_of(algebra, algebra.mul(both, both, c), lambda e: [f for f in factors_of(e) if f.kind == "add"])]
    expected = [algebra.mul(a, a, c), algebra.mul(a, b, c), algebra.mul(a, b, c), algebra.mul(b, b, c)]
    assert sorted(terms, key=id) == sorted(expected, key=id)


@pytest.mark.parametrize("seed", range(60))
def test_what_all_terms_have_stands_before_their_sum(seed):
    rng, algebra, number = random.Random(seed), Algebra(), object.__new__(Run).number
    parts = [_drawn(algebra, rng, [algebra.var(0, 4, "t")], 2) for _ in range(4)]
    shared = rng.choices(parts, k=rng.randint(0, 2))
    terms = [algebra.mul(algebra.const(rng.choice((-1, 1, 2))), *shared, *rng.choices(parts, k=2)) for _ in range(3)]
    e = algebra.add(*terms)
    made = factored(algebra, e)
    for at in range(2):
        first, second = (number(each, {algebra.var(0, 4, "t"): at}) for each in (e, made))
        assert math.isclose(first, second, rel_tol=1e-9)
    assert Counter(f for part in shared for f in factors_of(part)) <= Counter(factors_of(made)) or e.kind != "add"
