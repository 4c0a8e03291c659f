"""Tokens that experts read from places ``[E, C]``, given by a running count: GShard, Switch and DeepSpeed in one-hot products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

PLACES = 3


class Layer(nn.Module):
    def __init__(self, spelling, places: int = PLACES, scale: float = 1.0):
        super().__init__()
        self.spelling, self.places, self.scale = spelling, places, scale
        self.norm = nn.LayerNorm(zoo.D)
        self.gate = nn.Linear(zoo.D, zoo.E)
        self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D) * 0.2)

    def forward(self, x):
        x = self.norm(x)
        return self.spelling(self, x, (self.gate(x) * self.scale).softmax(-1))

    def of_places(self, rows):
        return torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)

    def combined(self, x, combine, dispatch):
        y = self.of_places(torch.einsum("sec,sm->ecm", dispatch.type_as(x), x))
        return torch.einsum("sec,ecm->sm", combine, y)


def _counted(ids, first_slots_first=True):
    """The place of each slot among those of its expert, ``[T, K]``."""
    T, K = ids.shape
    in_order = ids.t().reshape(-1) if first_slots_first else ids.reshape(-1)
    chosen = F.one_hot(in_order, zoo.E)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
    return place.view(K, T).t() if first_slots_first else place.view(T, K)


def _places(self, x, probabilities, first_slots_first=True):
    weights, ids = probabilities.topk(2)
    place = _counted(ids, first_slots_first)
    kept = place < self.places
    one_hot = F.one_hot(place.clamp(max=self.places - 1), self.places).to(x.dtype)
    return weights, F.one_hot(ids, zoo.E).to(x.dtype), one_hot, kept


def gshard(self, x, probabilities):
    weights, chosen, place, kept = _places(self, x, probabilities)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, chosen, place)
    return self.combined(x, combine, combine.bool())


def gshard_by_token(self, x, probabilities):
    weights, chosen, place, kept = _places(self, x, probabilities, first_slots_first=False)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, chosen, place)
    return self.combined(x, combine, combine != 0)


def masks_apart(self, x, probabilities):
    """What dispatches is made of the masks, not of the weights."""
    weights, chosen, place, kept = _places(self, x, probabilities)
    dispatch = torch.einsum("tk,tke,tkc->tec", kept.to(x.dtype), chosen, place)
    combine = torch.einsum("tk,tk,tke,tkc->tec", weights, kept.to(x.dtype), chosen, place)
    return self.combined(x, combine, dispatch)


def renormalised(self, x, probabilities):
    weights, chosen, place, kept = _places(self, x, probabilities)
    weights = weights / weights.sum(-1, keepdim=True)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, chosen, place)
    return self.combined(x, combine, combine > 0)


def deepspeed(self, x, probabilities):
    """Top-1 gating."""
    mask = F.one_hot(probabilities.argmax(-1), zoo.E)
    location = torch.cumsum(mask, dim=0) - 1
    mask = mask * torch.lt(location, self.places)
    location = F.one_hot((location * mask).sum(1), self.places).to(x.dtype)
    combine = torch.einsum("se,sc->sec", probabilities * mask, location)
    return self.combined(x, combine, combine.bool())


def _of_two(self, probabilities):
    """What DeepSpeed's top-2 gating keeps of either slot: mask, place and share."""
    first = F.one_hot(probabilities.argmax(1), zoo.E)
    second = F.one_hot(probabilities.masked_fill(first.bool(), float("-inf")).argmax(1), zoo.E)
    locations = torch.cumsum(first, 0) - 1, torch.cumsum(second, 0) - 1 + torch.sum(first, 0, keepdim=True)
    return [(mask, location) for mask, location in zip((first, second), locations, strict=True)]


def _combined_of_two(self, probabilities, slots):
    dtype = probabilities.dtype
    slots = [(mask * torch.lt(location, self.places), location) for mask, location in slots]
    places = [F.one_hot((location * mask).sum(1), self.places).to(dtype) for mask, location in slots]
    masks = [mask.to(dtype) for mask, _ in slots]
    shares = [torch.einsum("se,se->s", probabilities, mask) for mask in masks]
    total = torch.clamp(sum(shares), min=torch.finfo(dtype).eps)
    shares = [torch.einsum("s,se->se", share / total, mask) for share, mask in zip(shares, masks, strict=True)]
    return sum(torch.einsum("se,sc->sec", share, place) for share, place in zip(shares, places, strict=True))


