"""Loops of masks over experts that keep tokens by their priority: running counts in another order, zero for others' tokens."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

T, E, D, W, C = 24, 4, 6, 5, 4


class Layer(nn.Module):
    """``places(layer, mask, probabilities, before)`` says where tokens stand with each expert, behind others: ``[T, E]``."""

    def __init__(self, places):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, W) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(W, D) for _ in range(E))
        self.places = places

    def forward(self, x):
        logits = self.router(x)
        probabilities = logits.softmax(dim=-1)
        first = F.one_hot(probabilities.argmax(dim=-1), E)
        second = F.one_hot(logits.masked_fill(first.bool(), -torch.inf).argmax(dim=-1), E)
        before = first.sum(dim=0, keepdim=True)
        kept = first * (self.places(first, probabilities, 0) < C), second * (self.places(second, probabilities, before) < C)
        shares = sum((probabilities * mask).sum(dim=1, keepdim=True) * mask for mask in kept)
        rows = torch.einsum("td,te->etd", x, shares.bool().to(x.dtype))
        for e in range(E):
            token = shares[:, e].bool()
            made = self.down[e](F.relu(self.up[e](rows[e, token])))
            rows[e, token] = torch.einsum("t,td->td", shares[token, e], made)
        return rows.sum(dim=0)


def by_priority(mask, probabilities, before):
    order = (-probabilities.max(dim=1).values).argsort(dim=0)
    counted = mask[order]
    return ((counted.cumsum(dim=0) - 1) * counted)[order.argsort(dim=0)] + before


def in_their_order(mask, probabilities, before):
    return mask.cumsum(dim=0) - 1 + before


def masked_in_their_order(mask, probabilities, before):
    return (mask.cumsum(dim=0) - 1) * mask + before


def left_in_that_order(mask, probabilities, before):
    """The counts are not put back: they are those of other tokens."""
    order = (-probabilities.max(dim=1).values).argsort(dim=0)
    counted = mask[order]
    return (counted.cumsum(dim=0) - 1) * counted + before


def of_other_experts(mask, probabilities, before):
    """The counts are zero for tokens of the expert itself."""
    return (mask.cumsum(dim=0) - 1) * (1 - mask) + before


def of_the_next_expert(mask, probabilities, before):
    return ((mask.cumsum(dim=0) - 1) * mask).roll(1, dims=1) + before


@pytest.mark.parametrize("places", [by_priority, in_their_order, masked_in_their_order], ids=lambda places: places.__name__)
@pytest.mark.parametrize("tokens", [T, 7])
def test_tokens_that_are_kept(places, tokens):
    torch.manual_seed(1)
    backend = check_against_eager(Layer(places).double(), torch.randn(tokens, D, dtype=torch.float64), aot=True)
    assert len(backend.rewritten) == 1


@pytest.mark.parametrize("places", [left_in_that_order, of_other_experts, of_the_next_expert], ids=lambda places: places.__name__)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twin_is_left_alone_or_right(places, seed):
    torch.manual_seed(seed)
    check_against_eager(Layer(places).double(), torch.randn(T, D, dtype=torch.float64))
