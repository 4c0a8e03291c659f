"""The portable kernels with h in 8 bits, against ``kernels/eight_bits.py`` in ATen and against kernels that read h as it is."""

import pytest
import torch

from moeblaze_ops.kernels import eight_bits
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward, launch_expert_down_backward_learned
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up, launch_expert_up_h8
from tests.corpus.layers import ROUTINGS
from tests.tools.kernel_helpers import assert_half_a_step, assert_near, layer_for

LEARNED = "g * sigmoid(p0 * g) * u"


def up_arguments(layer, weights_TK=None):
    return layer.x_TD, layer.w_up, layer.b_up, weights_TK, *layer.routing, layer.activation


def check_forward(layer, weights_TK=None):
    """``a`` is the same bit for bit, and what is kept is within half a step of h."""
    used = int(layer.routing[1][-1])
    arguments = up_arguments(layer, weights_TK)
    h, a = launch_expert_up(*arguments)
    without_memory, a_beside, h8 = launch_expert_up_h8(*arguments)
    assert without_memory.shape == h.shape and without_memory.untyped_storage().nbytes() <= h.element_size()
    assert torch.equal(a[:used], a_beside[:used])
    F = h.shape[2]
    for kept in (h8, eight_bits.packed(h)):
        assert_half_a_step(eight_bits.unpacked(kept, F, torch.float32)[:used], h[:used].float())
    return h8


def check_backward(layer, h8):
    """As with the same numbers in fp32."""
    used, F = int(layer.routing[1][-1]), layer.w_down[0].shape[1]
    h = eight_bits.unpacked(h8, F, torch.float32)
    dout = torch.randn(layer.x_TD.shape).to(layer.x_TD.dtype)
    rest = (layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation)
    got = launch_expert_down_backward(dout, h8, *rest)
    assert got[0].dtype == got[2].dtype == dout.dtype and got[0].shape == h.shape
    expected = torch.ops.moeblaze.expert_down_backward(dout.double(), h.double(), *widened(rest))
    assert_near(got[1], expected[1], roundings=64)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)


def widened(arguments):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments)


@pytest.mark.parametrize("case", ROUTINGS)
def test_routings(case):
    layer = layer_for(case, bias=True)
    check_backward(layer, check_forward(layer))


@pytest.mark.parametrize("columns", [1, 16, 36, 64, 300])
def test_widths(columns):
    layer = layer_for("ragged_tail", sizes=(5, 2, 40, columns))
    check_backward(layer, check_forward(layer))


@pytest.mark.parametrize("activation", ["relu2", "geglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, activation):
    layer = layer_for("unused_slots", activation, dtype=dtype, bias=True)
    check_backward(layer, check_forward(layer))


def test_weight_on_input():
    layer = layer_for("unused_slots")
    check_forward(layer, layer.weights_TK)


def test_low_rank_and_learned():
    layer = layer_for("unused_slots", LEARNED)
    E, F, D = layer.w_down[0].shape
    params = torch.rand(E, 1) + 0.5
    N = layer.routing[0].shape[0]
    u, lora_a, lora_b = torch.randn(N, 8), torch.randn(E, 8, D), torch.randn(E, 2, F, 8)
    arguments = (*up_arguments(layer), u, lora_a, lora_b, params)
    used = int(layer.routing[1][-1])
    a, (_, a_beside, h8) = launch_expert_up(*arguments)[1], launch_expert_up_h8(*arguments)
    assert torch.equal(a[:used], a_beside[:used])
    rest = (layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, LEARNED)
    rest = (*rest, torch.randn(N, 8), torch.randn(E, 8, F), params)
    dout = torch.randn(layer.x_TD.shape)
    got = launch_expert_down_backward_learned(dout, h8, *rest)
    expected = torch.ops.moeblaze.expert_down_backward_learned(
        dout.double(), eight_bits.unpacked(h8, F, torch.float64), *widened(rest)
    )
    assert_near((got[1], got[3]), (expected[1], expected[3]), roundings=1024)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)


@pytest.mark.parametrize("value", [0.0, 1e-30, 6e4])
def test_far_numbers(value):
    """Rows of zeros, of numbers that are next to none, and of large ones beside ordinary ones."""
    layer = layer_for("ragged_tail")
    layer.x_TD[0] *= value
    h8 = check_forward(layer)
    assert eight_bits.unpacked(h8, layer.w_down[0].shape[1], torch.float32)[: int(layer.routing[1][-1])].isfinite().all()