def deepspeed_of_two(self, x, probabilities):
    """Top-2 gating: the second slots have the places behind those of all first ones."""
    combine = _combined_of_two(self, probabilities, _of_two(self, probabilities))
    return self.combined(x, combine, combine.bool())


def _scattered(ids, count):
    """fairscale's own one-hot."""
    return torch.zeros((*ids.shape, count), dtype=ids.dtype).scatter_(-1, ids.unsqueeze(-1), 1)


def fairscale(self, x, probabilities):
    mask = _scattered(probabilities.argmax(-1), zoo.E)
    place = torch.cumsum(mask, dim=0) - 1
    mask = mask * torch.lt(place, self.places)
    place = _scattered((place * mask).sum(1), self.places).to(x.dtype)
    combine = torch.einsum("se,sc->sec", probabilities * mask, place)
    return self.combined(x, combine, combine.bool())


def switch(self, x, probabilities):
    """Mesh TensorFlow's Switch: places by comparison with their numbers."""
    weight, index = probabilities.max(-1)
    mask = F.one_hot(index, zoo.E)
    place = mask.cumsum(0) - 1
    mask = mask * (place < self.places)
    dispatch = mask.unsqueeze(-1) * (place.unsqueeze(-1) == torch.arange(self.places))
    return self.combined(x, weight[:, None, None] * dispatch, dispatch)


def places_of_slots(self, x, probabilities, behind=1, ids=None):
    """T5X and its followers: the largest place of a token's slots, which is -1 where no slot has the expert."""
    ids = probabilities.topk(2).indices if ids is None else ids
    chosen = F.one_hot(ids.t().reshape(-1), zoo.E).to(torch.int32)
    place = torch.cumsum(chosen, dim=0) * chosen - behind
    return _at_largest(self, x, probabilities, place.view(2, -1, zoo.E).transpose(0, 1).max(dim=1)[0])


def _at_largest(self, x, probabilities, place):
    kept = torch.logical_and(place >= 0, place < self.places)
    dispatch = F.one_hot(torch.masked_fill(place, ~kept, 0), self.places).to(torch.bool)
    dispatch = torch.masked_fill(dispatch, ~kept.unsqueeze(-1).expand(-1, -1, self.places), 0)
    combine = torch.einsum("...te,...tec->...tec", probabilities, dispatch)
    return self.combined(x, combine.to(x.dtype), dispatch)


def by_priority(self, x, probabilities, order=torch.argsort, back=torch.argsort):
    """V-MoE's: places are counted in the order of the largest scores."""
    weights, ids = probabilities.topk(2)
    order = order(-weights[:, 0])
    chosen = F.one_hot(ids[order].t().reshape(-1), zoo.E)
    place = (torch.cumsum(chosen, dim=0) * chosen - 1).view(2, -1, zoo.E).transpose(0, 1)[back(order)]
    return _at_largest(self, x, probabilities, place.max(dim=1).values)


def places_in_priority(self, x, probabilities):
    """Each token has the place, and the experts, of that which stands there in the order of scores."""
    return by_priority(self, x, probabilities, back=lambda order: order)


def by_priority_of_slots(self, x, probabilities):
    """NLLB's: the places of each slot in the order of the largest scores, second ones behind all first ones."""
    order = probabilities.max(dim=1).values.neg().argsort()
    first, second = (mask for mask, _ in _of_two(self, probabilities))
    before = first.sum(0, keepdim=True)
    slots = [(mask, (mask[order].cumsum(0) - 1)[order.argsort()] + behind) for mask, behind in ((first, 0), (second, before))]
    combine = _combined_of_two(self, probabilities, slots)
    return self.combined(x, combine, combine.bool())


