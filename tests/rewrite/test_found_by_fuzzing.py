"""Layers that random programs were: what is proven of them ended in an error once."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.fuzz.run import check
from tests.corpus.zoo.catalogue import grouped_mm_fallback
from tests.tools.rewrite_harness import compiled, rewrite_of


class StacksOfSortedIds(nn.Module):
    """What is stacked is read at ids of which nothing is known but that they are sorted."""

    T, E, K, D, H = 3, 2, 1, 8, 8

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(self.D, self.E, bias=False)
        self.gate, self.up = (nn.ModuleList(nn.Linear(self.D, self.H) for _ in range(self.E)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(self.H, self.D, bias=False) for _ in range(self.E))

    def forward(self, x):
        x = x * 1.25
        weights, ids = torch.sigmoid(self.router(x)).topk(self.K)
        ids = ids.sort(-1)[0]
        flat = ids.view(-1)
        chosen, order = torch.sort(flat, stable=True)
        token = torch.arange(self.T)[:, None].expand(-1, self.K).reshape(-1)[order]
        offs = F.one_hot(flat, self.E).sum(0).cumsum(0).to(torch.int32)

        def product(rows, experts):
            return grouped_mm_fallback(rows, torch.stack([m.weight for m in experts]).transpose(-2, -1), offs)

        rows = x[token]
        g = product(rows, self.gate) + torch.stack([m.bias for m in self.gate])[chosen]
        u = product(rows, self.up) + torch.stack([m.bias for m in self.up])[chosen]
        a = (u.clamp(-7.0, 7.0) + 1) * g.clamp(max=7.0) * torch.sigmoid(1.702 * g.clamp(max=7.0))
        y = product(a, self.down) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, token, y)


class KeptByShares(nn.Module):
    """An expert's output is added where the token's share of it is above zero: an expression that grows with each expert."""

    T, E, K, D, H = 8, 5, 3, 16, 8

    def __init__(self):
        super().__init__()
        self.router, self.bias = nn.Linear(self.D, self.E, bias=False), nn.Parameter(torch.randn(self.E) * 0.4)
        self.base = nn.Linear(self.D, self.D, bias=False)
        self.up = nn.ModuleList(nn.Linear(self.D, self.H, bias=False) for _ in range(self.E))
        self.down = nn.ModuleList(nn.Linear(self.H, self.D, bias=False) for _ in range(self.E))

    def forward(self, x):
        probs = self.router(x).float().sigmoid()
        ids = torch.topk(probs + self.bias, self.K, dim=-1)[1]
        weights = torch.gather(probs, -1, ids)
        weights.mul_(2.5)
        weights = (weights.to(x.dtype) * 1.5).detach()
        out = self.base(x)
        for e in range(self.E):
            token = (ids == e).any(dim=-1).nonzero(as_tuple=True)[0]
            s = (weights * (ids == e)).sum(-1)
            y = self.down[e](F.gelu(self.up[e](x[None, token].reshape(-1, self.D))))
            out.index_add_(0, token, y * (s[token].unsqueeze(-1) > 0))
        return out


class HooksOnPartsOfRows(nn.Module):
    """A hook on each expert's output, of as many rows as a count says: torch 2.11 moves it before the counts."""

    T, E, K, D, H = 3, 3, 2, 16, 8

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(self.D, self.E, bias=False)
        self.up = nn.ModuleList(nn.Linear(self.D, self.H, bias=False) for _ in range(self.E))
        self.down = nn.ModuleList(nn.Linear(self.H, self.D, bias=False) for _ in range(self.E))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(self.K)
        flat = ids.reshape(-1)
        order = flat.sort()[1]
        token = order // self.K
        parts = []
        for e, rows in enumerate(x[token].split(torch.bincount(flat, minlength=self.E).tolist())):
            y = self.down[e](F.silu(self.up[e](rows)))
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * 2)
            parts.append(y)
        return torch.zeros_like(x).index_add_(0, token, torch.cat(parts) * weights.reshape(-1)[order, None])


