import pytest
import torch

from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward
from moeblaze_ops.kernels.experts.expert_mlp import launch_expert_mlp, launch_expert_mlp_backward
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from tests.tools.kernel_helpers import assert_near, layer_for, oracle


def check(layer, weight_on):
    """Both launchers against the oracle, and bit for bit against the launchers that they stand for."""
    used = int(layer.routing[1][-1])
    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    up = (layer.x_TD, layer.w_up, layer.b_up, on_input, *layer.routing, layer.activation)
    down = (layer.w_down, layer.b_down, on_output, *layer.routing, layer.activation)
    arguments = (
        layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing,
        layer.activation, weight_on == "input",
    )  # fmt: skip
    h, a = launch_expert_up(*up)
    out = launch_expert_mlp(*arguments)
    assert torch.equal(out, launch_expert_down(h, a, *down))
    eps = torch.finfo(out.dtype).eps / torch.finfo(torch.float32).eps
    assert_near(out.float(), oracle("expert_mlp", *arguments), roundings=16 * eps)

    dout = torch.randn(layer.x_TD.shape).to(h.dtype)
    dh, dweights, wa = launch_expert_mlp_backward(dout, *arguments)
    expected_dh, expected_dweights, expected_wa = launch_expert_down_backward(dout, h, *down)
    assert torch.equal(dweights, expected_dweights)
    assert torch.equal(dh[:used], expected_dh[:used]) and torch.equal(wa[:used], expected_wa[:used])


@pytest.mark.parametrize("case", ["one_token", "empty_expert", "unused_slots", "zero_tokens"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_expert_mlp_matches_its_parts(case, weight_on):
    check(layer_for(case, bias=True), weight_on)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["swiglu_clamped", "relu2"])
def test_expert_mlp_in_low_precision(dtype, activation):
    layer = layer_for("unused_slots", activation, "split", dtype=dtype)
    check(layer, "output")


def test_identity_activates_nothing():
    check(layer_for("empty_expert", "identity"), "output")


def test_up_projection_without_h_writes_the_same_activation():
    layer = layer_for("unused_slots")
    arguments = (layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing, layer.activation)
    used = int(layer.routing[1][-1])
    h, a = launch_expert_up(*arguments, store_h=False)
    assert h.shape == (0, 2, 36)
    assert torch.equal(a[:used], launch_expert_up(*arguments)[1][:used])