def _of_any(self, x, probabilities, keep, shares=None):
    """DeepSpeed's gate of any number of slots; ``keep(mask, location)`` drops tokens, ``shares`` are of more than are kept."""
    ids = probabilities.topk(2).indices
    mask = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, ids, 1)
    kept, location = keep(mask, torch.cumsum(mask, dim=0) - 1)
    gates = probabilities * (kept if shares is None else mask)
    gates = gates / torch.clamp(gates.sum(dim=-1, keepdim=True), min=torch.finfo(gates.dtype).eps)
    place = (location * kept).unsqueeze(-1) == torch.arange(self.places)
    combine = torch.einsum("se,sec->sec", gates, place.to(x.dtype))
    return self.combined(x, combine, combine.bool())


def deepspeed_of_any(self, x, probabilities):
    return _of_any(self, x, probabilities, lambda mask, location: (mask * torch.lt(location, self.places), location))


def _with_highest_scores(probabilities, rows):
    def keep(mask, _):
        highest = torch.topk(probabilities * mask, k=rows, dim=0, sorted=False).indices
        mask = torch.logical_and(mask, torch.zeros_like(probabilities).scatter(0, highest, 1))
        return mask, torch.cumsum(mask, dim=0) - 1

    return keep


def deepspeed_by_scores(self, x, probabilities):
    """An expert takes the tokens with its highest scores, as many as it has places."""
    return _of_any(self, x, probabilities, _with_highest_scores(probabilities, self.places))


def _stored_at(self, x, probabilities, slot=None, joined=None, second=None):
    """ColossalAI's router: both slots of a token are stored at their expert and place."""
    row, sizes = torch.arange(x.shape[0]), (*probabilities.shape, self.places)
    row = row if slot is None else slot(row)
    combine, dispatch = torch.zeros(sizes, dtype=x.dtype), torch.zeros(sizes, dtype=torch.bool)
    first = probabilities.argmax(1)
    ids_of = first, probabilities.masked_fill(F.one_hot(first, zoo.E).bool(), float("-inf")).argmax(1)
    slots = _of_two(self, probabilities) if second is None else second(_of_two(self, probabilities))
    for ids, (mask, location) in zip(ids_of, slots, strict=True):
        kept = mask * torch.lt(location, self.places)
        place = (location * kept).sum(1)
        at = row, ids[row], place[row]
        combine[at] += (kept * probabilities)[row, ids[row]]
        dispatch[at] |= kept.bool()[row, ids[row]] if joined is None else joined(dispatch[at], kept.bool()[row, ids[row]])
    return self.combined(x, combine, dispatch)


def stored_at_places(self, x, probabilities):
    return _stored_at(self, x, probabilities)


OF_EXPERTS = (places_of_slots, by_priority, places_in_priority)
"""Of which no ids are read, but what each expert has."""
SPELLINGS = (*OF_EXPERTS, by_priority_of_slots, stored_at_places, gshard, gshard_by_token, masks_apart, renormalised, deepspeed,
             deepspeed_of_two, deepspeed_of_any, deepspeed_by_scores, switch, fairscale)  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_rewritten(spelling):
    backend = check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    K = zoo.E if spelling in OF_EXPERTS else 1 if spelling in (deepspeed, switch, fairscale) else 2
    assert found.K == K and found.E == zoo.E and not backend.reasons
    assert "bmm" not in backend.operators() and "expert_down.default" in backend.operators()


@pytest.mark.parametrize(("spelling", "num_tokens"), [(gshard, 0), (gshard, 1), (deepspeed, 1)])
def test_few_tokens(spelling, num_tokens):
    check_against_eager(Layer(spelling), torch.randn(num_tokens, zoo.D))


@pytest.mark.parametrize(("spelling", "places"), [(gshard, 3), (deepspeed, 1), (deepspeed_of_two, 3), (deepspeed_of_two, 40)])
def test_all_to_one_expert(spelling, places):
    """With a single place there is no sum over places, and the layer stays."""
    layer = Layer(spelling, places)
    with torch.no_grad():
        layer.gate.bias[2] = 50
    assert len(check_against_eager(layer, torch.randn(12, zoo.D)).rewritten) == (places > 1)


def test_weights_that_underflow():
    """A token of weight zero is not dispatched: neither the result tells nor any gradient."""
    assert check_against_eager(Layer(gshard, scale=5000), torch.randn(12, zoo.D)).rewritten


