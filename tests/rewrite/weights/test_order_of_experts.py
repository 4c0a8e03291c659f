"""Stacked weights of which a loop over experts reads another part than the one of the expert's number: they are left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

T, D, FF, E, K = 9, 6, 7, 5, 2


class Layer(nn.Module):
    def __init__(self, up_of, down_of):
        super().__init__()
        self.up_of, self.down_of = up_of, down_of
        self.router = nn.Linear(D, E)
        self.w_up, self.w_down = nn.Parameter(torch.randn(E, 2 * FF, D)), nn.Parameter(torch.randn(E, D, FF))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, value = F.linear(x[token], self.w_up[self.up_of(e)]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * value, self.w_down[self.down_of(e)])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def own(e):
    return e


def the_next_one(e):
    return (e + 1) % E


def a_part_twice(e):
    return e // 2


@pytest.mark.parametrize("up_of, down_of", [(the_next_one, the_next_one), (the_next_one, own), (a_part_twice, a_part_twice)])
def test_other_parts_than_the_own(up_of, down_of):
    backend = check_against_eager(Layer(up_of, down_of), torch.randn(T, D))
    assert not backend.rewritten and backend.reasons == ["EXPERT_COVERAGE"]
