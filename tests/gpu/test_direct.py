"""Eager layers whose launches are repeated do what the ops do, at other addresses and with other settings."""

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import config
from tests.tools.op_harness import OurOps

pytestmark = pytest.mark.gpu

T, D, F, E = 300, 64, 128, 6
CALLS = 6
"""The first goes through the dispatcher, two more until launches are noted."""


def leaf(*shape, dtype):
    return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).to(dtype).requires_grad_()


def case(dtype, K, weight_on, bias, lora):
    weights, experts = torch.rand(T, E, device="cuda").topk(K)
    experts[::7, K - 1] = -1
    tensors = [leaf(T, D, dtype=dtype), weights.requires_grad_(), leaf(E, 2 * F, D, dtype=dtype), leaf(E, D, F, dtype=dtype)]
    options = {"weight_on": weight_on}
    if bias:
        options |= {"b_up": leaf(E, 2 * F, dtype=dtype), "b_down": leaf(E, D, dtype=dtype)}
    if lora:
        factors = leaf(E, 8, D, dtype=dtype), leaf(E, 2 * F, 8, dtype=dtype)
        options |= {"lora_up": (*factors, 0.5)}
        tensors += factors
    leaves = [*tensors, *(value for value in options.values() if isinstance(value, torch.Tensor))]
    dout = torch.randn(T, D, device="cuda", dtype=dtype)

    def step():
        x, weights, w_up, w_down = tensors[:4]
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, **options)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("weight_on, bias, lora", [("output", False, False), ("input", True, False), ("output", True, True)])
def test_repeated_steps_equal_those_of_the_ops(dtype, K, weight_on, bias, lora, monkeypatch):
    torch.manual_seed(0)
    steps = [case(dtype, K, weight_on, bias, lora) for _ in range(CALLS)]
    kept = []
    for hopper in ("auto", "off", "auto"):
        monkeypatch.setattr(config, "hopper", hopper)
        for step in steps:
            got = step()
            with OurOps():
                expected = step()
            kept.append(got)  # so that the next results lie elsewhere
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other)


def test_repeated_inference_and_modules():
    torch.manual_seed(0)
    layer = moeblaze_ops.MoE(D, F, E, 2, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for x in torch.randn(CALLS, T, D, device="cuda", dtype=torch.bfloat16).unbind():
            got = layer(x)
            with OurOps():
                assert torch.equal(got, layer(x))


def test_other_streams_and_graphs():
    """What is captured while launches are repeated follows the memory of the graph's inputs."""
    torch.manual_seed(0)
    step = case(torch.bfloat16, 2, "output", False, False)
    expected = [tensor.clone() for tensor in step()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CALLS):
            on_side = step()
    torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, on_side, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(map(torch.equal, captured, expected))
