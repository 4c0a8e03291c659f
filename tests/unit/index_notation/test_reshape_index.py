"""Which axes of two shapes hold the same elements, and what an index of one is in the other."""

import random
from itertools import product

import pytest
import sympy

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.index_notation.reshape_index import common_groups

TOKENS = sympy.Symbol("t", integer=True, positive=True)


def _shape_of(rng, total):
    """A random shape of so many elements, with axes of one here and there."""
    shape = []
    while total > 1:
        shape.append(rng.choice([n for n in range(2, total + 1) if total % n == 0]))
        total //= shape[-1]
    for _ in range(rng.randint(0, 2)):
        shape.insert(rng.randint(0, len(shape)), 1)
    return tuple(shape)


@pytest.mark.parametrize("total", [1, 6, 12, 16, 24])
def test_places_are_those_of_row_major_order(total):
    rng, evaluator = random.Random(total), Evaluator()
    for _ in range(30):
        outer, inner = _shape_of(rng, total), _shape_of(rng, total)
        places = (map(evaluator.algebra.const, at) for at in product(*map(range, outer)))
        found = [tuple(i.args[0] for i in evaluator.reshape_indices(outer, inner, tuple(at))) for at in places]
        assert found == list(product(*map(range, inner)))


@pytest.mark.parametrize(
    ("a", "b", "groups"),
    [
        ((6, 4), (2, 3, 1, 4), [([0], [0, 1]), ([], [2]), ([1], [3])]),
        ((1, TOKENS), (TOKENS,), [([0], []), ([1], [0])]),
        ((TOKENS, 2, 4), (2 * TOKENS, 4), [([0, 1], [0]), ([2], [1])]),
        ((0, 4), (0,), [([0, 1], [0])]),
    ],
)
def test_groups_are_the_finest(a, b, groups):
    assert [tuple(map(list, group)) for group in common_groups(a, b)] == groups
