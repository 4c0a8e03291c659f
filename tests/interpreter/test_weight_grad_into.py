import pytest
import torch

from moeblaze_ops.kernels.experts import bias_grad
from moeblaze_ops.kernels.experts.bias_grad import launch_expert_bias_grad_add
from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad, launch_expert_weight_grad_add
from tests.corpus.layers import ROUTINGS, STORAGES
from tests.tools.kernel_helpers import SIZES, assert_near, layer_for, oracle, poison_unused


def check(layer, sum_dtype, weights_TK=None):
    """What is added is the gradient in the sums' dtype, and experts without rows keep NaN."""
    slots, offsets = layer.routing[:2]
    empty = offsets.diff() == 0
    G, F = sum(w.shape[1] for w in layer.w_up), layer.w_down[0].shape[1]
    for like, groups in ((layer.w_up, G), (layer.w_down, 1)):
        grouped = torch.randn(slots.shape[0], groups, F).to(layer.x_TD.dtype)
        poison_unused(layer.routing, grouped)
        before = [torch.randn(w.shape).to(sum_dtype) for w in like]
        sums = [torch.empty_like(w, dtype=sum_dtype).copy_(start) for w, start in zip(like, before, strict=True)]
        for w in sums:
            w[empty] = float("nan")
        rest = (weights_TK, slots, offsets, SIZES[1])
        assert launch_expert_weight_grad_add(layer.x_TD, grouped, sums, *rest) is None
        for got, start, added in zip(sums, before, oracle("expert_weight_grad", layer.x_TD, grouped, like, *rest), strict=True):
            assert_near(got[~empty], (start.double() + added)[~empty], roundings=16)
            assert got[empty].isnan().all()


@pytest.mark.parametrize("case", ROUTINGS)
def test_weight_grad_add_matches_oracle(case):
    check(layer_for(case), torch.float32)


@pytest.mark.parametrize("stored_as", STORAGES)
def test_weight_grad_add_keeps_storage(stored_as):
    check(layer_for("empty_expert", stored_as=stored_as), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sum_dtype", ["fp32", "same"])
def test_weight_grad_add_low_precision(dtype, sum_dtype):
    layer = layer_for("unused_slots", "relu", dtype=dtype)
    check(layer, torch.float32 if sum_dtype == "fp32" else dtype)


def test_weight_grad_add_with_weights():
    layer = layer_for("unused_slots")
    check(layer, torch.float32, layer.weights_TK)


def test_adding_to_zeros_is_the_gradient():
    layer = layer_for("ragged_tail")
    slots, offsets = layer.routing[:2]
    grouped = torch.randn(slots.shape[0], 1, 36)
    arguments = (None, slots, offsets, SIZES[1])
    sums = [torch.zeros_like(w) for w in layer.w_down]
    launch_expert_weight_grad_add(layer.x_TD, grouped, sums, *arguments)
    assert torch.equal(sums[0], launch_expert_weight_grad(layer.x_TD, grouped, layer.w_down, *arguments)[0])


@pytest.mark.parametrize(
    ("case", "gathered", "splits"),
    [(case, gathered, (1, 3)[gathered ^ number % 2]) for number, case in enumerate(ROUTINGS) for gathered in (False, True)],
)
def test_bias_grad_add_matches_oracle(case, gathered, splits, monkeypatch):
    monkeypatch.setattr(bias_grad, "bias_grad_splits", lambda num_experts, column_blocks: splits)
    layer = layer_for(case)
    slots, offsets = layer.routing[:2]
    rows = torch.randn(layer.x_TD.shape[0] if gathered else slots.shape[0], 136)
    if not gathered:
        poison_unused(layer.routing, rows)
    rest = (layer.weights_TK, slots, offsets, SIZES[1], gathered)
    db_EC = torch.randn(5, 136)
    expected = db_EC.double() + oracle("expert_bias_grad", rows, *rest)
    launch_expert_bias_grad_add(rows, db_EC, *rest)
    assert_near(db_EC, expected, roundings=16)
