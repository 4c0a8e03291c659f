import os

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

pytest.importorskip("triton", reason="traces Triton kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be traced", allow_module_level=True)

from torch._higher_order_ops.triton_kernel_wrap import (
    get_mutated_tensors,
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)

from moeblaze_ops import config
from moeblaze_ops.kernels import configs
from moeblaze_ops.kernels.experts.bias_grad import launch_expert_bias_grad
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward, launch_expert_down_backward_learned
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up, launch_expert_up_h8
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward
from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad
from moeblaze_ops.kernels.routing.dispatch import launch_dispatch
from tests.tools.fakecuda import fake_device

E, K, D, F = 16, 4, 256, 128
HINT = 96
"""Tokens of the call that is traced, where their number is symbolic."""

WRITES = {
    "_count_kernel": {"counts_ptr"},
    "_scan_kernel": {"counts_ptr", "totals_ptr"},
    "_place_kernel": {"slots_ptr", "offsets_ptr", "positions_ptr", "blocks_ptr"},
    "_expert_up_kernel": {"h_ptr", "a_ptr"},
    "_expert_down_kernel": {"y_ptr"},
    "_combine_kernel": {"out_ptr"},
    "_row_dots_kernel": {"dots_ptr"},
    "_expert_down_backward_kernel": {"dh_ptr", "wa_ptr", "partials_ptr"},
    "_bias_dots_kernel": {"dots_ptr"},
    "_dweights_kernel": {"dweights_ptr"},
    "_expert_up_backward_kernel": {"dx_ptr"},
    "_expert_weight_grad_kernel": {"dw_ptr"},
    "_expert_bias_grad_kernel": {"parts_ptr"},
}
"""What each kernel writes. Where the analysis fails, every argument counts as written and is cloned before the launch."""


def train(x, experts, weights, w_gate, w_up, w_down, b_gate, b_up, b_down):
    """Calls every launcher once; half of the routing weight goes to each side, so that both ways are traced."""
    routing = launch_dispatch(experts, E)
    slots, offsets = routing[:2]
    h, a = launch_expert_up(x, [w_gate, w_up], [b_gate, b_up], weights, *routing, "swiglu")
    out = launch_expert_down(h, a, [w_down], [b_down], weights, *routing, "swiglu")
    dh, dweights, wa = launch_expert_down_backward(out, h, [w_down], [b_down], weights, *routing, "swiglu")
    dx, dweights_in = launch_expert_up_backward(dh, x, [w_gate, w_up], weights, *routing)
    dw_up = launch_expert_weight_grad(x, dh, [w_gate, w_up], weights, slots, offsets, K)
    dw_down = launch_expert_weight_grad(out, wa.unsqueeze(1), [w_down], None, slots, offsets, K)
    db_up = launch_expert_bias_grad(dh.flatten(1), None, slots, offsets, K, False)
    db_down = launch_expert_bias_grad(out, weights, slots, offsets, K, True)
    return out, dx, dweights, dweights_in, *dw_up, *dw_down, db_up, db_down


@pytest.fixture(autouse=True)
def portable_kernels(monkeypatch):
    monkeypatch.setattr(config, "hopper", "off")


@pytest.fixture
def trace(portable_kernels):
    """The graph of ``train`` for a symbolic number of tokens, its output sizes and the guards it took."""
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False), fake_device():

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        num_tokens = symbolic_size(shape_env)
        guards_before = len(shape_env.guards)
        kernel_side_table.reset_table()
        graph = make_fx(train)(
            new(num_tokens, D),
            new(num_tokens, K, dtype=torch.int64),
            new(num_tokens, K, dtype=torch.float32),
            *(new(E, 1, F, D) for _ in range(2)),
            new(E, D, F).transpose(1, 2),
            *(new(E, 1, F) for _ in range(2)),
            new(E, D),
        )
        yield graph, num_tokens, shape_env.guards[guards_before:]


def symbolic_size(shape_env):
    source = ConstantSource("num_tokens")
    symbol = shape_env.create_symbol(HINT, source, dynamic_dim=DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=HINT, source=source)


def _size_without_hint(shape_env):
    with shape_env.ignore_fresh_unbacked_symbols():
        size = shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    return size


def kernel_launches(graph):
    for node in graph.graph.nodes:
        if node.target is triton_kernel_wrapper_mutation:
            yield kernel_side_table.get_kernel(node.kwargs["kernel_idx"]), node


def kernel_name(kernel):
    return getattr(kernel, "fn", kernel).__name__