class StoredByAFunction(nn.Module):
    """A function that Dynamo resumes behind a graph break stores the rows of one expert: of one row there is one number."""

    T, E, K, D, H = 3, 4, 3, 8, 8

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(self.D, self.E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(self.D, self.H), nn.SiLU(), nn.Linear(self.H, self.D)) for _ in range(self.E)
        )

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(self.K)
        flat, rows = ids.reshape(-1), x.repeat_interleave(self.K, dim=0)
        y = torch.zeros_like(rows)

        def one(e):
            y[flat == e] = self.experts[e](rows[flat == e])

        for e in sorted(set(ids.flatten().tolist())):
            one(e)
        return (y.view(self.T, self.K, self.D) * weights.unsqueeze(-1)).sum(dim=1)


@pytest.mark.parametrize("layer", [StacksOfSortedIds, KeptByShares, HooksOnPartsOfRows, StoredByAFunction])
def test_found_by_fuzzing(layer):
    torch.manual_seed(0)
    assert not check(layer(), torch.randn(layer.T, layer.D)).failure


def test_no_choices():
    """What has no column is in no one shape of as many tokens as there are numbers."""

    def layer(x):
        weights, ids = router(x).softmax(-1).topk(0)
        out = torch.zeros_like(x)
        for e in range(3):
            out = out + down[e](up[e](x).relu()) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    router, (up, down) = nn.Linear(8, 3), (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))
    assert rewrite_of(layer, torch.randn(2, 5, 8)).reasons == ["EXPERT_COVERAGE"]


def test_an_expert_numbered_minus_one():
    """What goes to no expert has an id that none of them has."""

    def layer(x):
        weights, ids = router(x).softmax(-1).topk(1)
        skipped = ids == 2
        weights, ids = weights.masked_fill(skipped, 0.0), ids.masked_fill(skipped, 0)
        out = torch.zeros_like(x)
        for number, up, down in zip((0, -1, 2), ups, downs, strict=True):
            token, slot = torch.where(ids == number)
            out[token] += down(up(x[token]).relu()) * weights[token, slot, None]
        return out

    torch.manual_seed(0)
    router, (ups, downs) = nn.Linear(8, 3), (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))
    x = torch.randn(16, 8)
    run, rewriting = compiled(layer)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(run(x), layer(x))
    assert rewriting.rewritten


def test_ids_of_a_slot_that_are_written_over():
    """Experts with dropout, which asks whether ids differ: those of a slot have a formula of their own."""

    def layer(x):
        weights, ids = router(x).softmax(-1).topk(2)
        ids[:, 1].copy_(ids[:, 1])
        out = torch.zeros_like(x)
        for k, e in itertools.product(range(2), range(3)):
            out = out + weights[:, k, None] * (ids[:, k, None] == e) * down[e](F.dropout(up[e](x).relu(), 0.1))
        return out

    router, (up, down) = nn.Linear(8, 3), (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))
    with torch.no_grad():
        assert rewrite_of(layer, torch.randn(5, 8)).reasons == ["STATEMENT"]


def test_a_bias_of_rows():
    """``linear`` of a vector and a bias of rows gives as many rows; its product is a vector."""

    def layer(x):
        weights, ids = router(x).softmax(-1).topk(3)
        out = torch.zeros_like(x)
        for e in range(3):
            token, slot = torch.where(ids == e)
            h = F.linear(x[token], up[e].weight, up[e].bias) if e else F.linear(up[e].bias, up[e].weight, x[token])
            out = out.index_add(0, token, down[e](h.relu()) * weights[token, slot, None])
        return out

    router, (up, down) = nn.Linear(8, 3), (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))
    assert rewrite_of(layer, torch.randn(1, 8)).reasons == ["DIFFERENT_INPUTS"]
