"""Which number a count is of is a guess: whatever is guessed, the count is that of its number among the counts of all."""

import pytest
import torch

from moeblaze_ops.lowering.evaluate import groups
from moeblaze_ops.lowering.evaluate.counted_numbers import count_of_any
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import Value

E, T = 4, 6


@pytest.fixture
def evaluator():
    return Evaluator()


@pytest.fixture
def count_of(evaluator):
    algebra, ids = evaluator.algebra, Value("input", (), (T,), torch.int64, None)
    ids.bound = E
    row = algebra.var(1, T, "r")
    return lambda number: algebra.sum(row, algebra.eq(algebra.leaf(ids, (row,)), number))


def _none(algebra, count):
    return None


def _another_number(algebra, count):
    var, counts, number = count_of_any(algebra, count)
    return var, counts, number + 1


def _alike(algebra, count):
    return algebra.var(0, E, "r"), count, 0


def _no_count(algebra, count):
    var, counts, number = count_of_any(algebra, count)
    less = algebra.mul(algebra.const(-1), algebra.call("sign", (algebra.linear(-number, [(1, var)]),)))
    return var, algebra.add(counts, less), number


@pytest.mark.parametrize("guess", [count_of_any, _none, _another_number, _alike, _no_count])
def test_whatever_is_guessed(evaluator, count_of, guess, monkeypatch):
    monkeypatch.setattr(groups, "count_of_any", guess)
    algebra = evaluator.algebra
    for number in range(E):
        count = count_of(algebra.const(number))
        run = evaluator.numbered(count)
        assert (run is not None) is (guess in (count_of_any, _alike))
        assert run is None or algebra.substitute(run.counts, {run.var: algebra.const(run.number)}) is count
        if guess is count_of_any:
            assert run.number == number and run.counts is count_of(run.var)


def test_a_count_of_two_numbers_is_of_none(evaluator, count_of):
    algebra = evaluator.algebra
    assert evaluator.numbered(algebra.mul(*map(count_of, map(algebra.const, (1, 2))))) is None
