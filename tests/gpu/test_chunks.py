"""Layers that go through their tokens in chunks, or in backward through ranges of rows, on a GPU: bits, numerics and memory."""

import pytest
import torch
from torch.torch_version import TorchVersion

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.memory import row_ranges
from moeblaze_ops.memory.range_plan import Planner
from moeblaze_ops.memory.token_chunks import transient_bytes
from tests.corpus.layers import make_layer

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SUMS_ALIKE = TorchVersion(triton.__version__) < "3.9"
"""True if the routing weights' gradient has the same bits wherever a row stands in its tile."""

ops = torch.ops.moeblaze

# T, D, F, E, K
SHAPES = {"fine": (8192, 1024, 384, 64, 8), "coarse": (4096, 1024, 3584, 8, 2), "ragged": (5003, 776, 584, 12, 3)}


def make_module(shape, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    T, D, F, E, K = SHAPES[shape]
    module = moeblaze_ops.MoE(D, F, E, K, keep="input", device="cuda", dtype=dtype, **options)
    return module, torch.randn(T, D, device="cuda", dtype=dtype, requires_grad=True)


def train_step(run, module, x, dout):
    out = run(x)
    return out, *torch.autograd.grad(out, [x, *module.parameters()], dout)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "relu2"}], ids=["gated", "ungated_bias"])
@pytest.mark.parametrize("hopper", ["auto", "off"])
@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_change_the_order_of_weight_gradient_sums_only(shape, options, hopper, compiled, monkeypatch):
    monkeypatch.setattr(config, "hopper", hopper)
    module, x = make_module(shape, **options)
    dout = torch.randn_like(x)
    steps = []
    for limit in (1 << 40, 1, 1):
        monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
        torch._dynamo.reset()
        steps.append(train_step(torch.compile(module, fullgraph=True) if compiled else module, module, x, dout))
    whole, chunked, again = steps
    assert all(torch.equal(a, b) for a, b in zip(chunked, again, strict=True))
    names = ["out", "x", *(name for name, _ in module.named_parameters())]
    for name, one, other in zip(names, whole, chunked, strict=True):
        # Compiled, the router's part of the gradient of x is rounded with the experts' where they are one op.
        if ON_HOPPER and (name == "out" or (name == "x" and not compiled and SUMS_ALIKE)):
            assert torch.equal(one, other), name
        else:
            # Sums that agree to many more bits, rounded once.
            assert (one.float() - other.float()).norm() <= 4e-3 * one.float().norm(), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "relu2"}], ids=["gated", "ungated_bias"])
@pytest.mark.parametrize("hopper", ["auto", "off"])
@pytest.mark.parametrize("compiled", [False, True])
def test_ranges_round_where_they_meet_only(shape, options, hopper, compiled, monkeypatch):
    monkeypatch.setattr(config, "hopper", hopper)
    monkeypatch.setattr(row_ranges, "MOST_RANGES", 1000)
    module, x = make_module(shape, **options)
    dout = torch.randn_like(x)
    steps = []
    for limit in (1 << 40, 8 << 20, 8 << 20):
        monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
        torch._dynamo.reset()
        steps.append(train_step(torch.compile(module, fullgraph=True) if compiled else module, module, x, dout))
    whole, ranged, again = steps
    assert all(torch.equal(a, b) for a, b in zip(ranged, again, strict=True))
    names = ["out", "x", *(name for name, _ in module.named_parameters())]
    for name, one, other in zip(names, whole, ranged, strict=True):
        if name == "out":
            assert torch.equal(one, other)
        # Roundings of a sum at each of up to K or so ranges that it comes from, 2**-9 of its size each.
        assert (one.float() - other.float()).norm() <= 8e-3 * one.float().norm(), name


