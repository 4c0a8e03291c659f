"""expert_mlp_chunked against expert_mlp and the oracle, what it allocates, and when ``moe`` takes it."""

import functools
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.memory.token_chunks import token_ranges, tokens_per_chunk, transient_bytes
from moeblaze_ops.ops.recomputed import expert_mlp_chunked
from tests.corpus.layers import ROUTINGS, STORAGES, make_layer
from tests.tools.fakecuda import generated_code, launches, shadow_backend
from tests.tools.op_harness import OurOps, assert_one_graph_for_several_token_counts, detach, step

ops = torch.ops.moeblaze
WEIGHT_ON = ("output", "input")
CHUNKED_ROUTINGS = [case for case in ROUTINGS if case != "ragged_tail"]
"""19 tokens or fewer; ``ragged_tail`` has hundreds, for the storages below."""


def arguments(layer, chunk_tokens, weight_on="output"):
    return (
        layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, layer.experts_TK,
        layer.w_down[0].shape[0], chunk_tokens, layer.activation, weight_on == "input",
    )  # fmt: skip


def whole_arguments(layer, weight_on="output"):
    x, *parameters, weights = arguments(layer, 1, weight_on)[:6]
    return x, *parameters, weights, *layer.routing, layer.activation, weight_on == "input"


def assert_equals_oracle(layer, chunk_tokens, weight_on="output"):
    """Output and gradients are those of the oracle, with the strides of the op that takes all tokens at once."""
    dout = torch.randn_like(layer.x_TD)
    got = step(ops.expert_mlp_chunked(*arguments(layer, chunk_tokens, weight_on)), layer, dout)
    whole = step(ops.expert_mlp(*whole_arguments(layer, weight_on)), layer, dout)
    for ours, oracle, one in zip(got, step(layer.oracle(weight_on), layer, dout), whole, strict=True):
        torch.testing.assert_close(ours, oracle)
        assert ours.stride() == one.stride()


@pytest.mark.parametrize("case", CHUNKED_ROUTINGS)
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_chunked_matches_reference(case, weight_on):
    torch.manual_seed(0)
    for chunk_tokens in (1, 7, 1024):
        assert_equals_oracle(make_layer(case, bias=True), chunk_tokens, weight_on)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "identity"])
def test_expert_mlp_chunked_matches_reference_for_every_activation(activation):
    torch.manual_seed(1)
    assert_equals_oracle(make_layer("unused_slots", activation=activation), 6)


@pytest.mark.parametrize("stored_as", STORAGES)
@pytest.mark.parametrize("bias", [False, True])
def test_expert_mlp_chunked_matches_reference_for_every_storage(stored_as, bias):
    torch.manual_seed(2)
    assert_equals_oracle(make_layer(stored_as=stored_as, bias=bias), 128)


@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_chunked_without_routing_weights(weight_on):
    torch.manual_seed(3)
    layer = make_layer("unused_slots", bias=True)
    leaves = [layer.x_TD, *layer.stored]
    chunked, whole = list(arguments(layer, 5, weight_on)), list(whole_arguments(layer, weight_on))
    chunked[5] = whole[5] = None
    results = ops.expert_mlp_chunked(*chunked), ops.expert_mlp(*whole)
    torch.testing.assert_close(*results)
    for got, want in zip(*(torch.autograd.grad(out.sum(), leaves) for out in results), strict=True):
        torch.testing.assert_close(got, want)


