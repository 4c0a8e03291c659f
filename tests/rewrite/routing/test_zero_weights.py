"""Masks of weights that are not zero: weights that underflow, weights that may be zero otherwise, and what is proven of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager


class _Layer(nn.Module):
    """Weights and ids by ``choose(logits)``; logits are so large that a second probability is often zero."""

    def __init__(self, combine, choose):
        super().__init__()
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(zoo.E))
        self.gate = nn.Linear(zoo.D, zoo.E, bias=False)
        self.combine, self.choose = combine, choose

    def logits(self, x):
        return self.gate(x) * 2000

    def forward(self, x):
        weights, ids = self.choose(self.logits(x))
        return self.combine(self, x, weights, ids)


def _softmax(logits):
    return F.softmax(logits, dim=-1).topk(2, dim=-1)


def _renormalized(logits):
    weights, ids = _softmax(logits)
    return weights / (weights.sum(-1, keepdim=True) + 1e-9), ids


def _softmax_of_two(logits):
    values, ids = logits.topk(2, dim=-1)
    return F.softmax(values, dim=-1), ids


def _sigmoid(logits):
    scores = logits.sigmoid()
    ids = (logits + 1).topk(2, dim=-1).indices
    return 2.5 * scores.gather(-1, ids), ids


def _rounded(logits):
    """The second weight is zero in fp16 long before its gradient is."""
    weights, ids = _softmax(logits / 400)
    return weights.half().double(), ids


def _above_a_threshold(logits):
    weights, ids = _softmax(logits / 2000)
    return weights * (weights > 0.3), ids


def _less_the_least(logits):
    values, ids = logits.topk(2, dim=-1)
    return values - values[:, 1:], ids


def _of_an_untrained_scale(logits):
    weights, ids = _softmax(logits / 2000)
    return weights * F.relu(logits[:, :1]), ids


def _signed(logits):
    weights, ids = _softmax(logits / 2000)
    return weights - 0.3, ids


FADING = (_softmax, _renormalized, _softmax_of_two, _sigmoid, _above_a_threshold)
OTHERS = (_rounded, _less_the_least, _signed)
REASONS = {"ROUTING", "SLOT_WEIGHTS", "STATEMENT"}


@pytest.mark.parametrize(("combine", "choose"), [*zip(zoo.NONZERO, FADING, strict=True), (zoo.nonzero_where, _softmax)])
def test_weights_that_underflow(fp64, combine, choose):
    layer, x = _Layer(combine, choose), torch.randn(12, zoo.D)
    assert (choose(layer.logits(x))[0] == 0).any()
    backend = check_against_eager(layer, x)
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize(("combine", "choose"), [
    *((zoo.nonzero_where, choose) for choose in OTHERS), (zoo.nonzero_loop, _rounded), (zoo.nonzero_mask, _less_the_least),
    (zoo.nonzero_joined, _signed), (zoo.nonzero_stored, _rounded),
])  # fmt: skip
def test_weights_that_may_be_zero_otherwise(fp64, combine, choose):
    """A mask of all scores says which slots are unused, or one of each expert; other rows are those of the slots themselves."""
    layer, x = _Layer(combine, choose), torch.randn(12, zoo.D)
    layer.gate.weight.data *= 6  # the second weight is zero in fp16
    backend = check_against_eager(layer, x)
    rewritten = combine in (zoo.nonzero_where, zoo.nonzero_loop)
    assert len(backend.rewritten) == rewritten and set(backend.reasons) <= REASONS


@pytest.mark.parametrize("combine", zoo.NONZERO, ids=lambda f: f.__name__)
def test_weights_that_a_rectified_number_may_make_zero(fp64, combine):
    """The mask of a product may go where no gradient gets past a zero of any factor; it is not always seen."""
    layer, x = _Layer(combine, _of_an_untrained_scale), torch.randn(12, zoo.D)
    assert (_of_an_untrained_scale(layer.logits(x))[0] == 0).any()
    backend = check_against_eager(layer, x)
    assert set(backend.reasons) <= REASONS
