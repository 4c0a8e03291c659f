"""expert_mlp_ranged against expert_mlp and the oracle, the ranges it takes, and when ``moe`` takes it."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.memory import row_ranges
from moeblaze_ops.memory.row_ranges import MOST_RANGES, RangeSizes, choose_parts, range_sizes, tokens_in_ranges
from moeblaze_ops.ops.recomputed import expert_mlp_ranged
from moeblaze_ops.ops.recomputed.ranged_backward import Device, cpu_device
from tests.corpus.layers import ROUTINGS, STORAGES, make_layer
from tests.tools.fakecuda import launches, shadow_backend
from tests.tools.op_harness import assert_one_graph_for_several_token_counts, detach, step

ops = torch.ops.moeblaze
WEIGHT_ON = ("output", "input")
PLENTY = 1 << 40
NEEDS = [True] * 5


@pytest.fixture
def few_rows(monkeypatch):
    """Sets how many rows the first range has and the others have, whatever fits and wherever experts begin."""

    def set_to(first, others):
        device = cpu_device()._replace(read=lambda tensor: lambda: None)
        monkeypatch.setattr(expert_mlp_ranged, "cpu_device", lambda: device)
        monkeypatch.setattr(RangeSizes, "largest", lambda sizes, limit: (first, others))
        monkeypatch.setattr(row_ranges, "ROW_BLOCK", 1)

    return set_to


def arguments(layer, weight_on="output", max_bytes=PLENTY):
    return (
        layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing,
        layer.activation, weight_on == "input", max_bytes,
    )  # fmt: skip


def assert_equals_oracle(layer, weight_on="output"):
    """Output and gradients are those of the oracle, with the strides of the op that takes all rows at once."""
    dout = torch.randn_like(layer.x_TD)
    got = step(ops.expert_mlp_ranged(*arguments(layer, weight_on)), layer, dout)
    whole = step(ops.expert_mlp(*arguments(layer, weight_on)[:-1]), layer, dout)
    for ours, oracle, one in zip(got, step(layer.oracle(weight_on), layer, dout), whole, strict=True):
        torch.testing.assert_close(ours, oracle)
        assert ours.stride() == one.stride()


@pytest.mark.parametrize("case", [case for case in ROUTINGS if case != "ragged_tail"])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
@pytest.mark.parametrize("rows", [(3, 1), (7, 11), (100, 1)], ids=str)
def test_expert_mlp_ranged_matches_reference(case, weight_on, rows, few_rows):
    torch.manual_seed(0)
    few_rows(*rows)
    assert_equals_oracle(make_layer(case, bias=True), weight_on)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "identity"])
def test_expert_mlp_ranged_matches_reference_for_every_activation(activation, few_rows):
    torch.manual_seed(1)
    few_rows(5, 4)
    assert_equals_oracle(make_layer("unused_slots", activation=activation))


@pytest.mark.parametrize("stored_as", STORAGES)
@pytest.mark.parametrize("bias", [False, True])
def test_expert_mlp_ranged_matches_reference_for_every_storage(stored_as, bias, few_rows):
    torch.manual_seed(2)
    few_rows(300, 150)
    assert_equals_oracle(make_layer(stored_as=stored_as, bias=bias))


def test_the_smallest_limit_and_the_one_below(monkeypatch):
    torch.manual_seed(3)
    layer = make_layer(bias=True)
    N, E = layer.routing[0].shape[0], 5
    sizes = range_sizes(24, 12, E, torch.float64, gated=True)
    limit = next(n for n in itertools.count(1000) if row_ranges.row_ranges(N, E, sizes, n) is not None)
    assert len(row_ranges.row_ranges(N, E, sizes, limit)) == 3
    out = ops.expert_mlp_ranged(*arguments(layer, max_bytes=limit))
    torch.testing.assert_close(step(out, layer, layer.x_TD), step(layer.oracle(), layer, layer.x_TD))
    out = ops.expert_mlp_ranged(*arguments(layer, max_bytes=limit - 1))
    with pytest.raises(ValueError, match=f"expert_mlp_ranged_backward: max_bytes must leave room for 128 rows, got {limit - 1}"):
        out.sum().backward()


@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_one_range_is_expert_mlp_bit_for_bit(weight_on):
    torch.manual_seed(4)
    layer = make_layer(bias=True, dtype=torch.bfloat16, sizes=(4, 2, 32, 16))
    dout = torch.randn_like(layer.x_TD)
    ranged = step(ops.expert_mlp_ranged(*arguments(layer, weight_on)), layer, dout)
    whole = step(ops.expert_mlp(*arguments(layer, weight_on)[:-1]), layer, dout)
    # The sums of the up biases go through an fp32 tensor, as those of chunks do.
    for one, other in zip(ranged, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-8 if one.dim() == 2 and one.shape[1] == 32 else 0, atol=0)


def test_only_experts_that_are_cut_are_rounded_twice(few_rows):
    """In bf16: experts whose rows are in one range have the gradient of ``expert_mlp``, bit for bit."""
    torch.manual_seed(5)
    layer = make_layer(dtype=torch.bfloat16, sizes=(4, 2, 32, 16))
    dout = torch.randn_like(layer.x_TD)
    offsets = layer.routing[1].tolist()
    few_rows(offsets[1] + 20, offsets[4])
    ranged = step(ops.expert_mlp_ranged(*arguments(layer)), layer, dout)
    whole = step(ops.expert_mlp(*arguments(layer)[:-1]), layer, dout)
    assert torch.equal(ranged[0], whole[0]) and torch.equal(ranged[2], whole[2])
    for one, other in zip(ranged[3:], whole[3:], strict=True):
        is_equal = [torch.equal(one[e], other[e]) for e in range(4)]
        assert is_equal == [True, False, True, True]
        # Both parts of the sum are rounded, and then their sum.
        error = (one - other)[1].float().abs()
        assert error.max() <= 3 * torch.finfo(torch.bfloat16).eps * other[1].float().abs().max()


def test_gradients_of_x_are_rounded_once_a_range_that_has_rows(few_rows):
    """In bf16 the error is that of a sum over K rows which is rounded after each: however many ranges there are."""
    torch.manual_seed(6)
    layer = make_layer(dtype=torch.bfloat16, sizes=(4, 3, 32, 16))
    dout = torch.randn_like(layer.x_TD)
    layer_64 = layer.to(torch.float64)
    exact = torch.autograd.grad(layer_64.oracle(), layer_64.x_TD, dout.double())[0]
    errors = []
    for rows in ((PLENTY, 1), (64, 64), (1, 1)):
        few_rows(*rows)
        dx = torch.autograd.grad(ops.expert_mlp_ranged(*arguments(layer)), layer.x_TD, dout)[0]
        errors.append((dx.double() - exact).norm() / exact.norm())
    assert errors[0] < errors[1] <= errors[2] * 1.01
    assert errors[2] < 3 * errors[0] < 0.05


@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_ranged_gradients(weight_on, few_rows):
    torch.manual_seed(7)
    few_rows(8, 5)
    layer = make_layer("unused_slots", stored_as="split", bias=True, sizes=(3, 2, 5, 4))
    assert gradcheck(lambda *leaves: ops.expert_mlp_ranged(*arguments(layer, weight_on)), layer.leaves)


@pytest.mark.parametrize("case", ["empty_expert", "unused_slots", "zero_tokens"])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_ranged_opcheck(case, weight_on):
    torch.manual_seed(8)
    stored_as = {"empty_expert": "packed", "unused_slots": "split_transposed", "zero_tokens": "interleaved"}[case]
    layer = make_layer(case, stored_as=stored_as, bias=True, sizes=(3, 2, 8, 4))
    given = arguments(layer, weight_on)
    opcheck(ops.expert_mlp_ranged.default, given)
    backward = (torch.randn_like(layer.x_TD).detach(), *detach(given))
    for needs in (NEEDS, [False, True, False, False, True]):
        opcheck(ops.expert_mlp_ranged_backward.default, (*backward, needs))
    sums = [torch.randn_like(w.detach()) for w in layer.w_down]
    # Functionalization, which compiled code would need, has no form for an op that writes and returns lists.
    utilities = ("test_schema", "test_faketensor")
    opcheck(ops.expert_mlp_ranged_backward_add.default, (*backward, NEEDS, [], sums), test_utils=utilities)


def test_expert_mlp_ranged_compiles_once_for_several_numbers_of_ranges():
    torch.manual_seed(9)
    layer = make_layer()

    def run(x_TD, weights_TK, experts_TK):
        routing = ops.dispatch(experts_TK, 5)
        return ops.expert_mlp_ranged(x_TD, layer.w_up, [], layer.w_down, [], weights_TK, *routing, "swiglu", False, 80000)

    assert_one_graph_for_several_token_counts(run, (6, 131, 500))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expert_mlp_ranged_under_autocast(dtype):
    torch.manual_seed(10)
    layer = make_layer("unused_slots", dtype=torch.float32, bias=True)
    with torch.autocast("cpu", dtype):
        out = ops.expert_mlp_ranged(*arguments(layer))
    assert out.dtype == dtype and torch.equal(out, ops.expert_mlp_ranged(*arguments(layer.to(dtype))))
    out.float().sum().backward()
    assert layer.weights_TK.grad.dtype == torch.float32 and layer.stored[0].grad.dtype == torch.float32


def test_expert_mlp_ranged_counts_the_flops_of_expert_mlp():
    layer = make_layer(bias=True)
    counts = []
    for op, given in ((ops.expert_mlp_ranged, arguments(layer)), (ops.expert_mlp, arguments(layer)[:-1])):
        with FlopCounterMode(display=False) as counter:
            op(*given).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("frozen", [("w_up", "b_up", "w_down", "b_down"), ("w_up",), ("w_down", "b_down"), ("x",)], ids=str)
def test_what_is_frozen_gets_no_gradient(frozen, few_rows, monkeypatch):
    few_rows(6, 4)
    torch.manual_seed(11)
    layer = make_layer("unused_slots", bias=True)
    for name in frozen:
        if name == "x":
            layer.x_TD = layer.x_TD.detach()
        else:
            setattr(layer, name, [weight.detach() for weight in getattr(layer, name)])
    called = []

    def noted(name, run):
        return lambda *args, **keywords: (called.append(name), run(*args, **keywords))[1]

    device = cpu_device()._asdict()
    device = Device(*(noted(name, run) for name, run in device.items()))
    monkeypatch.setattr(expert_mlp_ranged, "cpu_device", lambda: device)
    leaves = [leaf for leaf in (layer.x_TD, *layer.w_up, *layer.b_up, *layer.w_down, *layer.b_down) if leaf.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(ops.expert_mlp_ranged(*arguments(layer)).sum(), leaves),
        torch.autograd.grad(layer.oracle().sum(), leaves),
    )
    assert ("expert_up_backward_part" in called) == ("x" not in frozen)
    assert ("expert_weight_grad_add" in called) == (not {"w_up", "w_down"} <= set(frozen))


@pytest.mark.parametrize("stored_as", ["packed", "split"])
def test_experts_stored_apart(stored_as, few_rows):
    few_rows(8, 7)
    torch.manual_seed(12)
    layer = make_layer("unused_slots", stored_as=stored_as, bias=True)
    expected = step(ops.expert_mlp_ranged(*arguments(layer)), layer, torch.ones_like(layer.x_TD))
    for weights in (layer.w_up, layer.b_up, layer.w_down, layer.b_down):
        weights[:] = [expert for weight in weights for expert in weight.split(1)]
    got = step(ops.expert_mlp_ranged(*arguments(layer)), layer, torch.ones_like(layer.x_TD))
    assert all(torch.equal(ours, want) for ours, want in zip(got, expected, strict=True))


@pytest.mark.parametrize("accumulated", [("w_up",), ("w_down",), ("w_up", "w_down")], ids=str)
def test_gradients_are_added_in_place(accumulated, few_rows):
    few_rows(40, 30)
    torch.manual_seed(13)
    module = moeblaze_ops.MoE(8, 12, 4, 2, keep="input", bias=True, dtype=torch.float64)
    x = torch.randn(60, 8, dtype=torch.float64)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    buffers = {name: torch.randn_like(getattr(module, name)) for name in accumulated}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    for name, buffer in buffers.items():
        moeblaze_ops.accumulate_grad(getattr(module, name), buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeblaze_ops.functional.choose_parts", lambda *args: ("ranges", PLENTY))
        module(x).square().sum().backward()
    for (name, parameter), gradient in zip(module.named_parameters(), expected, strict=True):
        if name in accumulated:
            assert parameter.grad is None
            torch.testing.assert_close(buffers[name], before[name] + gradient)
        else:
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (12, 0, r"max_bytes must be at least 1, got 0"),
        (5, torch.rand(18, 2), r"weights_TK must have shape \[19, 2\] of positions_TK, got shape \[18, 2\]"),
    ],
)
def test_expert_mlp_ranged_rejects(argument, value, message):
    given = list(arguments(make_layer("empty_expert", dtype=torch.float32)))
    given[argument] = value
    torch._dynamo.reset()
    for run in (ops.expert_mlp_ranged, torch.compile(ops.expert_mlp_ranged, backend="aot_eager")):
        with pytest.raises(Exception, match=f"expert_mlp_ranged: {message}"):
            run(*given)


SIZES = {"fine": (2048, 768, 128, 8), "coarse": (4096, 14336, 8, 2), "few_weights": (512, 2048, 4, 1)}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("gated", [False, True])
def test_ranges_cover_every_row_once_and_fit(name, gated):
    D, F, E, K = SIZES[name]
    of_rows = range_sizes(D, F, E, torch.bfloat16, gated)
    limit = 256 << 20
    for num_rows in (0, 1, 127, 128, 100_000, 262_144, 262_145):
        ranges = row_ranges.row_ranges(num_rows, E, of_rows, limit)
        assert [row for rows in ranges for row in rows] == list(range(num_rows))
        assert all(rows.start % 128 == 0 for rows in ranges)
        assert num_rows == 0 or all(len(rows) > 0 for rows in ranges)
        for i, rows in enumerate(ranges):
            dh, wa, columns = (size * len(rows) for size in (of_rows.dh, of_rows.wa, of_rows.columns))
            if i == 0:
                assert dh + wa + columns <= limit + of_rows.dw_up + of_rows.dw_down
                assert dh + wa <= limit + of_rows.dw_down and wa <= limit
                # Until the gradient of the up weights has been taken, if they are there that long.
                available = limit + of_rows.dw_down + (0 if of_rows.keeps_rows(limit, rows) else of_rows.dw_up)
                assert dh + wa + of_rows.column_bytes(limit, rows) == available
            else:
                assert dh + max(wa, columns) <= limit
            assert columns <= of_rows.column_bytes(limit, rows)


def test_without_both_weight_gradients_no_range_counts_on_their_memory():
    for has in ((True, False), (False, True), (False, False)):
        of_rows = range_sizes(2048, 768, 128, torch.bfloat16, True, *has)
        first, others = of_rows.largest(256 << 20)
        assert first == others
        assert not of_rows.takes_down_last(range(first))
    assert range_sizes(2048, 768, 128, torch.bfloat16, True).takes_down_last(range(9))


def test_parts_are_chosen_by_tokens(monkeypatch):
    """Whole up to the limit, in ranges of rows for backward as long as they are few, in chunks of tokens beyond."""
    monkeypatch.setattr(config, "max_layer_transient_bytes", 256 << 20)
    D, F, E, K = SIZES["fine"]
    most = tokens_in_ranges(D, F, E, K, torch.bfloat16, True, 256 << 20)
    sizes = (D, F, E, K, torch.bfloat16, True, torch.device("cpu"))
    assert choose_parts(1024, *sizes)[0] == "whole"
    assert choose_parts(32768, *sizes) == choose_parts(most, *sizes) == ("ranges", 256 << 20)
    assert choose_parts(most + 1, *sizes)[0] == "chunks"
    with torch.no_grad():
        assert choose_parts(32768, *sizes)[0] == "chunks"
    of_rows = range_sizes(D, F, E, torch.bfloat16, True)
    assert len(row_ranges.row_ranges(most * K, E, of_rows, 256 << 20)) <= MOST_RANGES
    assert most * K * F <= E * F * 3 * D


def test_a_compiled_layer_has_one_graph_for_each_way(monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1024 * 1200)
    torch.manual_seed(14)
    module = moeblaze_ops.MoE(16, 8, 512, 2, keep="input", dtype=torch.float64)
    graphs = []

    def backend(gm, inputs):
        graphs.append([n.target.__name__ for n in gm.graph.nodes if str(n.target).startswith("moeblaze.expert")])
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for num_tokens in (1024, 6000, 1023, 5999, 13_000):
        x = torch.randn(num_tokens, 16, dtype=torch.float64)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), module(x))
    assert graphs == [["expert_mlp.default"], ["expert_mlp_ranged.default"], ["expert_mlp_chunked.default"]]


@pytest.mark.parametrize(("max_bytes", "ranges"), [(60_000, False), (50_000, True)])
def test_one_range_is_inlined_with_the_kernels_of_expert_mlp(max_bytes, ranges, monkeypatch):
    """The gradient of h takes 32256 bytes, as much as the rows of that of x, for which those of w_up leave 11520."""
    torch.manual_seed(16)
    monkeypatch.setattr(config, "max_transient_bytes", None)
    layer = make_layer(dtype=torch.float32)
    layer.x_TD, dout = layer.x_TD.detach().requires_grad_(), torch.randn_like(layer.x_TD)
    torch._dynamo.reset()
    sources = []
    compiled = torch.compile(ops.expert_mlp_ranged, backend=shadow_backend(sources), fullgraph=True)
    got = step(compiled(*arguments(layer, max_bytes=max_bytes)), layer, dout)
    torch.testing.assert_close(got, step(layer.oracle(), layer, dout))
    assert ("torch.ops.moeblaze.expert_mlp_ranged_backward" in sources[1]) == ranges
    assert ("_expert_up_backward_kernel" in launches(sources[1])) != ranges


def test_gradients_in_the_order_of_expert_mlp_fit():
    of_rows = range_sizes(1536, 256, 128, torch.bfloat16, True)
    num_rows, limit = 24576 * 8, 240 << 20
    left = of_rows.whole_column_bytes(limit, num_rows)
    assert of_rows.dh * num_rows + left == limit + of_rows.dw_up
    assert of_rows.whole_column_bytes(of_rows.dh * num_rows, num_rows) is not None
    assert of_rows.whole_column_bytes(of_rows.dh * num_rows - 1, num_rows) is None
    # Without up weights to train there is no memory that is still free for the rows.
    frozen = range_sizes(1536, 256, 128, torch.bfloat16, True, has_dw_up=False)
    assert frozen.whole_column_bytes(of_rows.dh * num_rows, num_rows) is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_generated_code_has_the_kernels_of_forward_and_calls_backward(monkeypatch, dynamic):
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1 << 20)
    torch.manual_seed(15)
    module = moeblaze_ops.MoE(64, 32, 64, 2, keep="input")
    torch._dynamo.reset()
    sources = []
    x = torch.randn(3000, 64, requires_grad=True)
    torch.compile(module, backend=shadow_backend(sources), fullgraph=True, dynamic=dynamic)(x).sum().backward()
    forward, backward = sources
    assert {"_expert_up_kernel", "_expert_down_kernel", "_combine_kernel"} <= set(launches(forward))
    assert "torch.ops.moeblaze" not in forward
    assert "torch.ops.moeblaze.expert_mlp_ranged_backward.default(" in backward
