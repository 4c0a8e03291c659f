"""The CPU implementations: how many passes they take, blocks of experts, activations in place."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moeblaze_ops.arguments.activations import ACTIVATIONS, activate, activation_gradient
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.cpu import rows
from moeblaze_ops.cpu.activations import activate_into, backward_into
from moeblaze_ops.cpu.weight_grad import expert_weight_grad
from moeblaze_ops.kernels.formulas.named import is_gated
from tests.corpus.layers import ROUTINGS, make_layer
from tests.tools.op_harness import step

ONE_OF_EACH_EXPERT = {"mm", "addmm_", "addmv_", "add_", "t"}
"""Products, views, and what has biases."""


class Calls(TorchDispatchMode):
    """Counts the ATen calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls(num_experts: int, case: str = "ragged_tail", **options) -> Counter[str]:
    """The ATen calls of forward and backward, in which no rows are left unused."""
    torch.manual_seed(0)
    layer = make_layer(case, stored_as="split", dtype=torch.float32, sizes=(num_experts, 2, 8, 16), **options)
    routing, activation = layer.routing, layer.activation
    slots_N, offsets_E1, *_ = routing
    dout = torch.randn_like(layer.x_TD)
    with torch.no_grad(), Calls() as counted:
        h, a = cpu.expert_up(layer.x_TD, layer.w_up, layer.b_up, None, *routing, activation)
        cpu.expert_down(h, a, layer.w_down, layer.b_down, layer.weights_TK, *routing, activation)
        backward = (dout, h, layer.w_down, layer.b_down, layer.weights_TK, *routing, activation)
        dh, _, wa = cpu.expert_down_backward(*backward)
        expert_weight_grad(dout, wa.unsqueeze(1), layer.w_down, None, slots_N, offsets_E1, 2)
        cpu.expert_up_backward(dh, None, layer.w_up, None, *routing)
        expert_weight_grad(layer.x_TD, dh, layer.w_up, None, slots_N, offsets_E1, 2)
    return counted.counts


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_alone_are_one_of_each_expert(activation, bias):
    few, many = calls(4, activation=activation, bias=bias), calls(8, activation=activation, bias=bias)
    assert {name for name in many if many[name] != few[name]} <= ONE_OF_EACH_EXPERT
    assert many["cat"] <= 1  # relu2 has no form in place
    halves = 2 if is_gated(activation) else 1
    assert many["mm"] + many["addmm_"] == 8 * (3 * halves + 3)


def test_experts_without_rows_cost_no_products():
    """But for the gradient of their weights, which is zero."""
    assert calls(5)["mm"] - calls(5, "all_to_one_expert")["mm"] == 4 * (2 + 1 + 1 + 1)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_blocks_change_nothing(case, weight_on, monkeypatch):
    torch.manual_seed(1)
    layer = make_layer(case, bias=True)
    dout = torch.randn_like(layer.x_TD)
    whole = step(layer.run(weight_on), layer, dout)
    monkeypatch.setattr(rows, "_BLOCK_NUMBERS", 1)
    for ours, expected in zip(step(layer.run(weight_on), layer, dout), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)


def test_blocks_hold_whole_experts():
    offsets = torch.tensor([0, 3, 3, 10, 11, 12, 12], dtype=torch.int32)
    for width in (1, 1 << 14, 1 << 15, 1 << 17, 1 << 20):
        blocks = rows.row_blocks(offsets, 20, width)
        assert [size for block in blocks for size in block.sizes] == offsets.diff().tolist()
        assert [e for block in blocks for e in range(block.experts.start, block.experts.stop)] == list(range(6))
        for block in blocks:
            num_rows = sum(block.sizes)
            assert (block.rows.start, block.rows.stop) == (offsets[block.experts.start], offsets[block.experts.stop])
            assert num_rows * width <= rows._BLOCK_NUMBERS or sum(size > 0 for size in block.sizes) == 1


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "identity"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("over_h", [False, True])
def test_activations_in_place(activation, dtype, over_h):
    torch.manual_seed(2)
    h = (3 * torch.randn(7, 2 if is_gated(activation) else 1, 33)).to(dtype)
    da, scale = torch.randn(7, 33).to(dtype), torch.rand(7, 1)
    wide = torch.promote_types(dtype, torch.float32)
    a, a_given = activate(h, activation), torch.empty(7, 33, dtype=dtype)
    activate_into(a_given, h, activation)
    assert torch.equal(a_given, a)
    expected = activation_gradient(da.to(wide) * scale, h, activation)
    memory = h.clone()
    dh, wa = memory if over_h else torch.empty_like(h), torch.empty(7, 33, dtype=dtype)
    dscale = backward_into(dh, wa, da.clone(), memory, scale, activation)
    torch.testing.assert_close(dh, expected)
    torch.testing.assert_close(wa, (a * scale).to(dtype))
    torch.testing.assert_close(dscale, (da.to(wide) * a).sum(1).to(dscale.dtype))
