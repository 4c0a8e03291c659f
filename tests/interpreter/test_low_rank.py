"""The columns that a low-rank addition adds to the contractions of the portable kernels."""

import pytest
import torch

from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_rows, launch_expert_up_backward
from moeblaze_ops.kernels.experts.low_rank_backward import launch_low_rank_backward
from tests.tools.kernel_helpers import assert_near, layer_for, oracle, poison_unused


def check(rank, case="unused_slots", activation="swiglu", weight_on="output", dtype=torch.float32, expert_fastest=False):
    layer = layer_for(case, activation, bias=True, dtype=dtype)
    x, dispatched, used = layer.x_TD, layer.routing, int(layer.routing[1][-1])
    E, G, F, D = layer.w_up[0].shape
    N = dispatched[0].shape[0]

    def rows(*shape):
        values = torch.randn(N, *shape).to(dtype)
        poison_unused(dispatched, values)
        return values

    def factor(*shape):
        values = (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)
        return values.movedim(0, -1).contiguous().movedim(-1, 0) if expert_fastest else values

    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    u, lora_a, lora_b = rows(rank), factor(E, rank, D), factor(E, G, F, rank)
    arguments = (x, layer.w_up, layer.b_up, on_input, *dispatched, activation, u, lora_a, lora_b)
    assert_near(launch_expert_up(*arguments)[0], oracle("expert_up", *arguments)[0], used)

    h, a, down_a, down_b = rows(G, F), rows(F), factor(E, rank, F), factor(E, rank, D)
    arguments = (h, a, layer.w_down, layer.b_down, on_output, *dispatched, activation, u, down_a, down_b)
    assert_near(launch_expert_down(*arguments), oracle("expert_down", *arguments), roundings=8)

    dout = torch.randn(x.shape).to(dtype)
    arguments = (dout, h, layer.w_down, layer.b_down, on_output, *dispatched, activation, u, down_a)
    got, expected = launch_expert_down_backward(*arguments), oracle("expert_down_backward", *arguments)
    assert_near(got[1], expected[1], roundings=64)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)

    arguments = (h, x if weight_on == "input" else None, layer.w_up, on_input, *dispatched, None, None, None, u, lora_a)
    assert_near(launch_expert_up_backward(*arguments)[0], oracle("expert_up_backward", *arguments)[0], roundings=16)
    arguments = (h, lora_b, dispatched[1], dispatched[3])
    assert_near(launch_expert_rows(*arguments), oracle("expert_rows", *arguments), used, roundings=8)

    for arguments in ((h, u, lora_b, on_input, *dispatched), (dout, u, down_b.mT, on_output, *dispatched)):
        got, expected = launch_low_rank_backward(*arguments), oracle("low_rank_backward", *arguments)
        assert_near(got[0], expected[0], used, roundings=8)
        assert_near(got[1], expected[1], roundings=16)


@pytest.mark.parametrize("rank", [1, 16, 20, 72])
def test_ranks(rank):
    check(rank)


@pytest.mark.parametrize("case", ["one_token", "empty_expert", "all_to_one_expert", "zero_tokens"])
def test_routings(case):
    check(8, case)


def test_ungated():
    check(8, activation="relu2")


def test_weight_on_input():
    check(8, weight_on="input")


def test_factors_with_experts_on_the_fastest_axis():
    check(5, expert_fastest=True)


def test_bf16():
    check(8, dtype=torch.bfloat16)


def test_gradient_of_halves_that_lie_apart_in_memory():
    layer = layer_for("unused_slots", "swiglu", bias=False)
    E, G, F, _ = layer.w_up[0].shape
    N, used = layer.routing[0].shape[0], int(layer.routing[1][-1])
    interleaved = torch.randn(E, F, G, 8).transpose(1, 2)
    for dy, b in ((torch.randn(N, G, F), interleaved), (torch.randn(N, F, G).transpose(1, 2), torch.randn(E, G, F, 8))):
        arguments = (dy, torch.randn(N, 8), b, None, *layer.routing)
        got, expected = launch_low_rank_backward(*arguments), oracle("low_rank_backward", *arguments)
        assert_near(got[0], expected[0], used, roundings=8)
        assert_near(got[1], expected[1], roundings=16)


def test_one_expert_a_token():
    layer = layer_for("one_token", sizes=(5, 1, 40, 36))
    h, a = (torch.randn(1, *shape) for shape in ((2, 36), (36,)))
    v, down_a, down_b, lora_a = torch.randn(1, 8), torch.randn(5, 8, 36), torch.randn(5, 8, 40), torch.randn(5, 8, 40)
    arguments = (h, a, layer.w_down, [], layer.weights_TK, *layer.routing, "swiglu", v, down_a, down_b)
    assert_near(launch_expert_down(*arguments), oracle("expert_down", *arguments), roundings=8)
    arguments = (h, None, layer.w_up, None, *layer.routing, None, None, None, v, lora_a)
    assert_near(launch_expert_up_backward(*arguments)[0], oracle("expert_up_backward", *arguments)[0], roundings=8)
