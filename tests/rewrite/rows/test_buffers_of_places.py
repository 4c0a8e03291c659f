"""Buffers of experts that are written at the places of their tokens, with and without drops, and read there."""

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.zoo import catalogue as zoo
from tests.rewrite.shaped.test_places import Layer
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


def _buffer(self, x, ids, place, places):
    rows = torch.arange(x.shape[0]).repeat_interleave(ids.shape[1])
    buffer = x.new_zeros(zoo.E, places, zoo.D)
    buffer[ids.reshape(-1), place] = x[rows]
    return buffer


def _read(self, x, weights, ids, place, places):
    y = self.of_places(_buffer(self, x, ids, place, places))[ids.reshape(-1), place]
    return (y.view(*ids.shape, zoo.D) * weights.unsqueeze(-1)).sum(1)


def _count(ids):
    ids = ids.reshape(-1)
    return (F.one_hot(ids, zoo.E).cumsum(0) - 1).gather(1, ids.unsqueeze(1)).squeeze(1)


def a_place_for_every_slot(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count(ids), ids.numel())


def a_place_for_every_token(self, x, probabilities):
    """No token has an expert twice."""
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count(ids), x.shape[0])


def places_from_one(self, x, probabilities):
    """The first place stays empty."""
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count(ids) + 1, ids.numel() + 1)


def places_among_tokens(self, x, probabilities):
    """The tokens of an expert are counted, each of which has it in one slot."""
    weights, ids = probabilities.topk(2)
    chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, ids, True)
    return _read(self, x, weights, ids, (chosen.cumsum(0) - 1).gather(1, ids).reshape(-1), x.shape[0])


def places_of_the_next_expert(self, x, probabilities):
    """Equal ids have equal next ones."""
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count((ids + 1) % zoo.E), ids.numel())


@pytest.mark.parametrize(
    "spelling",
    [a_place_for_every_slot, a_place_for_every_token, places_from_one, places_among_tokens, places_of_the_next_expert],
    ids=lambda f: f.__name__,
)
def test_buffers(spelling):
    backend = check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert found.K == 2 and not backend.reasons and not {"cumsum", "one_hot", "setitem"} & set(backend.operators())


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_buffers_of_few_tokens(num_tokens):
    check_against_eager(Layer(a_place_for_every_token), torch.randn(num_tokens, zoo.D))


def too_few_places(self, x, probabilities):
    """An error, as soon as an expert has more tokens."""
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count(ids), x.shape[0] - 1)


def no_place_for_the_last(self, x, probabilities):
    """An error, as soon as all tokens choose the same expert."""
    weights, ids = probabilities.topk(1)
    return _read(self, x, weights, ids, _count(ids) + 1, ids.numel())


def places_of_all_experts(self, x, probabilities):
    """Counted over all slots, modulo: rows overwrite each other."""
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, torch.arange(ids.numel()) % 4, ids.numel())


def _count_of_each_slot(ids):
    """Rows of first and of second slots are in the same places."""
    return (F.one_hot(ids, zoo.E).cumsum(0) - 1).gather(2, ids.unsqueeze(2)).reshape(-1)


def places_of_each_slot(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count_of_each_slot(ids), ids.numel())


