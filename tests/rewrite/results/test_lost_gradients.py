"""Inputs on which the result does not depend have gradients of zeros as written, and in a rewritten layer too."""

import pytest
import torch
from torch import Tensor

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


def test_declined():
    torch.manual_seed(0)
    run = check_against_eager(ModuleListMoE(filled_with_ones).double(), torch.randn(T, D, dtype=torch.float64))
    assert not run.rewritten
    assert run.reasons == ["GRADIENTS"]
