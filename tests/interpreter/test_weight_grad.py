import pytest
import torch

from moeblaze_ops.kernels.experts import bias_grad
from moeblaze_ops.kernels.experts.bias_grad import launch_expert_bias_grad
from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad
from tests.corpus.layers import ROUTINGS, STORAGES
from tests.tools.kernel_helpers import SIZES, assert_near, layer_for, oracle, poison_unused


def check_weight_grad(layer, weights_TK=None, roundings=16):
    slots, offsets = layer.routing[:2]
    dtype = layer.x_TD.dtype
    G = sum(w.shape[1] for w in layer.w_up)
    F = layer.w_down[0].shape[1]
    for like, groups in ((layer.w_up, G), (layer.w_down, 1)):
        grouped = torch.randn(slots.shape[0], groups, F).to(dtype)
        poison_unused(layer.routing, grouped)
        arguments = (layer.x_TD, grouped, like, weights_TK, slots, offsets, SIZES[1])
        got, expected = launch_expert_weight_grad(*arguments), oracle("expert_weight_grad", *arguments)
        assert_near(got, expected, roundings=roundings)
        assert [dw.stride() for dw in got] == [w.stride() for w in like]


@pytest.mark.parametrize("case", ROUTINGS)
def test_weight_grad_matches_oracle(case):
    check_weight_grad(layer_for(case))


@pytest.mark.parametrize("stored_as", STORAGES)
def test_weight_grad_keeps_storage(stored_as):
    check_weight_grad(layer_for("empty_expert", stored_as=stored_as))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_grad_low_precision(dtype):
    layer = layer_for("unused_slots", "relu", dtype=dtype)
    check_weight_grad(layer)
    # The scaled rows are rounded once more.
    check_weight_grad(layer, layer.weights_TK)


def test_weight_grad_with_weights():
    layer = layer_for("unused_slots")
    check_weight_grad(layer, layer.weights_TK)


def test_weight_grad_infinity_stays_with_its_expert():
    layer = layer_for("ragged_tail")
    slots, offsets = layer.routing[:2]
    grouped = torch.randn(slots.shape[0], 1, 36)
    grouped[offsets[1] : offsets[2]] = float("inf")
    (dw,) = launch_expert_weight_grad(layer.x_TD, grouped, layer.w_down, None, slots, offsets, SIZES[1])
    assert dw[[0, 2, 3, 4]].isfinite().all()
    assert not dw[1].isfinite().any()


@pytest.mark.parametrize(
    ("case", "gathered", "weighted"),
    [(case, gathered, gathered ^ number % 2) for number, case in enumerate(ROUTINGS) for gathered in (False, True)],
)
def test_bias_grad_matches_oracle(case, gathered, weighted, monkeypatch):
    monkeypatch.setattr(bias_grad, "bias_grad_splits", lambda num_experts, column_blocks: 3)
    layer = layer_for(case)
    slots, offsets = layer.routing[:2]
    rows = torch.randn(layer.x_TD.shape[0] if gathered else slots.shape[0], 136)
    if not gathered:
        poison_unused(layer.routing, rows)
    arguments = (rows, layer.weights_TK if weighted else None, slots, offsets, SIZES[1], gathered)
    assert_near(launch_expert_bias_grad(*arguments), oracle("expert_bias_grad", *arguments), roundings=16)
