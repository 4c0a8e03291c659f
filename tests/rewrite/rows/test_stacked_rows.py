"""All experts on all tokens as [E, T, D], whose rows are added to their tokens: Llama 4 with a module for each expert."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

T, E, D, W = 18, 3, 6, 5


def stored(outputs):
    out = torch.zeros(len(outputs), *outputs[0].shape, dtype=outputs[0].dtype)
    for e, y in enumerate(outputs):
        out[e] = y
    return out


class Layer(nn.Module):
    """``join`` puts outputs of experts together, ``rows`` says which tokens theirs are."""

    def __init__(self, join, rows):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = (nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(E)) for sizes in ((D, W), (W, D)))
        self.join, self.rows = join, rows

    def forward(self, x):
        weights, ids = self.router(x).topk(1, dim=-1)
        scores = torch.full((len(x), E), float("-inf"), dtype=x.dtype).scatter_(1, ids, weights).sigmoid()
        given = (x * scores.mT[:, :, None]).view(E, len(x), D)
        y = self.join([self.down[e](F.silu(self.up[e](given[e]))) for e in range(E)])
        return torch.zeros_like(x).index_add_(0, self.rows(torch.arange(len(x))), y.reshape(-1, D))


ALL = {
    "stack": (torch.stack, lambda tokens: tokens.repeat(E)),
    "stored": (stored, lambda tokens: tokens.repeat(E)),
    "expanded": (torch.stack, lambda tokens: tokens.view(1, -1).expand(E, -1).reshape(-1)),
    "joined": (lambda outputs: torch.cat([y[None] for y in outputs]), lambda tokens: tokens.repeat(E)),
}


@pytest.mark.parametrize("name", ALL)
def test_rows_of_all_experts(name):
    assert len(check_against_eager(Layer(*ALL[name]), torch.randn(T, D)).rewritten) == 1


def test_rows_of_however_many_tokens():
    backend = check_against_eager(Layer(*ALL["stored"]), torch.randn(T, D), dynamic=True)
    assert len(backend.rewritten) == 1


TWINS = {
    "token_by_token": (torch.stack, lambda tokens: tokens.repeat_interleave(E)),
    "of_other_tokens": (torch.stack, lambda tokens: torch.cat((tokens.flip(0), *[tokens] * (E - 1)))),
    "stacked_inside": (lambda outputs: torch.stack(outputs, dim=1), lambda tokens: tokens.repeat(E)),
}


@pytest.mark.parametrize("name", TWINS)
def test_rows_of_other_tokens_are_equal_or_left_alone(name):
    x, twin = torch.randn(T, D), Layer(*TWINS[name])
    assert not torch.allclose(twin(x), Layer(*ALL["stack"])(x), rtol=1e-3)
    check_against_eager(twin, x)