def test_in_a_cuda_graph_the_host_learns_nothing_of_the_routing(monkeypatch):
    """There the ranges have a fixed number of rows each; the values are those of a step outside but for roundings."""
    monkeypatch.setattr(row_ranges, "MOST_RANGES", 1000)
    monkeypatch.setattr(config, "max_layer_transient_bytes", 8 << 20)
    module, x = make_module("coarse")
    dout = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outside = [value.clone() for value in train_step(module, module, x, dout)]
    torch.cuda.current_stream().wait_stream(stream)
    monkeypatch.setattr(Planner, "take", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = train_step(module, module, x, dout)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(inside[0], outside[0])
    for one, other in zip(inside, outside, strict=True):
        assert (one.float() - other.float()).norm() <= 8e-3 * one.float().norm()


@pytest.mark.parametrize("case", ["one_token", "zero_tokens", "empty_expert", "all_to_one_expert", "unused_slots", "ragged_tail"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_match_the_oracle(case, weight_on, dtype):
    torch.manual_seed(1)
    layer = make_layer(case, bias=True, device="cuda", sizes=(5, 2, 72, 40), dtype=dtype)
    exact = layer.to(torch.float64, "cpu")
    dout = torch.randn_like(layer.x_TD)
    out = ops.expert_mlp_chunked(
        layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, layer.experts_TK, 5, 7,
        layer.activation, weight_on == "input",
    )  # fmt: skip
    got = [out, *torch.autograd.grad(out, layer.leaves, dout)]
    expected = exact.oracle(weight_on)
    expected = [expected, *torch.autograd.grad(expected, exact.leaves, dout.double().cpu())]
    # Three products in a row, of sums of tens to hundreds of terms, each rounded to the dtype.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for ours, oracle in zip(got, expected, strict=True):
        assert (ours.double().cpu() - oracle).norm() <= tolerance * oracle.norm() + 1e-12


def test_opcheck():
    torch.manual_seed(2)
    layer = make_layer("unused_slots", bias=True, device="cuda", sizes=(5, 2, 72, 40), dtype=torch.bfloat16)
    torch.library.opcheck(
        ops.expert_mlp_chunked.default,
        (
            layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, layer.experts_TK, 5, 8,
            layer.activation, False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_transients_stay_below_the_limit(shape, activation, monkeypatch):
    """Beyond the results and the fp32 sums of weight gradients, a step takes what its limit says, and at most 4 MiB."""
    monkeypatch.setattr(row_ranges, "MOST_RANGES", 0)
    T, D, F, E, K = SHAPES[shape]
    gated = activation == "swiglu"
    limit = 2048 * transient_bytes(D, F, K, torch.bfloat16, gated)
    monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
    peak, results, num_weights = peak_and_results(shape, activation)
    assert peak <= results + max(4 * num_weights + limit, (4 + 2) * num_weights) + (4 << 20)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("limit", [8 << 20, 16 << 20])
def test_ranges_of_rows_stay_below_the_limit(shape, activation, limit, monkeypatch):
    """Beyond the results, weight gradients among them, a step takes what its limit says, and at most 4 MiB."""
    monkeypatch.setattr(row_ranges, "MOST_RANGES", 1000)
    monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
    T, D, F, E, K = SHAPES[shape]
    parts = row_ranges.choose_parts(T, D, F, E, K, torch.bfloat16, activation == "swiglu", torch.device("cuda"))
    if parts != ("ranges", limit):
        pytest.skip("more activation than weights")
    peak, results, num_weights = peak_and_results(shape, activation)
    assert peak <= results + 2 * num_weights + limit + (4 << 20)


def peak_and_results(shape, activation):
    """Bytes that a step allocates, those of its results but for the weights' gradients, and the number of weights."""
    T, D, F, E, K = SHAPES[shape]
    gated = activation == "swiglu"
    torch.manual_seed(0)
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    experts = torch.rand(T, E, device="cuda").topk(K).indices
    weights = torch.rand(T, K, device="cuda", requires_grad=True)
    w_up = torch.randn(E, 2 * F if gated else F, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w_down = torch.randn(E, D, F, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)

    def step():
        x.grad = weights.grad = w_up.grad = w_down.grad = None
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, activation=activation, keep="input")
        out.backward(dout)

    step()
    x.grad = weights.grad = w_up.grad = w_down.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, 2 * 2 * x.numel() + 4 * weights.numel(), w_up.numel() + w_down.numel()


def test_inference_takes_the_memory_of_a_chunk(monkeypatch):
    module, x = make_module("coarse")
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)
    T, _, F, _, K = SHAPES["coarse"]
    with torch.no_grad():
        module(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        module(x)
    assert torch.cuda.max_memory_allocated() - before < 2 * T * K * F
