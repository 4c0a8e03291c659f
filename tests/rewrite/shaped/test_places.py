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


def counted(ids, first_slots_first=True):
    """The place of each slot among those of its expert, ``[T, K]``."""
    T, K = ids.shape
    in_order = ids.t().reshape(-1) if first_slots_first else ids.reshape(-1)
    chosen = F.one_hot(in_order, zoo.E)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
    return place.view(K, T).t() if first_slots_first else place.view(T, K)


def _places(self, x, probabilities, first_slots_first=True):
    weights, ids = probabilities.topk(2)
    place = counted(ids, first_slots_first)
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


# Buffers of slots that name their tokens, as DeepSpeed has them from 0.19 on.


def _named(self, x, ids, place, share, names=None, scratch=None, read=None):
    """A slot for each place of an expert names its token, or the row of zeros behind all; dropped ones have one slot more."""
    T, room = len(x), zoo.E * self.places
    slots = torch.where(ids >= 0, ids.int().long() * self.places + place, room if scratch is None else scratch)
    tokens = (torch.arange(T) if names is None else names(T)).expand_as(slots).reshape(-1)
    source = torch.full((room + 1,), T).scatter_(0, slots.reshape(-1), tokens)
    rows = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, source[:-1])
    parts = enumerate(rows.view(zoo.E, self.places, -1).chunk(zoo.E, dim=0))
    y = torch.cat([F.silu(part.squeeze(0) @ self.up[e]) @ self.down[e] for e, part in parts])
    slots = slots.reshape(-1) if read is None else read(slots.reshape(-1))
    y = torch.cat([y, y.new_zeros(1, y.shape[1])]).index_select(0, slots)
    return (y.view(*ids.shape, -1) * share.unsqueeze(-1)).sum(0)


def named_first(self, x, probabilities, kept_of=None, **changes):
    """One slot; that a token is dropped makes its id -1, the least of two numbers."""
    first = probabilities.argmax(1)
    mask = F.one_hot(first, zoo.E)
    kept = mask * torch.zeros_like(mask).scatter_(0, mask.topk(min(self.places, len(x)), dim=0).indices, 1)
    kept = kept if kept_of is None else kept_of(mask)
    ids = torch.min(first, kept.sum(1) * zoo.E - 1)
    place = ((kept.cumsum(0) - 1) * kept).sum(1)
    return _named(self, x, ids[None], place[None], (probabilities * kept).sum(1)[None], **changes)


def named_two(self, x, probabilities, behind=True, last=0, **changes):
    """Second slots stand behind all first ones."""
    (first, location), (second, after) = _of_two(self, probabilities)
    after = after if behind else after - first.sum(0, keepdim=True)
    slots = [(mask, mask * torch.lt(place, self.places + last), place) for mask, place in ((first, location), (second, after))]
    ids = probabilities.argmax(1)
    ids = ids, probabilities.masked_fill(F.one_hot(ids, zoo.E).bool(), float("-inf")).argmax(1)
    ids = torch.stack([torch.where(kept.any(1), own, -1) for own, (_, kept, _) in zip(ids, slots, strict=True)])
    place = torch.stack([(place * kept).sum(1) for _, kept, place in slots])
    share = torch.stack([torch.einsum("se,se->s", probabilities, kept.to(x.dtype)) for _, kept, _ in slots])
    return _named(self, x, ids, place, share, **changes)


def named_any(self, x, probabilities, keep=None, **changes):
    top_k, ids = probabilities.topk(2)
    mask = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, ids, 1)
    location = torch.cumsum(mask, dim=0) - 1
    kept, location = (mask & torch.lt(location, self.places), location) if keep is None else keep(mask, location)
    is_kept, shares = kept.gather(1, ids), (probabilities * kept).gather(1, ids)
    place = location.gather(1, ids) * is_kept
    return _named(self, x, torch.where(is_kept, ids, -1).t(), place.t(), shares.t(), **changes)


def named_by_scores(self, x, probabilities):
    rows = min(self.places, len(x))
    return named_any(self, x, probabilities, _with_highest_scores(probabilities, rows))


NAMED = (named_first, named_two, named_any, named_by_scores)


@pytest.mark.parametrize("spelling", NAMED, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("num_tokens", "places", "favourite"), [(20, 3, 0), (20, 3, 50), (9, 12, 0), (2, 2, 0)])
def test_slots_that_name_their_tokens(spelling, num_tokens, places, favourite):
    """Tokens are dropped, or go to one expert; experts have none; all have room."""
    layer = Layer(spelling, places)
    with torch.no_grad():
        layer.gate.bias[2] += favourite
    backend = check_against_eager(layer, torch.randn(num_tokens, zoo.D))
    if spelling is named_two and places >= num_tokens:  # first slots have more room than they may need, and it is left alone
        return
    (found,) = backend.rewritten
    assert (1 if spelling is named_first else 2, zoo.E) == (found.K, found.E)
    assert "index_select" not in backend.operators() or "_assert_async" in backend.operators()


