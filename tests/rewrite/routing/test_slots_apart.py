"""Routers that take their two choices one after the other, so that each has tensors ``[T]`` of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.modules import flat
from tests.tools.rewrite_harness import check_against_eager


def _two_largest(logits):
    """The masks and the share of each of the two, as in NLLB-MoE with every second choice taken."""
    probs = logits.softmax(-1)
    first = F.one_hot(torch.argmax(probs, -1), probs.shape[-1])
    rest = logits.masked_fill(first.bool(), float("-inf"))
    second = F.one_hot(torch.argmax(rest, -1), probs.shape[-1])
    shares = [(probs * mask).sum(dim=1) for mask in (first, second)]
    total = torch.clamp(shares[0] + shares[1], min=torch.finfo(probs.dtype).eps)
    return (first, second), [share / total for share in shares]


def nllb(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    (first, second), shares = _two_largest(self.router.gate(x))
    combining = shares[0].unsqueeze(-1) * first + shares[1].unsqueeze(-1) * second
    mask = combining.bool()
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token = torch.where(mask[:, e])[0]
        out.index_add_(0, token, torch.einsum("b,be->be", combining[token, e], expert(x[token])))
    return out.view(shape)


def nllb_masked(self, x, weights, ids):
    """Every expert on every token."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    (first, second), shares = _two_largest(self.router.gate(x))
    combining = shares[0].unsqueeze(-1) * first + shares[1].unsqueeze(-1) * second
    return sum(combining[:, e, None] * expert(x) for e, expert in enumerate(self.experts)).view(shape)


def two_maxima(self, x, weights, ids):
    """GShard's choices without a capacity, and a loop over the experts for each of them."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    probs = self.router.gate(x).softmax(-1)
    out = torch.zeros_like(x)
    for _ in range(2):
        share, chosen = probs.max(-1)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (share * (chosen == e)).unsqueeze(-1)
        probs = probs.masked_fill(F.one_hot(chosen, len(self.experts)).bool(), 0.0)
    return out.view(shape)


def tutel(self, x, weights, ids):
    """Ids of one top-k; each slot's share is summed over a mask, and normalised on its own."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    probs = self.router.gate(x).softmax(-1)
    masks = [F.one_hot(chosen, len(self.experts)).to(x.dtype) for chosen in ids.unbind(-1)]
    shares = [(probs * mask).sum(1) for mask in masks]
    total = torch.clamp(sum(shares), min=1e-9)
    combining = sum((share / total).unsqueeze(-1) * mask for share, mask in zip(shares, masks, strict=True))
    return torch.einsum("te,etd->td", combining, torch.stack([expert(x) for expert in self.experts])).view(shape)


def swapped_shares(self, x, weights, ids):
    """Each slot has the weight of the other."""
    out = torch.zeros_like(x)
    for k in range(2):
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * weights[..., 1 - k, None] * (ids[..., k] == e).unsqueeze(-1)
    return out


def mask_of_the_first_choice(self, x, weights, ids):
    (first, second), shares = _two_largest(self.router.gate(x))
    combining = shares[0].unsqueeze(-1) * first + shares[1].unsqueeze(-1) * second
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token = torch.where(first[:, e])[0]
        out.index_add_(0, token, expert(x[token]) * combining[token, e, None])
    return out


def second_choices_are_drawn(self, x, weights, ids):
    """NLLB-MoE's policy for training: no tensor has the weights of the second choice after the draw."""
    (first, second), shares = _two_largest(self.router.gate(x))
    drawn = (2 * shares[1] > torch.arange(x.shape[0]) % 2).unsqueeze(-1)
    combining = shares[0].unsqueeze(-1) * first + shares[1].unsqueeze(-1) * (second * drawn)
    return sum(combining[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def capacity(self, x, weights, ids):
    """What an expert has no room for is dropped."""
    (first, second), shares = _two_largest(self.router.gate(x))
    first = first * torch.lt(torch.cumsum(first, dim=0) - 1, 2)
    combining = shares[0].unsqueeze(-1) * first + shares[1].unsqueeze(-1) * second
    return sum(combining[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def first_expert_weighs_otherwise(self, x, weights, ids):
    (first, second), shares = _two_largest(self.router.gate(x))
    combining = shares[0].unsqueeze(-1) * first + shares[1].unsqueeze(-1) * second
    first_expert = shares[1].unsqueeze(-1) * first + shares[0].unsqueeze(-1) * second
    return sum((combining if e else first_expert)[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def shares_of_both(self, x, weights, ids):
    """A slot's mask has the shares of both."""
    probs = self.router.gate(x).softmax(-1)
    masks = [F.one_hot(chosen, len(self.experts)).to(x.dtype) for chosen in ids.unbind(-1)]
    combining = sum((probs * other).sum(1, keepdim=True) * mask for mask in masks for other in masks)
    return sum(combining[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def last_expert_sees_one_slot(self, x, weights, ids):
    """The others see both."""
    shares = [(weights * (ids == e)).sum(-1, keepdim=True) for e in range(len(self.experts) - 1)]
    shares.append(weights[:, :1] * (ids[:, :1] == len(self.experts) - 1))
    return sum(share * expert(x) for share, expert in zip(shares, self.experts, strict=True))


SPELLINGS = (nllb, nllb_masked, two_maxima, tutel, swapped_shares)
OTHERS = (
    mask_of_the_first_choice, second_choices_are_drawn, capacity, first_expert_weighs_otherwise, shares_of_both,
    last_expert_sees_one_slot,
)  # fmt: skip


class Batched(nn.Module):
    """All experts in one product, and a sum over all of them for each slot; ``other`` changes the second slot's experts."""

    def __init__(self, other=lambda up: up):
        super().__init__()
        self.gate, self.other = nn.Linear(zoo.D, zoo.E, bias=False), other
        self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF))
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        masks = [F.one_hot(chosen, zoo.E).to(x.dtype) * weights[:, k, None] for k, chosen in enumerate(ids.unbind(-1))]
        ups = self.up, self.other(self.up)
        return sum(
            torch.einsum("te,etc->tc", mask, torch.relu(x @ up) @ self.down)
            for mask, up in zip(masks, ups, strict=True)
        )


def test_sums_over_all_experts(fp64):
    backend = check_against_eager(Batched(), torch.randn(10, zoo.D))
    assert [candidate.K for candidate in backend.rewritten] == [2]


def test_sums_over_other_experts(fp64):
    """Slots that use different weights are no layer."""
    backend = check_against_eager(Batched(lambda up: up.flip(0)), torch.randn(10, zoo.D))
    assert not backend.rewritten


@pytest.mark.parametrize(("combine", "shape"), zip(SPELLINGS, [(10,), (2, 5), (1,), (1,), (2, 5)], strict=True))
def test_two_choices_are_one_layer(fp64, combine, shape):
    backend = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(*shape, zoo.D))
    assert [candidate.K for candidate in backend.rewritten] == [2] and not backend.reasons


def test_in_half_precision():
    torch.manual_seed(0)
    layer = zoo.ModuleListMoE(nllb_masked).bfloat16()
    # bf16 holds 8 bits; eager and the ops round at different places, a few times each.
    backend = check_against_eager(layer, torch.randn(10, zoo.D).bfloat16(), tolerance=2**-4)
    assert len(backend.rewritten) == 1


@pytest.mark.parametrize("combine", OTHERS, ids=lambda f: f.__name__)
def test_near_miss_is_left_alone(fp64, combine):
    backend = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(10, zoo.D))
    assert not backend.rewritten and backend.reasons
