"""Zeros made with requires_grad=True, to which a layer's outputs are added: `SparseDispatcher`, and what is not like it."""

import pytest
import torch

from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

T = 10


def added(self, x, weights, ids, zeros):
    rows = [torch.where(ids == e) for e in range(len(self.experts))]
    parts = [self.experts[e](x[token]) * weights[token, slot, None] for e, (token, slot) in enumerate(rows)]
    return zeros.index_add(0, torch.cat([token for token, _ in rows]), torch.cat(parts))


def of_sizes(self, x, weights, ids):
    return added(self, x, weights, ids, torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype, requires_grad=True))


def like_tokens(self, x, weights, ids):
    return added(self, x, weights, ids, torch.zeros_like(x, requires_grad=True))


def kept(self, x, weights, ids):
    self.zeros = torch.zeros_like(x, requires_grad=True)
    return added(self, x, weights, ids, self.zeros)


def summed(self, x, weights, ids):
    zeros = torch.zeros_like(x, requires_grad=True)
    return added(self, x, weights, ids, zeros), zeros.sum()


def viewed(self, x, weights, ids):
    return added(self, x, weights, ids, torch.zeros_like(x, requires_grad=True).view(-1, x.shape[1]))


def asked(self, x, weights, ids):
    zeros = torch.zeros_like(x, requires_grad=True)
    return added(self, x, weights, ids, zeros) * (2 if zeros.requires_grad else 3)


def written(self, x, weights, ids):
    zeros = torch.zeros_like(x, requires_grad=True)
    zeros += self.experts[0](x)
    return added(self, x, weights, ids, zeros)


def without_gradient(self, x, weights, ids):
    zeros = torch.zeros_like(x, requires_grad=True)
    with torch.no_grad():
        return added(self, x, weights, ids, zeros)


def made_without_gradient(self, x, weights, ids):
    with torch.no_grad():
        zeros = torch.zeros_like(x, requires_grad=True)
    return added(self, x, weights, ids, zeros)


def _given(combine, *, frozen, off):
    """What eager and compiled layers give, whether in one graph, and how many layers were rewritten."""
    torch.manual_seed(0)
    layer = zoo.ModuleListMoE(combine, K=2).double()
    if frozen:
        layer.requires_grad_(False)
    x = torch.randn(T, zoo.D, dtype=torch.float64)
    torch._dynamo.reset()
    with torch.set_grad_enabled(not off), switch.recording() as records, rewriting_backend() as backend:
        results = layer(x), torch.compile(layer, backend=backend)(x)
    graphs = {id(record) for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None}
    return *results, len(graphs) == 1, len(rewritten_in(records))


@pytest.mark.parametrize("combine", (of_sizes, like_tokens), ids=lambda f: f.__name__)
@pytest.mark.parametrize(("frozen", "off"), ((False, False), (False, True), (True, True)))
def test_zeros_with_a_gradient_that_nobody_reads(combine, frozen, off):
    expected, actual, is_whole, layers = _given(combine, frozen=frozen, off=off)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad is expected.requires_grad
    assert is_whole and layers == 1


@pytest.mark.parametrize(("frozen", "off"), ((False, False), (True, False), (False, True)))
@pytest.mark.parametrize(
    "combine", (of_sizes, kept, summed, viewed, asked, without_gradient, made_without_gradient), ids=lambda f: f.__name__
)
def test_gradients_that_are_seen(combine, frozen, off):
    expected, actual, *_ = _given(combine, frozen=frozen, off=off)
    torch.testing.assert_close(actual, expected)
    pairs = zip(*(given if isinstance(given, tuple) else (given,) for given in (actual, expected)), strict=True)
    assert all(mine.requires_grad is its.requires_grad for mine, its in pairs)


def test_a_leaf_is_not_written_to():
    layer, x = zoo.ModuleListMoE(written, K=2).double(), torch.randn(T, zoo.D, dtype=torch.float64)
    torch._dynamo.reset()
    with rewriting_backend() as backend, pytest.raises(RuntimeError, match="leaf Variable"):
        torch.compile(layer, backend=backend)(x)
