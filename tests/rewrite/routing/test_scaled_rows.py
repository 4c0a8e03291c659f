"""Routing weights on the rows that an expert takes: it makes something else of each slot's, so the slots are summed around it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

T, E, K = 9, zoo.E, zoo.K


class Layer(nn.Module):
    """``combine(layer, x, weights, ids)`` is what the layer makes of its routed tokens."""

    def __init__(self, combine, activation=F.silu, bias=False, top_k=K):
        super().__init__()
        torch.manual_seed(0)
        self.router = zoo.Router(K=top_k)
        self.up, self.down = nn.Parameter(torch.randn(E, zoo.D, zoo.FF)), nn.Parameter(torch.randn(E, zoo.FF, zoo.D))
        self.of_slot = nn.Parameter(torch.rand(top_k))
        self.b_up, self.b_down = (nn.Parameter(torch.randn(E, n)) if bias else [0.0] * E for n in (zoo.FF, zoo.D))
        self.combine, self.act = combine, activation

    def expert(self, e, rows):
        return self.act(rows @ self.up[e] + self.b_up[e]) @ self.down[e] + self.b_down[e]

    def forward(self, x):
        weights, ids = self.router(x)
        return self.combine(self, x, weights, ids)


def looped(run, find=lambda ids, e: torch.where(ids == e)):
    """A loop over experts that adds what ``run(layer, e, x, weights, token, k)`` makes of each expert's slots."""

    def combine(layer, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, k = find(ids, e)
            out.index_add_(0, token, run(layer, e, x, weights, token, k))
        return out

    return combine


added = looped(lambda self, e, x, w, token, k: self.expert(e, x[token] * w[token, k, None]))
by_mask = looped(
    lambda self, e, x, w, token, k: self.expert(e, x[token] * w[token, k, None]),
    lambda ids, e: F.one_hot(ids, E).permute(2, 0, 1)[e].nonzero(as_tuple=True),
)
all_scaled = looped(lambda self, e, x, w, token, k: self.expert(e, (x.unsqueeze(1) * w.unsqueeze(-1))[token, k]))


def written(layer, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        token, k = torch.where(ids == e)
        out[token] += layer.expert(e, x[token] * weights[token, k, None])
    return out


def of_scores(layer, x, weights, ids):
    scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, weights)
    out = torch.zeros_like(x)
    for e in range(E):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, layer.expert(e, x[token] * scores[token, e, None]))
    return out


def of_sums(layer, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        token = (ids == e).any(-1).nonzero(as_tuple=True)[0]
        own = (weights * (ids == e)).sum(-1, keepdim=True)
        out[token] += layer.expert(e, x[token] * own[token])
    return out


ACTIVATIONS = {"silu": F.silu, "relu2": lambda h: F.relu(h) ** 2, "not_zero_at_zero": torch.sigmoid}


# Each spelling with an activation that is zero at zero and one that is not, each activation with a bias and without.
@pytest.mark.parametrize(("combine", "activation", "bias"), [
    (added, "silu", True), (added, "not_zero_at_zero", False), (by_mask, "relu2", False), (by_mask, "not_zero_at_zero", True),
    (all_scaled, "silu", False), (all_scaled, "not_zero_at_zero", True), (written, "relu2", True),
    (written, "not_zero_at_zero", False), (of_scores, "silu", True), (of_scores, "not_zero_at_zero", False),
    (of_sums, "relu2", False), (of_sums, "not_zero_at_zero", False),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_rewritten(combine, activation, bias):
    layer = Layer(combine, ACTIVATIONS[activation], bias).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert len(rewriting.rewritten) == 1


@pytest.mark.parametrize("combine, bias", [(added, True), (written, True), (of_sums, False)], ids=["added", "written", "of_sums"])
def test_one_slot(combine, bias):
    layer = Layer(combine, ACTIVATIONS["relu2"], bias, top_k=1).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert len(rewriting.rewritten) == 1


def repeated(combine):
    """Every expert twice: the slots may have the same one."""
    return lambda layer, x, weights, ids: combine(layer, x, weights.repeat(1, 2) * layer.of_slot, ids.repeat(1, 2))


def test_slots_of_the_same_expert():
    """Each is an input of its own, so ids may be there twice; where they are stored, or their weights added up, they may not."""
    for combine, number in ((added, 1), (written, 0), (of_sums, 0)):
        layer = Layer(repeated(combine)).double()
        layer.of_slot = nn.Parameter(torch.rand(2 * K, dtype=torch.float64))
        rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
        assert len(rewriting.rewritten) == number


# Near misses.

on_both_sides = looped(
    lambda self, e, x, w, token, k: self.expert(e, x[token] * w[token, k, None]) * w[token, k, None]
)
on_half_of_the_activation = looped(
    lambda self, e, x, w, token, k: (F.silu(x[token] * w[token, k, None] @ self.up[e]) + x[token] @ self.up[e]) @ self.down[e]
)
of_another_token = looped(lambda self, e, x, w, token, k: self.expert(e, x[token] * w[token.flip(0), k, None]))
rows_of_slots = looped(
    lambda self, e, x, w, token, k: self.expert(e, (x[token] + self.of_slot[k, None]) * w[token, k, None])
)
activation_of_slots = looped(
    lambda self, e, x, w, token, k: F.silu((x[token] * w[token, k, None]) @ self.up[e] * self.of_slot[k, None] + 1)
    @ self.down[e]
)
bias_of_slots = looped(
    lambda self, e, x, w, token, k: self.expert(e, x[token] * w[token, k, None]) + self.of_slot[k, None]
)
only_the_slot = looped(lambda self, e, x, w, token, k: F.silu(x[token] @ self.up[e] + self.of_slot[k, None]) @ self.down[e])


def same_id_for_all_slots(layer, x, weights, ids):
    return added(layer, x, weights, ids[:, :1].expand(-1, K))


def bias_of_all_tokens(layer, x, weights, ids):
    """Experts make something of the zeros of tokens that they do not have."""
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + layer.expert(e, x * (weights * (ids == e)).sum(-1, keepdim=True))
    return out


NEAR_MISSES = {
    "on_both_sides": on_both_sides,
    "on_half_of_the_activation": on_half_of_the_activation,
    "of_another_token": of_another_token,
    "rows_of_slots": rows_of_slots,
    "activation_of_slots": activation_of_slots,
    "bias_of_slots": bias_of_slots,
    "only_the_slot": only_the_slot,
    "bias_of_all_tokens": bias_of_all_tokens,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    layer = Layer(NEAR_MISSES[name], bias=True).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert not rewriting.rewritten
    assert rewriting.reasons


def test_the_same_expert_for_all_slots():
    layer = Layer(same_id_for_all_slots, bias=True).double()
    check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