def fill_with_whole_numbers(layer, dout_TD):
    """Whole numbers so small that nothing needs more bits than the dtype has, but sums over many tokens.

    With down weights of -1, 0 and 1 the gradients of activated values stay within D * max(dout), the largest of them all.
    """
    exact = int(2 / torch.finfo(dout_TD.dtype).eps)
    with torch.no_grad():
        layer.x_TD.random_(0, 3)
        layer.weights_TK.random_(1, 3)
        dout_TD.random_(0, exact // dout_TD.shape[1])
        for stored in layer.stored:
            stored.random_(-1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_half_precision_gradients_are_rounded_once(dtype, weight_on):
    """Sums of whole numbers are exact in fp32: with any number of chunks the bits are those of fp64, rounded."""
    torch.manual_seed(4)
    layer = make_layer(activation="relu", bias=True, dtype=dtype, sizes=(4, 2, 32, 16))
    dout = torch.empty_like(layer.x_TD)
    fill_with_whole_numbers(layer, dout)
    double = layer.to(torch.float64)
    expected = step(double.oracle(weight_on), double, dout.double())
    for n in (1024, 3):
        got = step(ops.expert_mlp_chunked(*arguments(layer, n, weight_on)), layer, dout)
        for ours, exact in zip(got, expected, strict=True):
            assert torch.equal(ours, exact.to(ours.dtype))
    assert all((exact.to(dtype) != exact).any() for exact in expected[3:])


@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_chunked_gradients(weight_on):
    torch.manual_seed(5)
    layer = make_layer("unused_slots", stored_as="split", bias=True, sizes=(3, 2, 5, 4))
    assert gradcheck(lambda *leaves: ops.expert_mlp_chunked(*arguments(layer, 8, weight_on)), layer.leaves)


@pytest.mark.parametrize("case", ["empty_expert", "unused_slots", "zero_tokens"])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_chunked_opcheck(case, weight_on):
    torch.manual_seed(6)
    stored_as = {"empty_expert": "packed", "unused_slots": "split_transposed", "zero_tokens": "interleaved"}[case]
    layer = make_layer(case, stored_as=stored_as, bias=True, sizes=(3, 2, 8, 4))
    given = arguments(layer, 8, weight_on)
    opcheck(ops.expert_mlp_chunked.default, given)
    for needs in ([True] * 5, [False, True, False, False, True]):
        opcheck(ops.expert_mlp_chunked_backward.default, (torch.randn_like(layer.x_TD).detach(), *detach(given), needs))


def test_expert_mlp_chunked_compiles_once_for_several_numbers_of_chunks():
    torch.manual_seed(7)
    layer = make_layer()

    def run(x_TD, weights_TK, experts_TK):
        return ops.expert_mlp_chunked(x_TD, layer.w_up, [], layer.w_down, [], weights_TK, experts_TK, 5, 16, "swiglu", False)

    assert_one_graph_for_several_token_counts(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expert_mlp_chunked_under_autocast(dtype):
    torch.manual_seed(8)
    layer = make_layer("unused_slots", dtype=torch.float32, bias=True)
    with torch.autocast("cpu", dtype):
        out = ops.expert_mlp_chunked(*arguments(layer, 8))
    assert out.dtype == dtype and torch.equal(out, ops.expert_mlp_chunked(*arguments(layer.to(dtype), 8)))
    out.float().sum().backward()
    assert layer.weights_TK.grad.dtype == torch.float32 and layer.stored[0].grad.dtype == torch.float32


def test_expert_mlp_chunked_counts_the_flops_of_expert_mlp():
    layer = make_layer(bias=True)
    counts = []
    for out in (
        functools.partial(ops.expert_mlp_chunked, *arguments(layer, 100)),
        lambda: ops.expert_mlp(*whole_arguments(layer)),
    ):
        with FlopCounterMode(display=False) as counter:
            out().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_frozen_weights_get_no_gradient_computation():
    layer = make_layer(bias=True)
    for weights in (layer.w_up, layer.b_up, layer.w_down, layer.b_down):
        weights[:] = [weight.detach() for weight in weights]
    with torch.profiler.profile() as profile:
        ops.expert_mlp_chunked(*arguments(layer, 100)).sum().backward()
    called = {event.name for event in profile.events()}
    assert {"moeblaze::expert_mlp_backward", "moeblaze::expert_up_backward"} <= called
    assert not called & {"moeblaze::expert_weight_grad_add", "moeblaze::expert_bias_grad_add"}


@pytest.mark.parametrize("stored_as", ["packed", "split"])
def test_experts_stored_apart(stored_as):
    torch.manual_seed(11)
    layer = make_layer("unused_slots", stored_as=stored_as, bias=True)
    expected = step(ops.expert_mlp_chunked(*arguments(layer, 6)), layer, torch.ones_like(layer.x_TD))
    for weights in (layer.w_up, layer.b_up, layer.w_down, layer.b_down):
        weights[:] = [expert for weight in weights for expert in weight.split(1)]
    given = list(arguments(layer, 6))
    given[7] = 5
    for got, want in zip(step(ops.expert_mlp_chunked(*given), layer, torch.ones_like(layer.x_TD)), expected, strict=True):
        assert torch.equal(got, want)


def test_gradient_of_the_weights_alone():
    layer = make_layer("unused_slots", bias=True)
    layer.x_TD, layer.weights_TK = layer.x_TD.detach(), layer.weights_TK.detach()
    expected = torch.autograd.grad(layer.oracle().sum(), layer.stored)
    with torch.profiler.profile() as profile:
        got = torch.autograd.grad(ops.expert_mlp_chunked(*arguments(layer, 6)).sum(), layer.stored)
    torch.testing.assert_close(got, expected)
    assert "moeblaze::expert_up_backward" not in {event.name for event in profile.events()}


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (6, torch.zeros(18, 2, dtype=torch.int64), r"experts_TK must have 19 rows, one per token, got 18"),
        (7, 4, r"num_experts must be 5, the experts of w_up, got 4"),
        (8, 0, r"chunk_tokens must be at least 1, got 0"),
        (5, torch.rand(18, 2), r"weights_TK must have shape \[19, 2\] of experts_TK, got shape \[18, 2\]"),
    ],
)
def test_expert_mlp_chunked_rejects(argument, value, message):
    given = list(arguments(make_layer("empty_expert", dtype=torch.float32), 8))
    given[argument] = value
    torch._dynamo.reset()
    for run in (ops.expert_mlp_chunked, torch.compile(ops.expert_mlp_chunked, backend="aot_eager")):
        with pytest.raises(Exception, match=f"expert_mlp_chunked: {message}"):
            run(*given)


@pytest.mark.parametrize("chunk_tokens", [1, 100, 1024, 4096])
@pytest.mark.parametrize("num_tokens", [1, 127, 1024, 1025, 5000, 8192])
def test_token_ranges_cover_every_token_once(num_tokens, chunk_tokens):
    ranges = list(token_ranges(num_tokens, chunk_tokens))
    assert [t for r in ranges for t in range(r.start, r.stop)] == list(range(num_tokens))
    lengths = [r.stop - r.start for r in ranges]
    assert max(lengths) <= chunk_tokens
    if chunk_tokens % 1024 == 0:
        assert len(ranges) == -(-num_tokens // chunk_tokens)


def test_no_tokens_are_one_range():
    assert list(token_ranges(0, 1024)) == [slice(0, 0)]


def test_chunks_are_the_largest_that_fit_the_limit(monkeypatch):
    sizes = {"D": 512, "F": 1024, "K": 2, "dtype": torch.bfloat16, "gated": True}
    each = transient_bytes(**sizes)
    for limit, expected in ((1, 1024), (1024 * each, 1024), (2048 * each - 1, 1024), (2048 * each, 2048)):
        monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
        assert tokens_per_chunk(**sizes, device=torch.device("cpu")) == expected


def test_default_limit_is_a_part_of_the_memory_of_a_gpu(monkeypatch):
    sizes = {"D": 512, "F": 1024, "K": 2, "dtype": torch.bfloat16, "gated": True}

    class Properties:
        total_memory = 16 * 4096 * transient_bytes(**sizes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert tokens_per_chunk(**sizes, device=torch.device("cuda", 0)) == 4096
    assert tokens_per_chunk(**sizes, device=torch.device("cpu")) >= 1 << 40


def test_a_chunk_is_freed_before_the_next_one_allocates(monkeypatch):
    layer = make_layer(bias=True)
    alive = []

    def watched(name):
        run = getattr(expert_mlp_chunked, name)

        def call(*args):
            assert name != "dispatch" or not [result for result in alive if result() is not None]
            results = run(*args)
            alive.extend(weakref.ref(t) for t in (results if isinstance(results, tuple) else (results,)))
            return results

        monkeypatch.setattr(expert_mlp_chunked, name, call)

    for name in ("dispatch", "expert_mlp", "expert_mlp_backward", "expert_up_backward"):
        watched(name)
    ops.expert_mlp_chunked(*arguments(layer, 30)).sum().backward()
    num_chunks = len(list(token_ranges(layer.x_TD.shape[0], 30)))
    assert num_chunks > 5 and len(alive) == num_chunks * (4 + 1 + 4 + 3 + 2)


T, D, F, E, K = 2500, 16, 24, 4, 2


def make_moe(keep="input"):
    torch.manual_seed(9)
    module = moeblaze_ops.MoE(D, F, E, K, keep=keep, bias=True, dtype=torch.float64)
    return module, torch.randn(T, D, dtype=torch.float64, requires_grad=True)


def train_step(module, x):
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def test_moe_takes_chunks_beyond_the_limit(monkeypatch):
    module, x = make_moe()
    expected = train_step(module, x)
    for limit, op in ((1, "expert_mlp_chunked"), (1 << 40, "expert_mlp")):
        monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
        with OurOps() as ours:
            got = train_step(module, x)
        assert op in ours.names and ("dispatch" in ours.names) == (op == "expert_mlp")
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_inference_takes_chunks_whatever_is_kept(monkeypatch):
    module, x = make_moe("preactivation")
    expected = module(x)
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)
    with torch.no_grad(), OurOps() as ours:
        torch.testing.assert_close(module(x), expected)
    assert "expert_mlp_chunked" in ours.names
    with OurOps() as ours:
        module(x)
    assert "expert_mlp_chunked" not in ours.names


def test_a_compiled_layer_has_one_graph_on_each_side_of_the_limit(monkeypatch):
    module, _ = make_moe()
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for num_tokens in (1030, 4000, 2049, 900, 40, 3000, 1024):
        x = torch.randn(num_tokens, D, dtype=torch.float64, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        for got, want in zip(train_step(compiled, x), train_step(module, x), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 2


def test_generated_code_calls_the_op(monkeypatch):
    """Under Inductor too the number of chunks is no part of the code; on the other side of the limit kernels are inlined."""
    torch.manual_seed(10)
    module = moeblaze_ops.MoE(D, F, E, K, keep="input")
    for limit, called in ((1, True), (1 << 40, False)):
        monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
        torch._dynamo.reset()
        sources = []
        x = torch.randn(T, D, requires_grad=True)
        torch.compile(module, backend=shadow_backend(sources), fullgraph=True)(x).sum().backward()
        forward, backward = sources
        assert ("torch.ops.moeblaze.expert_mlp_chunked.default(" in forward) == called
        assert ("torch.ops.moeblaze.expert_mlp_chunked_backward.default(" in backward) == called
        assert ("_expert_up_kernel" in launches(forward)) != called


def test_generated_code_adds_in_place():
    def add(gathered, grouped, dw, slots, offsets):
        ops.expert_weight_grad_add(gathered, grouped, [dw], None, slots, offsets, 2)

    with torch._subclasses.FakeTensorMode():
        inputs = [torch.empty(*shape, device="cuda") for shape in ((32, 16), (64, 1, 24), (4, 24, 16))]
        inputs += [torch.empty(n, dtype=torch.int32, device="cuda") for n in (64, 5)]
    code = generated_code(add, tuple(inputs))
    assert "torch.ops.moeblaze.expert_weight_grad_add.default(" in code and "= empty_strided_cuda(" not in code
