"""Layers that random programs were: what is proven of them ended in an error once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


class Layer(nn.Module):
    def __init__(self, combine, num_experts: int, top_k: int):
        super().__init__()
        self.combine, self.top_k = combine, top_k
        self.router = nn.Linear(zoo.D, num_experts)
        self.experts = nn.ModuleList(zoo.PlainMLP() for _ in range(num_experts))

    def forward(self, x):
        return self.combine(self, x, *torch.topk(self.router(x).sigmoid(), self.top_k))


def stacks_of_sorted_ids(self, x, weights, ids):
    """The choices of a token are sorted by number, and not its weights; what is stacked is read at the ids."""
    ids = ids.sort(-1)[0]
    flat, order = ids.view(-1).sort(stable=True)
    offs = F.one_hot(flat, len(self.experts)).sum(0).cumsum(0).to(torch.int32)
    token = order // self.top_k

    def of(name, what):
        return torch.stack([getattr(getattr(expert, name), what) for expert in self.experts])

    h = zoo.grouped_mm_fallback(x[token], of("fc1", "weight").transpose(-2, -1), offs) + of("fc1", "bias")[flat]
    y = zoo.grouped_mm_fallback(F.gelu(h), of("fc2", "weight").transpose(-2, -1), offs)
    return torch.zeros_like(x).index_add(0, token, y * weights.reshape(-1)[order, None])


def kept_by_a_sum_of_shares(self, x, weights, ids):
    """An expert's output is added where the token's share of it is above zero: an expression that grows with each expert."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token = (ids == e).any(dim=-1).nonzero(as_tuple=True)[0]
        share = (weights * (ids == e)).sum(-1)[token].unsqueeze(-1)
        out.index_add_(0, token, expert(x[None, token].reshape(-1, zoo.D)) * (share > 0))
    return out


@pytest.mark.parametrize(("combine", "num_experts", "top_k"), [
    (stacks_of_sorted_ids, 2, 1), (stacks_of_sorted_ids, 4, 2), (kept_by_a_sum_of_shares, 5, 3),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_found_by_fuzzing(combine, num_experts, top_k):
    check_against_eager(Layer(combine, num_experts, top_k), torch.randn(8, zoo.D))
