"""Inputs on which the result does not depend have gradients of zeros as written, and in a rewritten layer too."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.zoo.modules import D, ModuleListMoE
from tests.tools.rewrite_harness import check_against_eager

T = 6


def masks(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * ((ids == e) * weights).sum(-1, keepdim=True)
    return out


def filled(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    weights.fill_(0.5)
    return masks(self, x, weights, ids)


def filled_with_ones(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The layer has no weights."""
    weights.fill_(1)
    return masks(self, x, weights, ids)


def filled_with_ones_and_read_before(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    balance = weights.square().sum()
    return filled_with_ones(self, x, weights.clone(), ids) + balance


def constant(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return masks(self, x, torch.full_like(weights, 0.5), ids)


@pytest.mark.parametrize("layer", [filled, filled_with_ones_and_read_before, constant])
def test_rewritten(layer):
    """The router's gradient of zeros comes with the weights, or it has another one, or none as written."""
    torch.manual_seed(0)
    assert check_against_eager(ModuleListMoE(layer).double(), torch.randn(T, D, dtype=torch.float64)).rewritten


def filled_with_ones_and_kept(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """What the layer reads of its weights is which of them were kept: a number that is only compared with zero."""
    count = F.one_hot(ids, len(self.experts)).sum(1).cumsum(0).gather(1, ids)
    weights.fill_(1)
    return masks(self, x, weights * (count <= 3), ids)


@pytest.mark.parametrize("layer", [filled_with_ones, filled_with_ones_and_kept])
def test_declined(layer):
    torch.manual_seed(0)
    run = check_against_eager(ModuleListMoE(layer).double(), torch.randn(T, D, dtype=torch.float64))
    assert not run.rewritten
    assert run.reasons == ["GRADIENTS"]


_COMPARED = {
    "a parameter": (lambda g, u, bound: torch.where(g > bound, g, u), False),
    "a number of a parameter": (lambda g, u, bound: torch.where(g > bound.detach(), g, u), True),
    "the larger": (lambda g, u, bound: torch.maximum(g, bound) * u, True),
    "a gate": (lambda g, u, bound: (g > 0) * u, False),
    "a gate that is passed on": (lambda g, u, bound: torch.where(g > 0, g, u), True),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", _COMPARED)
def test_what_is_only_compared_has_no_gradient(name, packed):
    """A gate that is a part of a weight has a gradient of zeros as written: that of its part."""
    activation, rewritten = _COMPARED[name]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.bound = nn.Linear(8, 3, bias=False), nn.Parameter(torch.ones(1))
            self.w_gate, self.w_up = (nn.Parameter(torch.randn(3, 6, 8)) for _ in range(2))
            self.w_both, self.w_down = nn.Parameter(torch.randn(3, 12, 8)), nn.Parameter(torch.randn(3, 8, 6))

        def expert(self, e, x):
            g, u = (x @ self.w_both[e].T).chunk(2, -1) if packed else (x @ self.w_gate[e].T, x @ self.w_up[e].T)
            return activation(g, u, self.bound) @ self.w_down[e].T

        def forward(self, x):
            weights, ids = self.router(x).softmax(-1).topk(2, -1)
            return sum((weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x) for e in range(3))

    torch.manual_seed(0)
    run = check_against_eager(Layer(), torch.randn(5, 8), tolerance=1e-4)
    rewritten |= packed and name == "a gate"
    assert len(run.rewritten) == rewritten and set(run.reasons) <= {"GRADIENTS"}
