"""What the portable kernels do with parameters of an activation: the value, and their gradient beside the others."""

import pytest
import torch

from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward_learned
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from tests.corpus.layers import make_layer
from tests.tools.kernel_helpers import assert_near, interpreted, mend_interpreter, oracle, poison_unused

pytestmark = interpreted

GATED = "g * sigmoid(p0 * g) * (u + p1)"
UNGATED = "where(h > 0.0, h, h * p0)"


@pytest.fixture(autouse=True)
def setup():
    mend_interpreter()
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("case", "formula", "weight_on", "dtype"),
    [
        ("unused_slots", GATED, "output", torch.float32),
        ("unused_slots", UNGATED, "output", torch.float32),
        ("empty_expert", GATED, "input", torch.float32),
        ("all_to_one_expert", GATED, "output", torch.bfloat16),
        ("zero_tokens", UNGATED, "output", torch.float32),
    ],
)
def test_values_and_gradients(case, formula, weight_on, dtype):
    gated, count = formula is GATED, 2 if formula is GATED else 1
    named = "swiglu" if gated else "silu"
    layer = make_layer(case, named, bias=True, dtype=dtype, sizes=(5, 2, 40, 36), requires_grad=False)
    x, dispatched, used = layer.x_TD, layer.routing, int(layer.routing[1][-1])
    E, G, F, _ = layer.w_up[0].shape
    params_EP = torch.linspace(0.5, 1.5, E * count).view(count, E).t()  # any strides
    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    arguments = (x, layer.w_up, layer.b_up, on_input, *dispatched, formula, None, None, None, params_EP)
    assert_near(launch_expert_up(*arguments)[1], oracle("expert_up", *arguments)[1], used, roundings=8)

    h = torch.randn(dispatched[0].shape[0], G, F).to(dtype)
    poison_unused(dispatched, h)
    dout = torch.randn(x.shape).to(dtype)
    arguments = (dout, h, layer.w_down, layer.b_down, on_output, *dispatched, formula, None, None, params_EP)
    got, expected = launch_expert_down_backward_learned(*arguments), oracle("expert_down_backward_learned", *arguments)
    assert_near((got[1], got[3]), (expected[1], expected[3]), roundings=256)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)
