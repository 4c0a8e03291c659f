"""Strides are part of the result: a rewritten layer gives those that its nodes had, whatever those of the tokens are.

Tests of each spelling (`test_rewrite.py`) have such tokens, and compare strides as well.
"""

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.explain import explain
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, compiled

TOKENS = {
    "transposed": lambda: torch.randn(zoo.D, 10).t(),
    "sequence first": lambda: torch.randn(5, 2, zoo.D).transpose(0, 1),
    "channels first": lambda: torch.randn(2, zoo.D, 5).transpose(1, 2),
    "strided": lambda: torch.randn(10, 2 * zoo.D)[:, ::2],
    "expanded": lambda: torch.randn(1, zoo.D).expand(10, zoo.D),
}


def _dense_sum(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        out = out + (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


class _Read(torch.nn.Module):
    def __init__(self, reader):
        super().__init__()
        self.layer, self.reader = zoo.StackedMoE(_dense_sum, "split"), reader

    def forward(self, x):
        return self.reader(self.layer(x))


_READERS = {
    "as_strided": lambda y: y.as_strided((y.numel(),), (1,)) * torch.arange(y.numel()),
    "own strides": lambda y: y.as_strided(y.shape, y.stride()) * 2,
    "is_contiguous": lambda y: y * 2 if y.is_contiguous() else y * 3,
    "stride": lambda y: y * y.stride(0),
    "caller": lambda y: y,
}


@pytest.mark.parametrize(
    ("reader", "tokens"),
    [
        ("as_strided", "transposed"), ("own strides", "sequence first"), ("is_contiguous", "channels first"),
        ("stride", "strided"), ("caller", "expanded"), ("caller", "transposed"),
    ],
)  # fmt: skip
def test_readers_of_strides_read_what_was_written(fp64, reader, tokens):
    module, x = _Read(_READERS[reader]), TOKENS[tokens]()
    backend = check_against_eager(module, x, aot=True)
    assert len(backend.rewritten) == 1
    run, _ = compiled(module, aot=True)
    assert run(x).stride() == module(x).stride()


@pytest.mark.parametrize("tokens, view", [("sequence first", (2, 1)), ("channels first", (2, 1)), ("transposed", (1,))])
def test_views_that_only_the_written_strides_allow(fp64, tokens, view):
    x = TOKENS[tokens]()
    order = (1, 0, 2) if tokens == "sequence first" else (0, 2, 1) if tokens == "channels first" else (1, 0)
    module = _Read(lambda y: y.permute(order).view(-1))
    backend = check_against_eager(module, x, aot=True)
    (layer,) = backend.rewritten
    assert layer.became.endswith("a copy in the strides of the result")


def test_strides_of_symbolic_sizes(fp64):
    module = _Read(lambda y: y.permute(1, 0, 2).reshape(-1).as_strided((4,), (3,)))
    run, backend = compiled(module, dynamic=True, aot=True)
    with torch.no_grad():
        for length in (5, 7):
            x = torch.randn(length, 2, zoo.D).transpose(0, 1)
            torch.testing.assert_close(run(x), module(x))
    assert len(backend.reports) == len(backend.rewritten) == 1


def test_contiguous_results_are_not_copied(fp64):
    (layer,) = check_against_eager(_Read(lambda y: y.view(-1)), torch.randn(10, zoo.D)).rewritten
    assert "copy" not in layer.became


def _into_wider_rows(self, x, weights, ids):
    out = torch.zeros(x.shape[0], zoo.D + 3, dtype=x.dtype)[:, : zoo.D]
    for e in range(self.E):
        out += (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def test_rows_of_a_wider_buffer_are_stored_there(fp64):
    backend = check_against_eager(zoo.StackedMoE(_into_wider_rows, "split"), torch.randn(10, zoo.D), same_strides=True)
    assert len(backend.rewritten) == 1


def _written_afterwards(self, x, weights, ids):
    out = torch.zeros_like(x)
    turned = out.t()
    for e in range(self.E):
        out += (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * (weights * (ids == e)).sum(-1, keepdim=True)
    out[0] = 1.0
    return out, turned


def test_views_of_the_result_are_views_of_one_another_still(fp64):
    check_against_eager(zoo.StackedMoE(_written_afterwards, "split"), torch.randn(zoo.D, 10).t(), aot=True)


def _looped(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        rows = (F.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])) @ self.w2[e]
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


@pytest.mark.parametrize("spelling", [_dense_sum, _looped], ids=lambda f: f.__name__)
def test_explain_runs_readers_of_strides(spelling):
    module = _Read(lambda y: y.t().view(-1))
    module.layer.experts = spelling
    (layer,) = explain(module, torch.randn(zoo.D, 10).t()).candidates
    assert layer.became.endswith("a copy in the strides of the result")
