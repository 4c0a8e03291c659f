"""The router before a rewritten layer becomes ``moeblaze::route`` where it is one, and stays where it is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rewrite_harness import check_against_eager

T, D, E, K, HIDDEN = 19, 8, 4, 2, 6


class Layer(nn.Module):
    """A masked loop over experts behind a router given as a function of the logits."""

    def __init__(self, router, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.route = router
        self.gate = nn.Linear(D, E, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(E, 2 * HIDDEN, D, dtype=dtype) / 3)
        self.down = nn.Parameter(torch.randn(E, D, HIDDEN, dtype=dtype) / 3)

    def forward(self, x):
        weights, experts, *rest = self.route(self.gate(x))
        out = torch.zeros_like(x)
        for e in range(E):
            chosen = (weights * (experts == e)).sum(-1, keepdim=True)
            gate, up = F.linear(x, self.up[e]).chunk(2, -1)
            out = out + F.linear(F.silu(gate) * up, self.down[e]) * chosen.to(x.dtype)
        return out + sum(rest) if rest else out


def softmax_first(logits):
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)


def renormalized(logits):
    weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float), K, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def renormalized_in_place(logits):
    weights, experts = torch.topk(F.softmax(logits, 1, dtype=torch.float), K)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def softmax_last(logits):
    values, experts = torch.topk(logits, K, dim=1)
    return F.softmax(values, dim=1, dtype=torch.float32), experts


def sigmoid_scaled(logits):
    weights, experts = logits.float().sigmoid().topk(K, dim=-1, sorted=True)
    return weights / weights.sum(-1, keepdim=True) * 2.5, experts


ROUTERS = (softmax_first, renormalized, renormalized_in_place, softmax_last, sigmoid_scaled)


def smallest(logits):
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K, largest=False)


def over_tokens(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=0, dtype=torch.float32), K)
    return weights, experts


def scaled_in_between(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    weights.mul_(0.5)
    return weights, experts


def shuffled(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    return weights.flip(-1), experts


def choices_used_elsewhere(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    return weights, experts, weights.sum()


def logits_changed_later(logits):
    values, experts = torch.topk(logits, K)
    logits.mul_(3)
    return F.softmax(values, dim=-1, dtype=torch.float32), experts


def divided_by_another_sum(logits):
    scores = F.softmax(logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(scores, K)
    return weights / scores.sum(-1, keepdim=True), experts


LOOKALIKES = (
    smallest, over_tokens, scaled_in_between, shuffled, choices_used_elsewhere, logits_changed_later, divided_by_another_sum,
)  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_is_fused(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert any("route" in name for name in rewriting.operators())


@pytest.mark.parametrize("router", ROUTERS)
def test_low_precision_logits_are_scored_in_fp32(router):
    layer = Layer(router, torch.bfloat16)
    # bf16 rounds h, a, y and the sum over experts: a few times 2^-8 of the largest value.
    rewriting = check_against_eager(layer, torch.randn(T, D, dtype=torch.bfloat16), tolerance=3e-2)
    assert any("route" in name for name in rewriting.operators())


def test_weights_of_one_slot_are_cast_behind_the_mask():
    class PerSlot(Layer):
        def forward(self, x):
            weights, experts = self.route(self.gate(x))
            out = torch.zeros_like(x)
            for k in range(K):
                for e in range(E):
                    chosen = (weights[:, k] * (experts[:, k] == e)).to(x.dtype)
                    gate, up = F.linear(x, self.up[e]).chunk(2, -1)
                    out += F.linear(F.silu(gate) * up, self.down[e]) * chosen[:, None]
            return out

    layer = PerSlot(renormalized, torch.bfloat16)
    rewriting = check_against_eager(layer, torch.randn(T, D, dtype=torch.bfloat16), tolerance=3e-2)
    assert len(rewriting.rewritten) == 1


@pytest.mark.parametrize("router", LOOKALIKES)
def test_a_lookalike_stays(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert not any("route" in name for name in rewriting.operators())


def test_scores_in_low_precision_stay():
    rewriting = check_against_eager(
        Layer(lambda logits: torch.topk(F.softmax(logits, dim=-1), K), torch.bfloat16),
        torch.randn(T, D, dtype=torch.bfloat16),
        tolerance=3e-2,
    )
    assert not any("route" in name for name in rewriting.operators())