def read_from_another_place(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    place = _count(ids)
    y = self.of_places(_buffer(self, x, ids, place, ids.numel()))[ids.reshape(-1), place.flip(0)]
    return (y.view(*ids.shape, zoo.D) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(
    "spelling",
    [too_few_places, no_place_for_the_last, places_of_all_experts, places_of_each_slot, read_from_another_place],
    ids=lambda f: f.__name__,
)
def test_buffers_that_stay(spelling):
    assert not check_against_eager(Layer(spelling), torch.randn(20, zoo.D)).rewritten


# Buffers of fewer places than an expert may have tokens.


def _in_places(self, x, probabilities, write=None, read=None, count=None, place=None, kept=None):
    """Slots behind the last place are dropped; what is given takes the place of what a layer has there."""
    weights, ids = probabilities.topk(2)
    count = (count or _count)(ids)
    kept = count < self.places if kept is None else kept(count)
    place = torch.where(kept, count, 0) if place is None else place(count, kept)
    ids, mask = ids.reshape(-1), kept.unsqueeze(1)
    rows = x[torch.arange(len(ids)) // 2]
    written = torch.where(mask, rows, 0) if write is None else write(rows, count)
    buffer = x.new_zeros(zoo.E, self.places, zoo.D).index_put((ids, place), written, accumulate=True)
    y = self.of_places(buffer)[ids, place] * mask if read is None else read(self.of_places(buffer), ids, place, mask)
    return (y.view(*weights.shape, zoo.D) * weights.unsqueeze(-1)).sum(1)


def _times(mask):
    return lambda rows, count: rows * mask(count).unsqueeze(1)


def dropped_rows_to_the_first(self, x, probabilities):
    return _in_places(self, x, probabilities)


def dropped_rows_times_zero(self, x, probabilities):
    write = _times(lambda count: count < self.places)
    return _in_places(self, x, probabilities, write, place=lambda count, kept: count * kept)


def dropped_rows_to_the_last(self, x, probabilities):
    return _in_places(self, x, probabilities, place=lambda count, kept: count.clamp(max=self.places - 1))


def added_to_tokens(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    count, ids, tokens = _count(ids), ids.reshape(-1), torch.arange(ids.numel()) // 2
    kept = count < self.places
    place = torch.where(kept, count, 0)
    buffer = x.new_zeros(zoo.E, self.places, zoo.D)
    buffer = buffer.index_put((ids, place), x[tokens] * kept.unsqueeze(1), accumulate=True)
    y = self.of_places(buffer)[ids, place] * (weights.reshape(-1) * kept).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, y)


DROPPING = (dropped_rows_to_the_first, dropped_rows_times_zero, dropped_rows_to_the_last, added_to_tokens)


@pytest.mark.parametrize("spelling", DROPPING, ids=lambda f: f.__name__)
def test_buffers_that_drop(spelling):
    backend = check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert found.K == 2 and not backend.reasons and "bmm" not in backend.operators()


@pytest.mark.parametrize("spelling", DROPPING[1:3], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("num_tokens", "bias"), [(0, 0), (1, 0), (12, 50)])
def test_buffers_that_drop_few_or_many(spelling, num_tokens, bias):
    layer = Layer(spelling)
    with torch.no_grad():
        layer.gate.bias[2] = bias
    assert len(check_against_eager(layer, torch.randn(num_tokens, zoo.D)).rewritten) == 1


def test_buffers_that_drop_in_bf16():
    layer = Layer(dropped_rows_to_the_first).to(torch.bfloat16)
    assert check_against_eager(layer, torch.randn(20, zoo.D).bfloat16(), tolerance=2**-4).rewritten


def place_of_another_slot(self, x, probabilities):
    """Read one place further."""
    return _in_places(self, x, probabilities, read=lambda y, ids, at, mask: y[ids, (at + 1) % self.places] * mask)


def dropped_slots_get_a_row(self, x, probabilities):
    """That of the first one."""
    return _in_places(self, x, probabilities, read=lambda y, ids, place, mask: y[ids, place])


def dropped_rows_are_written(self, x, probabilities):
    """All to the first place."""
    return _in_places(self, x, probabilities, lambda rows, count: rows)


def one_row_less(self, x, probabilities):
    """The last place is empty."""
    return _in_places(self, x, probabilities, _times(lambda count: count < self.places - 1))


def two_rows_in_a_place(self, x, probabilities):
    return _in_places(self, x, probabilities, count=lambda ids: _count(ids) // 2)


def one_row_too_many(self, x, probabilities):
    """Two rows are in the last place."""
    last = self.places - 1
    return _in_places(self, x, probabilities, place=lambda at, _: at.clamp(max=last), kept=lambda at: at <= self.places)


def one_place_before(self, x, probabilities):
    """The first row is in the last place."""
    return _in_places(self, x, probabilities, place=lambda count, kept: torch.where(kept, count - 1, 0))


def round_and_round(self, x, probabilities):
    return _in_places(self, x, probabilities, place=lambda count, _: count % self.places, kept=lambda count: count >= 0)


def of_each_slot(self, x, probabilities):
    return _in_places(self, x, probabilities, count=_count_of_each_slot)


@pytest.mark.parametrize("spelling", [
    place_of_another_slot, dropped_slots_get_a_row, dropped_rows_are_written, one_row_less, two_rows_in_a_place,
    one_row_too_many, one_place_before, round_and_round, of_each_slot,
], ids=lambda f: f.__name__)  # fmt: skip
def test_buffers_that_drop_and_stay(spelling):
    assert not check_against_eager(Layer(spelling), torch.randn(20, zoo.D)).rewritten


# Rows that a mask selects.


def _selected(self, x, probabilities, experts=None, count=_count, written=0, read=None):
    """Only slots that have a place are written, and read; ``written`` of the places stay empty."""
    weights, ids = probabilities.topk(2)
    count, ids, tokens = count(ids), ids.reshape(-1), torch.arange(ids.numel()) // 2
    kept, into = count < self.places, count < self.places - written
    buffer = x.new_zeros(zoo.E, self.places, zoo.D)
    buffer[ids[into], count[into]] = x[tokens[into]]
    y = (self.of_places if experts is None else experts)(buffer)
    y = y[ids[kept], count[kept]] if read is None else read(y, ids[kept], count[kept])
    return torch.zeros_like(x).index_add(0, tokens[kept], y * weights.reshape(-1)[kept].unsqueeze(1))


def _one_by_one(self, of=lambda e: e, act=F.silu):
    """Experts of their own, of which ``of`` tells whose rows each reads."""
    return lambda buffer: torch.stack([act(buffer[of(e)] @ self.up[e]) @ self.down[e] for e in range(zoo.E)])


def selected_rows(self, x, probabilities):
    return _selected(self, x, probabilities)


def selected_rows_of_listed_experts(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self))


def added_to_listed_experts(self, x, probabilities):
    """V-MoE's: first slots are counted first, a slot has the largest of its counts, and each expert its part of a stack."""
    weights, ids = probabilities.topk(2)
    chosen = F.one_hot(ids.t().reshape(-1), zoo.E)
    place = (chosen.cumsum(0) * chosen - 1).view(2, -1, zoo.E).permute(1, 0, 2).max(2).values
    e, kept = ids.reshape(-1), place.reshape(-1) < self.places
    buffer = x.new_zeros(zoo.E, self.places, zoo.D)
    buffer.index_put_((e[kept], place.reshape(-1)[kept]), x.repeat_interleave(2, 0)[kept], accumulate=True)
    y = _one_by_one(self)(buffer)[ids, place.clamp(0, self.places - 1)] * (place < self.places).unsqueeze(-1)
    return torch.einsum("sk...,sk->s...", y, weights)


SELECTED = (selected_rows, selected_rows_of_listed_experts, added_to_listed_experts)


@pytest.mark.parametrize("spelling", SELECTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("num_tokens", "bias"), [(20, 0), (2, 0), (12, 50)])
def test_selected_rows(spelling, num_tokens, bias):
    layer = Layer(spelling)
    with torch.no_grad():
        layer.gate.bias[2] = bias
    (found,) = check_against_eager(layer, torch.randn(num_tokens, zoo.D)).rewritten
    assert found.K == 2


def an_empty_place_is_read(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self, act=torch.sigmoid), written=1)


def rows_of_the_opposite_expert(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self, of=lambda e: zoo.E - 1 - e))


def places_among_each_slot(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self), count=_count_of_each_slot)


def read_in_falling_order(self, x, probabilities):
    return _selected(self, x, probabilities, read=lambda y, ids, place: y[ids, place.flip(0)])


def read_of_the_next_expert(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self), read=lambda y, ids, place: y[(ids + 1) % zoo.E, place])


@pytest.mark.parametrize("spelling", [
    an_empty_place_is_read, rows_of_the_opposite_expert, places_among_each_slot, read_in_falling_order,
    read_of_the_next_expert,
], ids=lambda f: f.__name__)  # fmt: skip
def test_selected_rows_that_stay(spelling):
    assert not check_against_eager(Layer(spelling), torch.randn(20, zoo.D)).rewritten
