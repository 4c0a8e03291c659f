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
