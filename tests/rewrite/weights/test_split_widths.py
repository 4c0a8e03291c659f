"""Experts split by width into products one behind the other, as ``pretraining_tp`` of DiT-MoE's and DeepSeek's code does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")
T, D, H, E, K = 12, 8, 12, 4, 2


class Layer(nn.Module):
    def __init__(self, sizes, read=None, bias=False):
        """``read``: which parts of the activation the parts of the last projection take, each its own if not given."""
        super().__init__()
        self.sizes, self.read = sizes, read or range(len(sizes))
        self.router = nn.Linear(D, E, bias=False)
        self.gate, self.up = (nn.ModuleList(nn.Linear(D, H, bias=False) for _ in range(E)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(H, D, bias=bias) for _ in range(E))

    def expert(self, e, x):
        gates, ups = self.gate[e].weight.split(self.sizes, dim=0), self.up[e].weight.split(self.sizes, dim=0)
        gate, up = (torch.cat([F.linear(x, part) for part in parts], dim=-1) for parts in (gates, ups))
        rows = (F.silu(gate) * up).split(self.sizes, dim=-1)
        downs = self.down[e].weight.split(self.sizes, dim=1)
        out = sum(F.linear(rows[i], part) for i, part in zip(self.read, downs, strict=True))
        return out if self.down[e].bias is None else out + self.down[e].bias

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        return sum((weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x) for e in range(E))


@pytest.mark.parametrize(("sizes", "bias"), [((6, 6), True), ((4, 4, 4), False), ((5, 7), False), ((2, 7, 3), True)])
def test_one_product_over_the_whole_width(sizes, bias):
    backend = check_against_eager(Layer(sizes, bias=bias), torch.randn(T, D))
    (found,) = backend.rewritten
    assert found.D == D and not backend.reasons and "cat" not in backend.operators()


class Twice(Layer):
    """The product of the first part is added once more."""

    def expert(self, e, x):
        h = F.silu(self.gate[e](x)) * self.up[e](x)
        parts = [F.linear(h[:, at], self.down[e].weight[:, at]) for at in (slice(0, 6), slice(0, 6), slice(6, 12))]
        return parts[0] + parts[1] + parts[2]


def test_a_part_that_is_added_twice():
    assert not check_against_eager(Twice((6, 6)), torch.randn(T, D)).rewritten


@pytest.mark.parametrize(("sizes", "read"), [((6, 6), (1, 0)), ((6, 6), (0, 0)), ((4, 4, 4), (0, 2, 1)), ((4, 4, 4), (0, 1, 1))])
def test_parts_of_others(sizes, read):
    assert not check_against_eager(Layer(sizes, read), torch.randn(T, D)).rewritten
