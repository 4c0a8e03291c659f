"""Every kind of bad input gives the same clear error, eager and while compiling."""

import pytest
import torch

from tests.corpus.layers import make_layer

ops = torch.ops.moeblaze


def up(layer, **changes):
    slots, offsets, positions, blocks = layer.routing
    arguments = {
        "x_TD": layer.x_TD, "w_up": layer.w_up, "b_up": layer.b_up, "weights_TK": None, "slots_N": slots,
        "offsets_E1": offsets, "positions_TK": positions, "blocks_B2": blocks, "activation": "swiglu",
    }  # fmt: skip
    return ops.expert_up(*(arguments | changes).values())


def down(layer, **changes):
    h, a = up(layer)
    slots, offsets, positions, blocks = layer.routing
    arguments = {
        "h_NGF": h, "a_NF": a, "w_down": layer.w_down, "b_down": layer.b_down, "weights_TK": layer.weights_TK,
        "slots_N": slots, "offsets_E1": offsets, "positions_TK": positions, "blocks_B2": blocks, "activation": "swiglu",
    }  # fmt: skip
    return ops.expert_down(*(arguments | changes).values())


def up_backward(layer, *router):
    h, _ = up(layer)
    return ops.expert_up_backward(h.detach(), None, layer.w_up, None, *layer.routing, *router)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# The layer: T=19, K=2, E=5, D=24, F=12, fp32.
BAD_INPUT = {
    "x_dimensions": (
        lambda layer: up(layer, x_TD=zeros(2, 19, 24)),
        ValueError,
        "expert_up: x_TD must have 2 dimensions [T, D], got shape [2, 19, 24]",
    ),
    "x_dtype": (
        lambda layer: up(layer, x_TD=zeros(19, 24, dtype=torch.int64)),
        TypeError,
        "expert_up: x_TD must be bfloat16, float16, float32 or (on CPU) float64, got torch.int64 on cpu",
    ),
    "router_without_its_gradient": (
        lambda layer: up_backward(layer, None, zeros(5, 24)),
        ValueError,
        "expert_up_backward: dlogits_TE must be given exactly when w_router_ED is, got None",
    ),
    "router_rows": (
        lambda layer: up_backward(layer, zeros(18, 5), zeros(5, 24)),
        ValueError,
        "expert_up_backward: dlogits_TE must have 19 rows, got shape [18, 5]",
    ),
    "router_width": (
        lambda layer: up_backward(layer, zeros(19, 5), zeros(24, 5)),
        ValueError,
        "expert_up_backward: w_router_ED must have shape [5, 24], or fewer rows that divide these, got shape [24, 5]",
    ),
    "router_parts": (
        lambda layer: up_backward(layer, zeros(19, 8), zeros(3, 24)),
        ValueError,
        "expert_up_backward: w_router_ED must have shape [8, 24], or fewer rows that divide these, got shape [3, 24]",
    ),
    "weight_dtype": (
        lambda layer: up(layer, w_up=[layer.w_up[0].bfloat16()]),
        TypeError,
        "expert_up: w_up must have the activations' dtype torch.float32, got torch.bfloat16",
    ),
    "weight_device": (
        lambda layer: up(layer, w_up=[layer.w_up[0].to("meta")]),
        ValueError,
        "expert_up: w_up must be on cpu like the activations, got meta",
    ),
    "weight_width": (
        lambda layer: up(layer, w_up=[zeros(5, 2, 12, 25)]),
        ValueError,
        "expert_up: w_up must have last size D=24 of x_TD, got 25",
    ),
    "gate_and_up_differ": (
        lambda layer: up(layer, w_up=[zeros(5, 1, 12, 24), zeros(5, 1, 11, 24)], b_up=[]),
        ValueError,
        "expert_up: w_up must have equal shapes, gate [5, 1, 12, 24], got up [5, 1, 11, 24]",
    ),
    "bias_shape": (
        lambda layer: up(layer, b_up=[zeros(5, 2, 13)]),
        ValueError,
        "expert_up: b_up must have shape [5, 2, 12] of w_up, got shape [5, 2, 13]",
    ),
    "experts_of_routing": (
        lambda layer: up(layer, w_up=[zeros(8, 2, 12, 24)], b_up=[]),
        ValueError,
        "expert_up: offsets_E1 must have shape [9] (experts of the weights, plus one), got shape [6]",
    ),
    "routing_dtype": (
        lambda layer: up(layer, slots_N=layer.routing[0].long()),
        TypeError,
        "expert_up: slots_N must be int32 (from dispatch), got torch.int64",
    ),
    "token_count": (
        lambda layer: up(layer, x_TD=zeros(18, 24)),
        ValueError,
        "expert_up: positions_TK must have 18 rows, one per token, got 19",
    ),
    "unknown_activation": (
        lambda layer: up(layer, activation="mish"),
        ValueError,
        "expert_up: activation must be one of swiglu, geglu, geglu_tanh, reglu, swiglu_clamped, swiglu_limited, silu, gelu, "
        "gelu_tanh, relu, relu2, identity, or a formula such as 'silu(g) * u' or 'silu(h)', got 'mish': 'mish', "
        "which is no symbol, number or known function",
    ),
    "ungated_activation": (
        lambda layer: up(layer, activation="relu"),
        ValueError,
        "expert_up: activation must be gated for G=2 halves, got 'relu'",
    ),
    "down_width": (
        lambda layer: down(layer, w_down=[zeros(5, 13, 24)], b_down=[]),
        ValueError,
        "expert_down: w_down must have size F=12 of h_NGF on axis 1, got shape [5, 13, 24]",
    ),
    "down_bias": (
        lambda layer: down(layer, b_down=[zeros(5, 23)]),
        ValueError,
        "expert_down: b_down must have shape [5, 24] ([E, D] of w_down), got shape [5, 23]",
    ),
    "weights_shape": (
        lambda layer: down(layer, weights_TK=zeros(19, 3)),
        ValueError,
        "expert_down: weights_TK must have shape [19, 2] of positions_TK, got shape [19, 3]",
    ),
    "weights_dtype": (
        lambda layer: down(layer, weights_TK=zeros(19, 2, dtype=torch.float16)),
        TypeError,
        "expert_down: weights_TK must be float32 or torch.float32, got torch.float16",
    ),
    "two_down_weights": (
        lambda layer: down(layer, w_down=[layer.w_down[0], layer.w_down[0]]),
        ValueError,
        "expert_down: w_down must hold one tensor, got 2 tensors",
    ),
}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return make_layer("empty_expert", dtype=torch.float32, bias=True, requires_grad=False)


@pytest.mark.parametrize("name", BAD_INPUT)
def test_experts_reject_bad_input_eager(layer, name):
    call, error, message = BAD_INPUT[name]
    with pytest.raises(error) as raised:
        call(layer)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", BAD_INPUT)
def test_experts_reject_bad_input_while_compiling(layer, name):
    call, _, message = BAD_INPUT[name]
    with pytest.raises(Exception) as raised:
        torch.compile(call, backend="aot_eager", fullgraph=True)(layer)
    assert message in str(raised.value)
