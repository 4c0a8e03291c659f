"""Experts whose output is as wide as something else than their input: heads, LoRA experts beside a Linear."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import config
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, rewrite_of

T, D, H, E, K = 12, 8, 12, 4, 2


class Heads(nn.Module):
    def __init__(self, width, combine, bias=True):
        super().__init__()
        self.width, self.combine = width, combine
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, H, bias=bias) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(H, width, bias=bias) for _ in range(E))

    def expert(self, e, x):
        return self.down[e](F.silu(self.up[e](x)))

    def forward(self, x):
        return self.combine(self, x, *self.router(x).softmax(-1).topk(K, dim=-1))


def loop(self, x, weights, ids):
    out = x.new_zeros(len(x), self.width)
    for e in range(E):
        token, k = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, k, None])
    return out


def masked(self, x, weights, ids):
    return sum((weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x) for e in range(E))


@pytest.mark.parametrize(("combine", "width", "keep"), [
    (loop, 5, "preactivation"), (loop, 2 * D, "input"), (masked, H, "preactivation"), (masked, 5, "input"),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_widths(fp64, monkeypatch, combine, width, keep):
    monkeypatch.setattr(config, "keep", keep)
    backend = check_against_eager(Heads(width, combine), torch.randn(T, D), aot=True)
    assert_replaced(backend)
    assert backend.rewritten[0].D == D


@pytest.mark.parametrize("combine", [loop, masked], ids=lambda f: f.__name__)
def test_without_gradients(fp64, combine):
    layer, x = Heads(5, combine), torch.randn(T, D)
    with torch.no_grad():
        backend = rewrite_of(layer, x)
    assert "expert_mlp" not in backend.rewritten[0].became


def by_columns(self, x, weights, ids):
    scores = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, weights)
    out = torch.zeros(len(x), self.width, dtype=x.dtype)
    for e in range(E):
        out = out + scores[:, e : e + 1] * self.expert(e, x)
    return out


def stacked(self, x, weights, ids):
    scores = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, weights)
    return torch.einsum("te,teo->to", scores, torch.stack([self.expert(e, x) for e in range(E)], dim=1))


def in_last_places(self, x, weights, ids):
    scores = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, weights)
    return (torch.stack([self.expert(e, x) for e in range(E)], dim=-1) * scores.unsqueeze(-2)).sum(-1)


def stored(self, x, weights, ids):
    rows = x.repeat_interleave(K, dim=0)
    y, flat = rows.new_empty(len(rows), self.width), ids.reshape(-1)
    for e in range(E):
        y[flat == e] = self.expert(e, rows[flat == e])
    return (y.view(len(x), K, -1) * weights.unsqueeze(-1)).sum(1)


def together(self, x, weights, ids):
    up, down = (torch.stack([own.weight for own in owns]) for owns in (self.up, self.down))
    y = torch.einsum("tef,eof->teo", F.silu(torch.einsum("td,efd->tef", x, up)), down)
    return torch.einsum("tk,tke,teo->to", weights, F.one_hot(ids, E).to(x.dtype), y)


COMBINED = [loop, masked, by_columns, stacked, in_last_places, stored, together]


@pytest.mark.parametrize("combine", COMBINED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("bias", (True, False))
def test_one_feature(fp64, combine, bias):
    """As heads have that score or regress."""
    layer, x = Heads(1, combine, bias and combine is not together), torch.randn(T, D)
    backend = check_against_eager(layer, x, aot=True)
    assert len(backend.rewritten) == 1 and not backend.reasons


def of_the_whole_sum(self, x, weights, ids):
    return masked(self, x, weights, ids) * weights.sum()


def of_other_tokens(self, x, weights, ids):
    return sum((weights * (ids == e)).sum(-1, keepdim=True).flip(0) * self.expert(e, x) for e in range(E))


def of_the_next_column(self, x, weights, ids):
    scores = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, weights)
    return sum(scores[:, e - 1 : e or None][:, -1:] * self.expert(e, x) for e in range(E))


def of_all_columns(self, x, weights, ids):
    scores = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, weights)
    return sum((scores * self.expert(e, x)).sum(-1, keepdim=True) for e in range(E))


def spread(self, x, weights, ids):
    """As wide as the tokens: one number in all features."""
    return x + masked(self, x, weights, ids)


def added_to_each(self, x, weights, ids):
    return sum((weights * (ids == e)).sum(-1, keepdim=True) * (self.expert(e, x) + x[:, :1]) for e in range(E))


def over_tokens(self, x, weights, ids):
    return sum((weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x).cumsum(0) for e in range(E))


def one_expert_of_all(self, x, weights, ids):
    return sum((weights * (ids == e)).sum(-1, keepdim=True) * self.expert(0, x) for e in range(E))


OTHERS = [
    of_the_whole_sum, of_other_tokens, of_the_next_column, of_all_columns, spread, added_to_each, over_tokens, one_expert_of_all,
]  # fmt: skip


@pytest.mark.parametrize("combine", OTHERS, ids=lambda f: f.__name__)
def test_twins_of_one_feature(fp64, combine):
    check_against_eager(Heads(1, combine), torch.randn(T, D))


class LoRAExperts(Heads):
    """Experts of two factors, added to what a Linear of another width gives."""

    def __init__(self):
        super().__init__(5, masked, bias=False)
        self.base = nn.Linear(D, 5)

    def expert(self, e, x):
        return self.down[e](self.up[e](x)) * 2.0

    def forward(self, x):
        return self.base(x) + super().forward(x)


def test_factors_beside_a_linear(fp64):
    backend = check_against_eager(LoRAExperts(), torch.randn(T, D), aot=True)
    assert len(backend.rewritten) == 1 and not backend.reasons


class Shifted(Heads):
    def expert(self, e, x):
        return super().expert(e, x).cumsum(-1)


class AddedToken(Heads):
    """An expert that gives a part of its token: no output of two projections."""

    def expert(self, e, x):
        return super().expert(e, x) + x[:, : self.width]


@pytest.mark.parametrize("layer", [Shifted, AddedToken])
def test_twins(layer):
    backend = rewrite_of(layer(5, masked), torch.randn(T, D))
    assert not backend.rewritten and backend.reasons
