import pytest
import torch

import moeblaze_ops
from moeblaze_ops.arguments import weight_storage as storage
from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.kernels.formulas.named import is_gated
from tests.corpus import reference

T, K, E, D, F = 17, 2, 4, 8, 6


def tokens(*leading):
    x = torch.randn(*leading, D, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(*leading, K, dtype=torch.float64, requires_grad=True)
    return x, weights, torch.randint(0, E, (*leading, K))


def parameter(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_moe_matches_reference(activation, weight_on):
    torch.manual_seed(0)
    x, weights, experts = tokens(T)
    gated = is_gated(activation)
    w_up, w_down = parameter(E, (1 + gated) * F, D), parameter(E, D, F)
    b_up, b_down = parameter(E, (1 + gated) * F), parameter(E, D)
    out = moeblaze_ops.moe(
        x, weights, experts, w_up, w_down, b_up=b_up, b_down=b_down, activation=activation, weight_on=weight_on
    )
    packed = storage.packed_up(w_up, gated=gated, interleaved=False, transposed=False)
    packed_bias = storage.packed_up(b_up, gated=gated, interleaved=False)
    down = storage.down(w_down, transposed=False)
    expected = reference.moe(x, weights, experts, [packed], [down], [packed_bias], [b_down], activation, weight_on)
    torch.testing.assert_close(out, expected)


def test_moe_takes_every_storage_of_the_same_weights():
    torch.manual_seed(1)
    x, weights, experts = tokens(T)
    gate, up, w_down = parameter(E, F, D), parameter(E, F, D), parameter(E, D, F)
    b_gate, b_up = parameter(E, F), parameter(E, F)
    expected = moeblaze_ops.moe(x, weights, experts, up, w_down, w_gate=gate, b_gate=b_gate, b_up=b_up)
    concat, interleaved = torch.cat([gate, up], 1), torch.stack([gate, up], 2).flatten(1, 2)
    bias, interleaved_bias = torch.cat([b_gate, b_up], 1), torch.stack([b_gate, b_up], 2).flatten(1, 2)
    down_T = w_down.transpose(1, 2).contiguous()
    for out in (
        moeblaze_ops.moe(x, weights, experts, concat, w_down, b_up=bias),
        moeblaze_ops.moe(x, weights, experts, interleaved, w_down, b_up=interleaved_bias, interleaved=True),
        moeblaze_ops.moe(x, weights, experts, concat.mT.contiguous(), down_T, b_up=bias, transposed=True),
        moeblaze_ops.moe(
            x, weights, experts, interleaved.mT.contiguous(), down_T, b_up=interleaved_bias, interleaved=True, transposed=True
        ),
        moeblaze_ops.moe(
            x, weights, experts, up.mT.contiguous(), down_T,
            w_gate=gate.mT.contiguous(), b_gate=b_gate, b_up=b_up, transposed=True,
        ),
    ):  # fmt: skip
        torch.testing.assert_close(out, expected)


def test_moe_takes_any_leading_shape():
    torch.manual_seed(2)
    x, weights, experts = tokens(2, 3, 5)
    w_up, w_down = parameter(E, 2 * F, D), parameter(E, D, F)
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down)
    flat = moeblaze_ops.moe(x.view(-1, D), weights.view(-1, K), experts.view(-1, K), w_up, w_down)
    assert out.shape == x.shape
    torch.testing.assert_close(out.view(-1, D), flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "moe: activation must be one of swiglu, .* got 'swish'"),
        ({"weight_on": "both"}, "moe: weight_on must be one of output, input, got 'both'"),
        ({"w_up": torch.zeros(E, 3, D)}, "moe: w_up must pack gate and up in an even number of outputs, got 3"),
        ({"w_up": torch.zeros(E, D)}, r"moe: w_up must have 3 dimensions, got shape \[4, 8\]"),
        ({"weights": torch.zeros(T, 3)}, r"moe: experts must have shape \[17, 3\] of weights, got \[17, 2\]"),
        ({"b_gate": torch.zeros(E, F)}, "moe: b_gate must come with w_gate"),
        (
            {"activation": "relu", "w_gate": torch.zeros(E, F, D)},
            "moe: activation must take a gate where w_gate is given: relu takes one argument, with a gate use reglu",
        ),
    ],
)
def test_moe_rejects(change, message):
    x, weights, experts = torch.zeros(T, D), torch.zeros(T, K), torch.zeros(T, K, dtype=torch.int64)
    arguments = {
        "weights": weights,
        "experts": experts,
        "w_up": torch.zeros(E, 2 * F, D),
        "w_down": torch.zeros(E, D, F),
    }
    with pytest.raises(ValueError, match=message):
        moeblaze_ops.moe(x, **(arguments | change))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_module_trains(activation, bias):
    torch.manual_seed(3)
    module = moeblaze_ops.MoE(D, F, E, K, activation=activation, bias=bias)
    x = torch.randn(3, 7, D)
    module(x).square().mean().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_module_weights_sum_to_one_when_renormalized():
    torch.manual_seed(4)
    module = moeblaze_ops.MoE(D, F, E, K, activation="relu", bias=True)
    with torch.no_grad():
        module.w_up.zero_()
        module.b_up.zero_()
        module.w_down.zero_()
        module.b_down.fill_(1.0)
    torch.testing.assert_close(module(torch.randn(5, D)), torch.ones(5, D))
