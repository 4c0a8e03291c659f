"""What zero-computation experts add to a layer, as plain operators on ``[T, K]`` and ``[T, D]`` that Inductor fuses.

out + x * where(ids >= E, weights, 0).sum(1, True)              LongCat-Flash: ids from E on give the token
"""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import fx

from moeblaze_ops.lowering.graph.functional_view import at_least_fp32
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.rewrite.inserter import Inserter


def numbered(insert: Inserter, numbers: Sequence[int], ids_TK: fx.Node) -> fx.Node:
    """The place of each id among ``numbers``, -1 for any other id."""
    runs = list(_runs(numbers))
    places = [_place(insert, ids_TK, first, place) for first, _, place in runs]
    inside = [_is_between(insert, ids_TK, first, last) for first, last, _ in runs]
    if len(runs) == 1:
        return insert.call("masked_fill", places[0], insert.call(torch.logical_not, inside[0]), -1)
    result = insert.call(torch.full_like, ids_TK, -1)
    for place, mask in zip(places, inside, strict=True):
        result = insert.call(torch.where, mask, place, result)
    return result


def with_zero_computation(
    insert: Inserter, match: MoEMatch, out: fx.Node, weights_TK: fx.Node | None, ids_TK: fx.Node
) -> fx.Node:
    """``out`` and what experts without projections add to it."""
    for own in match.zero_computation:
        inside = [_is_between(insert, ids_TK, first, last) for first, last, _ in _runs(own.numbers)]
        mask_TK = reduce(lambda a, b: insert.call(torch.logical_or, a, b), inside)
        if weights_TK is None:
            share_TK = insert.call("to", mask_TK, at_least_fp32(match.dtype))
        else:
            share_TK = insert.call("masked_fill", weights_TK, insert.call(torch.logical_not, mask_TK), 0)
        share_T1 = insert.call("sum", share_TK, 1, True)
        if own.of_token is not None:
            share_T1 = insert.call(torch.mul, share_T1, insert.rows(own.of_token, 1))
        share_T1 = insert.times(share_T1, own.factor)
        vector = insert.numbers(own.vector) if own.is_constant else insert.rows(own.vector, match.out_width)
        out = insert.call(torch.add, out, insert.call(torch.mul, vector, share_T1))
    return out


def describe_zero_computation(match: MoEMatch) -> str:
    """How many experts give the token, and how many a vector; one that gives both is either."""
    constant = {number for own in match.zero_computation if own.is_constant for number in own.numbers}
    identity = {number for own in match.zero_computation for number in own.numbers} - constant
    counts = (("identity", len(identity)), ("constant", len(constant)))
    return ", ".join(f"{count} {kind} expert{'s' if count > 1 else ''}" for kind, count in counts if count)


def describe_missing(match: MoEMatch) -> str:
    """Which ids below the highest have no expert: theirs gives zeros, is left out, or stays beside the layer as it is."""
    present = {*(match.numbers or range(match.E)), *(number for own in match.zero_computation for number in own.numbers)}
    missing = [str(number) for number in range(max(present, default=0)) if number not in present]
    return f", none for id{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else ""


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The first and the last of each run of numbers, and the place of the first."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[start], numbers[place - 1], start
            start = place


def _place(insert: Inserter, ids_TK: fx.Node, first: int, place: int) -> fx.Node:
    return ids_TK if first == place else insert.call(torch.sub, ids_TK, first - place)


def _is_between(insert: Inserter, ids_TK: fx.Node, first: int, last: int) -> fx.Node:
    if first == last:
        return insert.call(torch.eq, ids_TK, first)
    return insert.call(torch.logical_and, insert.call(torch.ge, ids_TK, first), insert.call(torch.le, ids_TK, last))
