"""Operands that are given by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.zoo.modules import FF, D, E, ModuleListMoE
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


class Tiled(nn.Module):
    """Every expert on every token, as in Meta's Llama 4: gathered and added by positions that repeat for each expert."""

    def __init__(self, K: int = 1, shift: int = 0):
        super().__init__()
        self.K, self.shift = K, shift
        self.router, self.shared = nn.Parameter(torch.randn(D, E)), nn.Linear(D, D)
        self.gate, self.up = nn.Parameter(torch.randn(E, D, FF)), nn.Parameter(torch.randn(E, D, FF))
        self.down = nn.Parameter(torch.randn(E, FF, D))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.matmul(input=x, other=self.router)
        best, chosen = torch.topk(input=logits, k=self.K, dim=1)
        scores = torch.full_like(input=logits, fill_value=float("-inf")).scatter_(1, chosen, best)
        scores = torch.sigmoid(input=scores).transpose(0, 1)
        token = torch.arange(x.shape[0]).view(1, -1).expand(E, -1).reshape(-1, 1).expand(-1, D)
        rows = torch.gather(input=x, dim=0, index=(token + self.shift) % x.shape[0])
        rows = torch.mul(input=rows, other=scores.reshape(-1, 1)).view(E, -1, D)
        y = torch.bmm(F.silu(input=torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)
        return self.shared(x).scatter_add(dim=0, index=token, src=y.view(-1, D))


def masked(self, x, weights, ids):
    out = torch.zeros_like(input=x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(condition=mask[e])
        share = torch.unsqueeze(input=weights[token, slot], dim=-1)
        out = torch.index_add(input=out, dim=0, index=token, source=torch.mul(input=expert(x[token]), other=share))
    return out


def joined(self, x, weights, ids, reverse=False):
    """The parts of a split that is given its tensor by name are joined again."""
    halves = torch.split(tensor=x, split_size_or_sections=D // 2, dim=-1)
    x = torch.cat(tensors=halves[::-1] if reverse else halves, dim=-1)
    outs = torch.stack(tensors=[expert(x) for expert in self.experts])
    scores = torch.zeros(x.shape[0], len(self.experts)).scatter_(1, ids, weights)
    return torch.sum(input=outs * scores.t().unsqueeze(-1), dim=0)


@pytest.mark.parametrize("K", [1, 2])
def test_tiled(K):
    backend = check_against_eager(Tiled(K), torch.randn(7, D))
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize("combine", [masked, joined])
def test_loops(combine):
    backend = check_against_eager(ModuleListMoE(combine), torch.randn(7, D))
    assert len(backend.rewritten) == 1 and not backend.reasons


def test_rows_of_another_token():
    assert not check_against_eager(Tiled(shift=1), torch.randn(7, D)).rewritten


_ROWS = {
    "embedding": (lambda token, x: F.embedding(token, x), 1),
    "a row without a gradient": (lambda token, x: F.embedding(token, x, padding_idx=0), 0),
    "the last row without a gradient": (lambda token, x: F.embedding(token, x, padding_idx=-1), 0),
    "gradients by frequency": (lambda token, x: F.embedding(token, x, scale_grad_by_freq=True), 0),
}


@pytest.mark.parametrize("name", _ROWS)
def test_rows_of_a_table(name):
    """A table may treat some of its rows otherwise, in backward alone."""
    rows, rewritten = _ROWS[name]

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, expert(rows(token, x)) * weights[token, slot, None])
        return out

    assert len(check_against_eager(ModuleListMoE(combine), torch.randn(7, D)).rewritten) == rewritten


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_that_end_by_name(first):
    """Where they begin at 1, an id of 0 has no expert, and the last expert no id: it stays beside the layer."""

    def combine(self, x, weights, ids):
        numbers = torch.arange(first, end=first + len(self.experts))
        scores = (weights.unsqueeze(-1) * (ids.unsqueeze(-1) == numbers)).sum(1)
        return sum(scores[:, e, None] * expert(x) for e, expert in enumerate(self.experts))

    (layer,) = check_against_eager(ModuleListMoE(combine), torch.randn(7, D)).rewritten
    assert E - first == layer.E