@pytest.mark.parametrize("spelling", [places_of_slots, by_priority], ids=lambda f: f.__name__)
def test_scores_of_places_that_are_rounded(spelling):
    """Scores in fp32 beside experts in bf16: the product with the places is cast, of which that of the scores is left."""
    layer = Layer(lambda self, x, probabilities: spelling(self, x, probabilities.float())).to(torch.bfloat16)
    assert check_against_eager(layer, torch.randn(20, zoo.D).bfloat16(), tolerance=2**-4).rewritten


def without_a_limit(self, x, probabilities):
    """A place for every token: none is dropped."""
    weights, ids = probabilities.topk(2)
    place = F.one_hot(_counted(ids), 2 * x.shape[0]).to(x.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights, F.one_hot(ids, zoo.E).to(x.dtype), place)
    return self.combined(x, combine, combine.bool())


def test_places_for_all():
    backend = check_against_eager(Layer(without_a_limit), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons
    assert "masked_fill" not in backend.operators()


# Near misses.


def shared_places(self, x, probabilities):
    """Tokens of one expert in the same place."""
    weights, ids = probabilities.topk(2)
    place = (torch.arange(2 * x.shape[0]) % self.places).view(-1, 2)
    one_hot = F.one_hot(place, self.places).to(x.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights, F.one_hot(ids, zoo.E).to(x.dtype), one_hot)
    return self.combined(x, combine, combine.bool())


def behind_the_last_place(self, x, probabilities):
    """Tokens without room share the last place."""
    weights, chosen, place, _ = _places(self, x, probabilities)
    combine = torch.einsum("tk,tke,tkc->tec", weights, chosen, place)
    return self.combined(x, combine, combine.bool())


def counted_over_slots_apart(self, x, probabilities):
    """The second slots are counted from zero again."""
    weights, ids = probabilities.topk(2)
    chosen = F.one_hot(ids, zoo.E)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
    one_hot = F.one_hot(place.clamp(max=self.places - 1), self.places).to(x.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights * (place < self.places), chosen.to(x.dtype), one_hot)
    return self.combined(x, combine, combine.bool())


def second_slots_from_zero(self, x, probabilities):
    """First and second slots in the same places."""
    (first, location), (second, behind) = _of_two(self, probabilities)
    slots = [(first, location), (second, behind - torch.sum(first, 0, keepdim=True))]
    combine = _combined_of_two(self, probabilities, slots)
    return self.combined(x, combine, combine.bool())


def weighted_twice(self, x, probabilities):
    weights, chosen, place, kept = _places(self, x, probabilities)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, chosen, place)
    return self.combined(x, combine, combine)


def dispatched_by_others(self, x, probabilities):
    """Tokens that were dropped for another reason are in no place."""
    weights, chosen, place, kept = _places(self, x, probabilities)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, chosen, place)
    return self.combined(x, combine, combine.bool() * (x[:, :1, None] > 0))


def signed_weights(self, x, probabilities):
    """A weight that is zero where its gradient is not."""
    weights, chosen, place, kept = _places(self, x, probabilities)
    weights = weights - weights[:, 1:]
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, chosen, place)
    return self.combined(x, combine, combine.bool())


def counted_in_another_order(self, x, probabilities):
    """The count of the tokens before, of which the dispatched ones are others."""
    weights, ids = probabilities.topk(2)
    place = _counted(ids.flip(0)).flip(0) // 2
    kept = place < self.places
    one_hot = F.one_hot(place.clamp(max=self.places - 1), self.places).to(x.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, F.one_hot(ids, zoo.E).to(x.dtype), one_hot)
    return self.combined(x, combine, combine.bool())


def places_of_all_tokens(self, x, probabilities):
    """A token without the expert takes the first place, too."""
    return places_of_slots(self, x, probabilities, behind=0)