def test_launchers_trace_for_any_number_of_tokens(trace):
    graph, num_tokens, guards = trace
    assert {kernel_name(kernel) for kernel, _ in kernel_launches(graph)} == set(WRITES)
    (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    assert str(outputs[0].meta["val"].shape[0]) == str(num_tokens)
    assert guards == []


def project_back(h, a, x, weights, w_up, w_down, *routing):
    out = launch_expert_down(h, a, [w_down], [], weights, *routing, "swiglu")
    return out, *launch_expert_up_backward(h, x, [w_up], weights, *routing)


@pytest.mark.parametrize(
    ("backed", "width", "ranges"), [(True, 300, 3), (False, 300, 1), (True, None, 1)], ids=["hint", "no_hint", "symbolic_width"]
)
def test_ranges_of_columns_take_no_guard(backed, width, ranges, monkeypatch):
    """The number of them follows the hint, and holds for every number of tokens."""
    monkeypatch.setattr(configs, "COLUMN_UNIT", 32)
    monkeypatch.setattr(config, "max_transient_bytes", HINT * K * 2 * 128)
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), fake_device():

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        def ints(*shape):
            return new(*shape, dtype=torch.int32)

        T = symbolic_size(shape_env) if backed else _size_without_hint(shape_env)
        width = symbolic_size(shape_env) if width is None else width
        hidden = new(T * K, 2, F), new(T * K, F), new(T, width), new(T, K, dtype=torch.float32)
        weights = new(E, 2, F, width), new(E, F, width)
        routing = ints(T * K), ints(E + 1), ints(T, K), ints(T * K // 128 + E + 1, 2)
        guards_before = len(shape_env.guards)
        graph = make_fx(project_back)(*hidden, *weights, *routing)
        assert shape_env.guards[guards_before:] == []
    names = [kernel_name(kernel) for kernel, _ in kernel_launches(graph)]
    assert {name: names.count(name) for name in names} == {
        "_expert_down_kernel": ranges,
        "_expert_up_backward_kernel": ranges,
        "_combine_kernel": 2 * ranges,
        "_row_dots_kernel": ranges,
    }
    made = [node.meta["val"] for node in graph.graph.nodes if node.target is torch.ops.aten.new_empty.default]
    rows = [t for t in made if str(t.shape[0]) == str(T * K)]
    assert len(rows) == 2, "one buffer for the ranges of each projection"


def test_mutation_analysis_finds_what_kernels_write(trace):
    graph, _, _ = trace
    check_writes(graph, WRITES)


def test_eight_bits_are_written_in_place():
    def step(x, weights, w_up, w_down, *routing):
        h, a, h8 = launch_expert_up_h8(x, [w_up], [], None, *routing, "swiglu")
        out = launch_expert_down(h, a, [w_down], [], weights, *routing, "swiglu")
        return launch_expert_down_backward(out, h8, [w_down], [], weights, *routing, "swiglu")

    with FakeTensorMode(allow_non_fake_inputs=False), fake_device():

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        sizes = [(HINT * K,), (E + 1,), (HINT, K), (HINT * K // 128 + E + 1, 2)]
        routing = [new(*size, dtype=torch.int32) for size in sizes]
        kernel_side_table.reset_table()
        weights = new(HINT, K, dtype=torch.float32)
        graph = make_fx(step)(new(HINT, D), weights, new(E, 2, F, D), new(E, F, D), *routing)
        names = ("_expert_up_kernel", "_expert_down_kernel", "_combine_kernel")
        names = (*names, "_expert_down_backward_kernel", "_dweights_kernel")
        check_writes(graph, {name: WRITES[name] for name in names})


def test_few_slots_are_grouped_by_one_kernel():
    with FakeTensorMode(allow_non_fake_inputs=False), fake_device():
        kernel_side_table.reset_table()
        graph = make_fx(lambda experts: launch_dispatch(experts, E))(torch.empty(16, K, dtype=torch.int64, device="cuda"))
        assert [kernel_name(kernel) for kernel, _ in kernel_launches(graph)] == ["_few_slots_kernel"]
        check_writes(graph, {"_few_slots_kernel": WRITES["_place_kernel"]})


def test_used_slots_are_put_first_once_for_all_ranges_of_columns(monkeypatch):
    monkeypatch.setattr(configs, "COLUMN_UNIT", 32)

    def step(h, a, experts, weights, w_down):
        routing = launch_dispatch(experts, E)
        return launch_expert_down(h, a, [w_down], [], weights, *routing, "swiglu", max_bytes=HINT * E * D)

    with FakeTensorMode(allow_non_fake_inputs=False), fake_device():

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        kernel_side_table.reset_table()
        numbers = new(HINT, E, dtype=torch.int64), new(HINT, E, dtype=torch.float32)
        graph = make_fx(step)(new(HINT * E, 2, F), new(HINT * E, F), *numbers, new(E, F, D))
        names = [kernel_name(kernel) for kernel, _ in kernel_launches(graph)]
        assert names.count("_used_first_kernel") == 1 and names.count("_combine_kernel") == 2
        of_many_slots = {
            "_used_first_kernel": {"used_positions_ptr", "used_weights_ptr", "counts_ptr"},
            "_count_kernel": WRITES["_count_kernel"] | {"listed_ptr", "positions_ptr"},
        }
        check_writes(graph, WRITES | of_many_slots)


def test_learned_parameters_are_read_and_their_sums_written():
    formula = "g * sigmoid(p0 * g) * (u + p1)"

    def step(x, experts, weights, w_up, w_down, params):
        routing = launch_dispatch(experts, E)
        h, _ = launch_expert_up(x, [w_up], [], None, *routing, formula, None, None, None, params)
        return launch_expert_down_backward_learned(x, h, [w_down], [], weights, *routing, formula, None, None, params)

    with FakeTensorMode(allow_non_fake_inputs=False), fake_device():

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        kernel_side_table.reset_table()
        numbers = new(HINT, K, dtype=torch.int64), new(HINT, K, dtype=torch.float32)
        parameters = new(E, 2, dtype=torch.float32)
        graph = make_fx(step)(new(HINT, D), *numbers, new(E, 2, F, D), new(E, F, D), parameters)
        (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        assert results[3].meta["val"].shape == (E, 2) and results[3].meta["val"].dtype == torch.float32
        written = WRITES["_expert_down_backward_kernel"] | {"shares_ptr"}
        check_writes(graph, WRITES | {"_expert_down_backward_kernel": written})
        assert not any("copy_" in str(node.target) for node in graph.graph.nodes)


def check_writes(graph, writes):
    for kernel, node in kernel_launches(graph):
        kwargs = {
            name: value.meta["val"] if isinstance(value, torch.fx.Node) else value
            for name, value in node.kwargs["kwargs"].items()
        }
        written = get_mutated_tensors(node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"], kwargs, {})
        assert set(written) == writes[kernel_name(kernel)], kernel_name(kernel)
