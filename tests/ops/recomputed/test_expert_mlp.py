"""expert_mlp against the two ops that it stands for, and against the oracle."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.cpu import rows
from tests.corpus.layers import ROUTINGS, STORAGES, make_layer
from tests.tools.fakecuda import launches, shadow_backend
from tests.tools.op_harness import assert_one_graph_for_several_token_counts, detach, step

ops = torch.ops.moeblaze
WEIGHT_ON = ("output", "input")


def arguments(layer, weight_on="output"):
    return (
        layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing,
        layer.activation, weight_on == "input",
    )  # fmt: skip


def backward_arguments(layer, weight_on="output"):
    return torch.randn_like(layer.x_TD).detach(), *detach(arguments(layer, weight_on))


def assert_equals_two_ops(layer, weight_on="output"):
    """Output and gradients are those of the oracle, and bit for bit those of expert_up and expert_down."""
    dout = torch.randn_like(layer.x_TD)
    got = step(ops.expert_mlp(*arguments(layer, weight_on)), layer, dout)
    for ours, oracle in zip(got, step(layer.oracle(weight_on), layer, dout), strict=True):
        torch.testing.assert_close(ours, oracle)
    for ours, two_ops in zip(got, step(layer.run(weight_on), layer, dout), strict=True):
        assert torch.equal(ours, two_ops) and ours.stride() == two_ops.stride()


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_matches_reference(case, weight_on):
    torch.manual_seed(0)
    assert_equals_two_ops(make_layer(case, bias=True), weight_on)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "identity"])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_matches_reference_for_every_activation(activation, weight_on):
    torch.manual_seed(1)
    assert_equals_two_ops(make_layer(activation=activation), weight_on)


@pytest.mark.parametrize("stored_as", STORAGES)
@pytest.mark.parametrize("bias", [False, True])
def test_expert_mlp_matches_reference_for_every_storage(stored_as, bias):
    torch.manual_seed(2)
    assert_equals_two_ops(make_layer(stored_as=stored_as, bias=bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_rounds_where_the_two_ops_round(dtype, weight_on):
    torch.manual_seed(3)
    layer = make_layer(bias=True, sizes=(4, 2, 64, 48)).to(dtype)
    dout = torch.randn_like(layer.x_TD)
    one = step(ops.expert_mlp(*arguments(layer, weight_on)), layer, dout)
    assert all(torch.equal(a, b) for a, b in zip(one, step(layer.run(weight_on), layer, dout), strict=True))


@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_without_routing_weights(weight_on):
    torch.manual_seed(4)
    layer = make_layer(bias=True)
    ones = torch.ones_like(layer.weights_TK)
    x, w_up, b_up, w_down, b_down, _, *rest = arguments(layer, weight_on)
    leaves = [layer.x_TD, *layer.stored]
    out = ops.expert_mlp(x, w_up, b_up, w_down, b_down, None, *rest)
    expected = ops.expert_mlp(x, w_up, b_up, w_down, b_down, ones, *rest)
    torch.testing.assert_close(out, expected)
    for got, want in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_gradients(weight_on):
    torch.manual_seed(5)
    layer = make_layer("unused_slots", stored_as="split", bias=True, sizes=(3, 2, 5, 4))
    assert gradcheck(lambda *leaves: ops.expert_mlp(*arguments(layer, weight_on)), layer.leaves)


@pytest.mark.parametrize("case", ["ragged_tail", "unused_slots", "zero_tokens"])
@pytest.mark.parametrize("weight_on", WEIGHT_ON)
def test_expert_mlp_opcheck(case, weight_on):
    torch.manual_seed(6)
    stored_as = {"ragged_tail": "packed", "unused_slots": "split_transposed", "zero_tokens": "interleaved"}[case]
    layer = make_layer(case, stored_as=stored_as, bias=True, sizes=(3, 2, 8, 4))
    opcheck(ops.expert_mlp.default, arguments(layer, weight_on))
    opcheck(ops.expert_mlp_backward.default, backward_arguments(layer, weight_on))


def test_expert_mlp_compiles_once_for_several_token_counts():
    torch.manual_seed(7)
    layer = make_layer()

    def run(x_TD, weights_TK, experts_TK):
        routing = ops.dispatch(experts_TK, 5)
        return ops.expert_mlp(x_TD, layer.w_up, [], layer.w_down, [], weights_TK, *routing, "swiglu", False)

    assert_one_graph_for_several_token_counts(run)


def test_expert_mlp_rejects_down_weights_of_another_width():
    layer = make_layer(dtype=torch.float32)
    layer.w_down = [torch.zeros(5, 13, 24)]
    message = r"expert_mlp: w_down must have leading shape \[5, 12\] \(experts and width of w_up\), got shape \[5, 13, 24\]"
    for run in (ops.expert_mlp, torch.compile(ops.expert_mlp, backend="aot_eager")):
        with pytest.raises(Exception, match=message):
            run(*arguments(layer))


def test_expert_mlp_rejects_identity_with_gated_weights():
    layer = make_layer(dtype=torch.float32)
    layer.activation = "identity"
    with pytest.raises(ValueError, match="expert_mlp: w_up must have one half with activation 'identity', got G=2"):
        ops.expert_mlp(*arguments(layer))


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any op returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_buffer_of_all_rows_exists_in_forward(monkeypatch):
    torch.manual_seed(8)
    monkeypatch.setattr(rows, "_BLOCK_NUMBERS", 1)
    layer = make_layer(requires_grad=False, sizes=(5, 2, 8, 16))
    N, (_, G, F, _) = layer.weights_TK.numel(), layer.w_up[0].shape
    with torch.no_grad(), LargestTensor() as largest:
        cpu.expert_mlp(*arguments(layer))
    assert largest.numel < N * F
    with torch.no_grad(), LargestTensor() as largest:
        cpu.expert_up(layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing, "swiglu")
    assert largest.numel == N * G * F


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expert_mlp_under_autocast(dtype):
    torch.manual_seed(9)
    layer = make_layer(dtype=torch.float32, bias=True)
    with torch.autocast("cpu", dtype):
        out = ops.expert_mlp(*arguments(layer))
    assert out.dtype == dtype and torch.equal(out, ops.expert_mlp(*arguments(layer.to(dtype))))
    out.float().sum().backward()
    assert layer.weights_TK.grad.dtype == torch.float32 and layer.stored[0].grad.dtype == torch.float32


def test_expert_mlp_repeats_the_up_projection_only():
    from torch.utils.flop_counter import FlopCounterMode

    layer = make_layer()
    N, F, D = layer.weights_TK.numel(), 12, 24
    up, down = 2 * N * 2 * F * D, 2 * N * F * D
    with FlopCounterMode(display=False) as counter:
        ops.expert_mlp(*arguments(layer)).sum().backward()
    assert counter.get_total_flops() == 4 * up + 3 * down


def test_frozen_weights_get_no_gradient_computation():
    layer = make_layer(bias=True)
    for weights in (layer.w_up, layer.b_up, layer.w_down, layer.b_down):
        weights[:] = [weight.detach() for weight in weights]
    with torch.profiler.profile() as profile:
        ops.expert_mlp(*arguments(layer)).sum().backward()
    called = {event.name for event in profile.events()}
    assert {"moeblaze::expert_mlp_backward", "moeblaze::expert_up_backward"} <= called
    assert not called & {"moeblaze::expert_weight_grad", "moeblaze::expert_bias_grad"}


def test_expert_mlp_lowers_to_its_kernels():
    torch.manual_seed(10)
    layer = make_layer(dtype=torch.float32)
    sources = []
    backend = shadow_backend(sources)
    out = torch.compile(lambda: ops.expert_mlp(*arguments(layer)), backend=backend, fullgraph=True)()
    torch.testing.assert_close(out, layer.run())
    out.sum().backward()
    forward, backward = sources
    assert all("torch.ops.moeblaze" not in source for source in sources)
    assert launches(forward) == ["_expert_up_kernel", "_expert_down_kernel", "_combine_kernel"]
    h_shape = f"({layer.weights_TK.numel()}, 2, 12)"
    assert h_shape not in forward and backward.count(f"empty_strided_cuda({h_shape}") == 1
    assert launches(backward).count("_expert_up_kernel") == 1 and "_expert_down_kernel" not in launches(backward)
