"""Writes around a layer and scales beside its biases: cases that random layers found."""

import pytest
import torch
import torch.nn.functional as F

from tests import moe_zoo as zoo
from tests.rewrite_harness import check_against_eager, rewrite_of


@pytest.fixture(autouse=True)
def fp64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _share(weights, ids, e):
    return (weights * (ids == e)).sum(-1, keepdim=True)


def hidden_column_stored(self, x, weights, ids):
    def expert(e):
        gate = x @ self.w1[e]
        gate[..., 0] = 1.0
        return (F.silu(gate) * (x @ self.w3[e])) @ self.w2[e]

    return sum(expert(e) * _share(weights, ids, e) for e in range(self.E))


def offset_stored_between_products(self, x, weights, ids):
    order = ids.view(-1).argsort()
    ends = torch.bincount(ids.view(-1), minlength=self.E).cumsum(0).int()
    mm, rows = torch.ops.transformers.grouped_mm_fallback, x[order // ids.shape[1]]
    hidden = F.silu(mm(rows, self.w1, ends)) * mm(rows, self.w3, ends)
    ends[0] = 0
    y = mm(hidden, self.w2, ends) * weights.view(-1)[order].unsqueeze(-1)
    return y[order.argsort()].view(x.shape[0], ids.shape[1], -1).sum(1)


def weights_written_before_the_backward(self, x, weights, ids):
    weights = weights + 0.0 * ids
    scores = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
    out = sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * scores[:, e, None] for e in range(self.E))
    weights.mul_(2)
    return out, weights


@pytest.mark.parametrize(
    "function, reason",
    [
        (hidden_column_stored, None),
        (weights_written_before_the_backward, "OPERAND_CHANGED"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_written_layers_stay(function, reason):
    backend = check_against_eager(zoo.StackedMoE(function, "split"), torch.randn(10, zoo.D))
    assert not backend.rewritten
    assert reason is None or backend.reasons == [reason]


def test_offsets_stored_between_products():
    layer = zoo.StackedMoE(offset_stored_between_products, "split")
    assert not rewrite_of(layer, torch.randn(10, zoo.D)).rewritten  # eager has no backward to compare with


def test_write_that_autograd_does_not_see():
    def through_detached(self, x, weights, ids):
        detached = (x := x + 1).detach()
        detached.mul_(2)
        return sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e) for e in range(self.E))

    check_against_eager(zoo.StackedMoE(through_detached, "split"), torch.randn(10, zoo.D))


@pytest.mark.parametrize("activation", [torch.tanh, F.silu], ids=["unfused", "fused"])
def test_scaled_weights_beside_a_bias(activation):
    def scaled(self, x, weights, ids):
        weights = weights * 2.5
        experts = ((activation(mlp.fc1(x)), mlp.fc2) for mlp in self.experts)
        return sum(down(hidden) * _share(weights, ids, e) for e, (hidden, down) in enumerate(experts))

    backend = check_against_eager(zoo.ModuleListMoE(scaled, expert=zoo.PlainMLP), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1


def test_logits_written_before_the_backward():
    class Layer(zoo.StackedMoE):
        def forward(self, x):
            logits = self.router.gate(x)
            weights, ids = torch.topk(logits.softmax(-1), zoo.K)
            out = self.experts(self, x, weights, ids)
            logits.mul_(2)
            return out, logits

    torch.set_default_dtype(torch.float32)
    layer = Layer(zoo.stacked_loop, "split")
    backend = check_against_eager(layer, torch.randn(10, zoo.D), tolerance=1e-5)
    assert len(backend.rewritten) == 1 and "route.default" not in backend.operators()