def places_of_the_same_slots(self, x, probabilities):
    """The largest of several places of a token."""
    return places_of_slots(self, x, probabilities, ids=probabilities.topk(2).indices // 2)


def places_of_favourites(self, x, probabilities):
    """What stands for an order has one number for all tokens with one favourite: they are in one place."""
    return by_priority(self, x, probabilities, back=lambda order: probabilities.argmax(1))


def more_tokens_than_places(self, x, probabilities):
    """The last one has none."""
    return _of_any(self, x, probabilities, _with_highest_scores(probabilities, self.places + 1))


def dropped_to_the_first_place(self, x, probabilities):
    """A token that is dropped keeps its share, and takes the first place, too."""
    return _of_any(self, x, probabilities, lambda mask, at: (mask * torch.lt(at, self.places), at), shares="of all")


def stored_over_one_another(self, x, probabilities):
    """Of two tokens one at most is stored."""
    return _stored_at(self, x, probabilities, slot=lambda row: row // 2)


def stored_for_others(self, x, probabilities):
    """Tokens that have no room are in the place of one that has."""
    return _stored_at(self, x, probabilities, joined=lambda _, kept: ~kept)


def second_slots_stored_from_zero(self, x, probabilities):
    """First and second slots at the same places."""

    def second(slots):
        (first, location), (other, behind) = slots
        return [(first, location), (other, behind - first.sum(0, keepdim=True))]

    return _stored_at(self, x, probabilities, second=second)


NEAR = (places_of_favourites, stored_over_one_another, stored_for_others, second_slots_stored_from_zero, more_tokens_than_places,
        dropped_to_the_first_place, shared_places, behind_the_last_place, counted_over_slots_apart,
        second_slots_from_zero, weighted_twice,
        places_of_all_tokens, places_of_the_same_slots, dispatched_by_others, signed_weights,
        counted_in_another_order)  # fmt: skip


@pytest.mark.parametrize("spelling", NEAR, ids=lambda f: f.__name__)
def test_near_misses(spelling):
    backend = check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
    assert not backend.rewritten and backend.reasons


# Buffers that are written at their places.


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


@pytest.mark.parametrize(
    "spelling", [a_place_for_every_slot, a_place_for_every_token, places_from_one], ids=lambda f: f.__name__
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


def places_of_the_next_expert(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    return _read(self, x, weights, ids, _count((ids + 1) % zoo.E), ids.numel())


def read_from_another_place(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    place = _count(ids)
    y = self.of_places(_buffer(self, x, ids, place, ids.numel()))[ids.reshape(-1), place.flip(0)]
    return (y.view(*ids.shape, zoo.D) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(
    "spelling",
    [too_few_places, no_place_for_the_last, places_of_all_experts, places_of_the_next_expert, read_from_another_place],
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


def of_the_next_expert(self, x, probabilities):
    return _in_places(self, x, probabilities, count=lambda ids: _count((ids + 1) % zoo.E))


@pytest.mark.parametrize("spelling", [
    place_of_another_slot, dropped_slots_get_a_row, dropped_rows_are_written, one_row_less, two_rows_in_a_place,
    one_row_too_many, one_place_before, round_and_round, of_the_next_expert,
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
    y = (experts or self.of_places)(buffer)
    y = y[ids[kept], count[kept]] if read is None else read(y, ids[kept], count[kept])
    return torch.zeros_like(x).index_add(0, tokens[kept], y * weights.reshape(-1)[kept].unsqueeze(1))


def _one_by_one(self, of=lambda e: e, act=F.silu):
    """Experts of their own, of which ``of`` tells whose rows each reads."""
    return lambda buffer: torch.stack([act(buffer[of(e)] @ self.up[e]) @ self.down[e] for e in range(zoo.E)])


def selected_rows(self, x, probabilities):
    return _selected(self, x, probabilities)


def selected_rows_of_listed_experts(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self))


@pytest.mark.parametrize("spelling", [selected_rows, selected_rows_of_listed_experts], ids=lambda f: f.__name__)
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


def places_among_the_next_experts_slots(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self), count=lambda ids: _count((ids + 1) % zoo.E))


def read_in_falling_order(self, x, probabilities):
    return _selected(self, x, probabilities, read=lambda y, ids, place: y[ids, place.flip(0)])


def read_of_the_next_expert(self, x, probabilities):
    return _selected(self, x, probabilities, _one_by_one(self), read=lambda y, ids, place: y[(ids + 1) % zoo.E, place])


@pytest.mark.parametrize("spelling", [
    an_empty_place_is_read, rows_of_the_opposite_expert, places_among_the_next_experts_slots, read_in_falling_order,
    read_of_the_next_expert,
], ids=lambda f: f.__name__)  # fmt: skip
def test_selected_rows_that_stay(spelling):
    assert not check_against_eager(Layer(spelling), torch.randn(20, zoo.D)).rewritten