@pytest.mark.parametrize("spelling", NAMED, ids=lambda f: f.__name__)
def test_one_token_with_a_name(spelling):
    check_against_eager(Layer(spelling), torch.randn(1, zoo.D))


_MISNAMED = {
    "of other tokens": (named_any, {"names": lambda T: torch.arange(T).roll(1)}),
    "of half the tokens": (named_any, {"names": lambda T: torch.arange(T) // 2}),
    "dropped into the first slot": (named_any, {"scratch": 0}),
    "read one further": (named_two, {"read": lambda slots: (slots + 1) % 13}),
    "read by others": (named_two, {"read": lambda slots: slots.roll(1)}),
    "second slots from zero": (named_two, {"behind": False}),
    "one place more than there are": (named_two, {"last": 1}),
    "kept by nothing": (named_first, {"kept_of": lambda mask: mask}),
    "kept by other marks": (named_first, {"kept_of": lambda mask: mask * mask.flip(0)}),
    "without the places of dropped ones": (
        named_any, {"keep": lambda mask, location: (mask & (location % 2 == 0) & (location < 3), location)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _MISNAMED)
def test_slots_that_name_others(name):
    """Each is another function, of which the numbers stay right, or an error."""
    spelling, changes = _MISNAMED[name]
    layer, x = Layer(lambda self, x, probabilities: spelling(self, x, probabilities, **changes)), torch.randn(11, zoo.D)
    try:
        layer(x)
    except (RuntimeError, IndexError):
        return
    rewritten = check_against_eager(layer, x).rewritten
    assert not rewritten or name == "without the places of dropped ones"


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
    place = F.one_hot(counted(ids), 2 * x.shape[0]).to(x.dtype)
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


def second_slots_behind_more(self, x, probabilities):
    """And behind a number that each token has of its own."""
    first, (second, behind) = _of_two(self, probabilities)
    above = (x[:, None, :1] < x[:, :1]).sum(1)
    combine = _combined_of_two(self, probabilities, [first, (second, behind + above)])
    return self.combined(x, combine, combine.bool())


def slots_behind_numbers_of_their_own(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    place = counted(ids) + (x[:, :2] > 0).sum(0)
    kept = place < self.places
    one_hot = F.one_hot(place.clamp(max=self.places - 1), self.places).to(x.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, F.one_hot(ids, zoo.E).to(x.dtype), one_hot)
    return self.combined(x, combine, combine.bool())


def counted_in_groups(self, x, probabilities):
    """Tokens of another group are not counted, and have the same places."""
    mask, group = F.one_hot(probabilities.argmax(1), zoo.E), torch.arange(x.shape[0]) % 2
    same = (group == group[:, None]).long()[..., None] * mask
    location = same.cumsum(1)[torch.arange(x.shape[0]), torch.arange(x.shape[0])] - 1
    mask = mask * (location < self.places)
    place = F.one_hot((location * mask).sum(1), self.places).to(x.dtype)
    combine = torch.einsum("se,sc->sec", probabilities * mask, place)
    return self.combined(x, combine, combine.bool())


def behind_one_another(self, x, probabilities):
    """First slots behind all third ones, second ones behind all first ones, third ones behind all second ones alone."""
    masks, left = [], probabilities
    for _ in range(3):
        masks.append(F.one_hot(left.argmax(1), zoo.E))
        left = left.masked_fill(masks[-1].bool(), float("-inf"))
    behind = [masks[n - 1].sum(0, keepdim=True) for n in range(3)]
    slots = [(mask, mask.cumsum(0) - 1 + before) for mask, before in zip(masks, behind, strict=True)]
    combine = _combined_of_two(self, probabilities, slots)
    return self.combined(x, combine, combine.bool())


def behind_their_own_number(self, x, probabilities):
    """First slots behind as many places as there are first slots, as second ones are."""
    (first, location), second = _of_two(self, probabilities)
    combine = _combined_of_two(self, probabilities, [(first, location + first.sum(0, keepdim=True)), second])
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
    place = counted(ids.flip(0)).flip(0) // 2
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
        second_slots_from_zero, second_slots_behind_more, slots_behind_numbers_of_their_own, counted_in_groups,
        behind_one_another, behind_their_own_number, weighted_twice,
        places_of_all_tokens, places_of_the_same_slots, dispatched_by_others, signed_weights,
        counted_in_another_order)  # fmt: skip


@pytest.mark.parametrize("spelling", NEAR, ids=lambda f: f.__name__)
def test_near_misses(spelling):
    backend = check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
    assert not backend.rewritten and backend.reasons
