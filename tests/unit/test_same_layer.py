"""Experts of sums are compared group by group; this is what it means, over all of them."""

import random
from collections import Counter

import pytest

from moeblaze_ops.lowering.match.same_layer import Chosen, grouped, is_fewer, is_part


def is_part_by_definition(sum_: Counter, whole: Counter) -> bool:
    ids = {chosen.ids for chosen in sum_}
    if not ids <= {chosen.ids for chosen in sum_.keys() & whole.keys()}:
        return False
    own = {chosen: count for chosen, count in whole.items() if chosen.ids in ids}
    return own.keys() != sum_.keys() or len({own[chosen] / count for chosen, count in sum_.items()}) > 1


def random_sum(draw: random.Random) -> Counter:
    experts = [Chosen(frozenset({ids}), frozenset({e})) for ids in draw.sample("abc", draw.randint(1, 3)) for e in range(3)]
    kept = experts if draw.random() < 0.5 else draw.sample(experts, draw.randint(1, len(experts)))
    times = draw.randint(1, 2)
    return Counter({chosen: times if draw.random() < 0.9 else draw.randint(1, 3) for chosen in kept})


@pytest.mark.parametrize("seed", range(4))
def test_parts_and_fewer(seed):
    draw, seen = random.Random(seed), Counter()
    for _ in range(2000):
        sum_, whole = random_sum(draw), random_sum(draw)
        is_known = is_part_by_definition(sum_, whole)
        assert is_part(grouped(sum_), grouped(whole)) is is_known
        is_less = sum_.total() < whole.total() and all(whole[chosen] >= count for chosen, count in sum_.items())
        assert is_fewer(sum_, whole) is is_less
        seen[is_known, is_less] += 1
    assert min(seen[known, less] for known in (True, False) for less in (True, False) if (known, less) != (False, True)) > 20
