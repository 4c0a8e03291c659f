"""Layers with experts that give a token back as it is, behind those that have weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import config
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

Z = 3
"""Experts without weights."""


class Layer(nn.Module):
    """A router over E + Z numbers, and E experts."""

    def __init__(self, combine, K: int = 3):
        super().__init__()
        self.router = zoo.Router(zoo.E + Z, K)
        self.norm = nn.RMSNorm(zoo.D)
        self.experts = nn.ModuleList(zoo.GluMLP() for _ in range(zoo.E))
        self.gate_up = nn.Parameter(torch.randn(zoo.E + Z, 2 * zoo.FF, zoo.D) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF) * 0.2)
        self.combine = combine

    def forward(self, x):
        x = self.norm(x)
        return self.combine(self, x, *self.router(x))


def _rows(weights, ids, e):
    token, slot = torch.where(ids == e)
    return token, weights[token, slot, None]


def _layer(self, x, weights, ids, passed, expert=None):
    """``expert`` and ``passed`` are called with a number and the rows of its tokens."""
    out = torch.zeros_like(x)
    for e in range(zoo.E + Z):
        token, share = _rows(weights, ids, e)
        if e >= zoo.E:
            y = passed(e, x[token])
        elif expert is None:
            y = self.experts[e](x[token])
        else:
            y = expert(e, x[token])
        out.index_add_(0, token, y * share)
    return out


def modules(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: x)


def stacked(self, x, weights, ids):
    """LongCat-Flash: the weights of the first projections are there for all numbers."""

    def expert(e, x):
        gate, up = F.linear(x, self.gate_up[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[e])

    return _layer(self, x, weights, ids, lambda e, x: x, expert)


def up_before_gate(self, x, weights, ids):
    def expert(e, x):
        up, gate = F.linear(x, self.gate_up[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[e])

    return _layer(self, x, weights, ids, lambda e, x: x, expert)


def new_sums(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in reversed(range(zoo.E)):
        token, share = _rows(weights, ids, e)
        out = out.index_add(0, token, share * self.experts[e](x[token]))
    for e in reversed(range(zoo.E, zoo.E + Z)):
        token, share = _rows(weights, ids, e)
        out = out.index_add(0, token, share * x[token])
    return out


def one_slot(self, x, weights, ids):
    return modules(self, x, weights[:, :1].contiguous(), ids[:, :1].contiguous())


@pytest.mark.parametrize("combine", [modules, stacked, up_before_gate, new_sums], ids=lambda f: f.__name__)
@pytest.mark.parametrize("checks_ids", [False, True])
def test_rewritten(combine, checks_ids, monkeypatch):
    monkeypatch.setattr(config, "check_expert_ids", checks_ids)
    backend = check_against_eager(Layer(combine), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert (found.E, found.K) == (zoo.E, 3)
    assert not {"index_add_", "index_add", "where"} & set(backend.operators()) and not backend.reasons


def test_one_slot():
    (found,) = check_against_eager(Layer(one_slot), torch.randn(20, zoo.D)).rewritten
    assert (found.E, found.K) == (zoo.E, 1)


def twice_the_token(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: 2 * x)


def of_another_tensor(self, x, weights, ids):
    out, other = torch.zeros_like(x), x.sin()
    for e in range(zoo.E + Z):
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, (self.experts[e](x[token]) if e < zoo.E else other[token]) * share)
    return out


def with_a_gap(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in (*range(zoo.E), zoo.E, zoo.E + 2):
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, (self.experts[e](x[token]) if e < zoo.E else x[token]) * share)
    return out


def one_number_twice(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in (*range(zoo.E), zoo.E, zoo.E):
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, (self.experts[e](x[token]) if e < zoo.E else x[token]) * share)
    return out


def number_of_an_expert(self, x, weights, ids):
    """What the last expert computes is not all that its tokens get."""
    out = modules(self, x, weights, ids)
    token, share = _rows(weights, ids, zoo.E - 1)
    return out.index_add(0, token, x[token] * share)


def other_weights(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(zoo.E + Z):
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, self.experts[e](x[token]) * share if e < zoo.E else x[token] * share.square())
    return out


def without_weights(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(zoo.E + Z):
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, self.experts[e](x[token]) * share if e < zoo.E else x[token])
    return out


def other_ids(self, x, weights, ids):
    out, shifted = torch.zeros_like(x), ids.roll(1, dims=0)
    for e in range(zoo.E + Z):
        token, share = _rows(weights, ids if e < zoo.E else shifted, e)
        out.index_add_(0, token, (self.experts[e](x[token]) if e < zoo.E else x[token]) * share)
    return out


def stored(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(zoo.E + Z):
        token, share = _rows(weights, ids, e)
        if e < zoo.E:
            out.index_add_(0, token, self.experts[e](x[token]) * share)
        else:
            out[token] = x[token] * share
    return out


def weights_of_another(self, x, weights, ids):
    """Of two experts each has the weights of the other."""

    def expert(e, x):
        gate, up = F.linear(x, self.gate_up[e ^ 1]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[e])

    return _layer(self, x, weights, ids, lambda e, x: x, expert)


NEAR_MISSES = (
    twice_the_token, of_another_tensor, with_a_gap, one_number_twice, number_of_an_expert, other_weights, without_weights,
    other_ids, stored, weights_of_another,
)  # fmt: skip


@pytest.mark.parametrize("combine", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(combine):
    backend = check_against_eager(Layer(combine), torch.randn(20, zoo.D))
    assert {"index_add_", "index_add", "setitem"} & set(backend.operators())
    assert all(candidate.E == zoo.E for candidate in backend.rewritten)
