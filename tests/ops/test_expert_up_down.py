"""expert_up, expert_down and all their gradients, together (a layer) and apart."""

import re

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from moeblaze_ops.arguments.activations import ACTIVATIONS
from tests.corpus import reference
from tests.corpus.layers import ROUTINGS, STORAGES, make_layer
from tests.tools.op_harness import assert_one_graph_for_several_token_counts, detach

ops = torch.ops.moeblaze


def assert_layer_matches_oracle(layer, weight_on="output"):
    out, expected = layer.run(weight_on), layer.oracle(weight_on)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, layer.leaves, dout)
    expected_gradients = torch.autograd.grad(expected, layer.leaves, dout)
    for leaf, got, want in zip(layer.leaves, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == leaf.stride()


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_experts_match_reference(case, weight_on):
    torch.manual_seed(0)
    assert_layer_matches_oracle(make_layer(case, bias=True), weight_on)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "identity"])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_match_reference_for_every_activation(activation, bias):
    torch.manual_seed(1)
    assert_layer_matches_oracle(make_layer(activation=activation, bias=bias))


@pytest.mark.parametrize("stored_as", STORAGES)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_match_reference_for_every_storage(stored_as, bias):
    torch.manual_seed(2)
    assert_layer_matches_oracle(make_layer(stored_as=stored_as, bias=bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_experts_are_no_worse_than_eager_in_the_same_dtype(dtype, activation):
    torch.manual_seed(3)
    exact = make_layer(activation=activation, bias=True, sizes=(4, 2, 64, 48))
    low = exact.to(dtype)
    exact = low.to(torch.float64)
    dout = torch.randn_like(exact.x_TD)

    def errors(run):
        out = run()
        results = (out, *torch.autograd.grad(out, low.leaves, dout.to(out.dtype)))
        return [
            float((got.double() - want).detach().norm() / want.detach().norm())
            for got, want in zip(results, truth, strict=True)
        ]

    out = exact.oracle()
    truth = (out, *torch.autograd.grad(out, exact.leaves, dout))
    eager_in_dtype = make_layer_oracle_in(low)
    for ours, eager in zip(errors(low.run), errors(eager_in_dtype), strict=True):
        # The ops round where eager does or later; 1.5 leaves room for another order of the same sums.
        assert ours <= 1.5 * eager + torch.finfo(dtype).eps / 8


def make_layer_oracle_in(layer):
    """Eager in the layer's own dtype, routing weights included, as a plain module would run it."""

    def run():
        return reference.moe(
            layer.x_TD, layer.weights_TK.to(layer.x_TD.dtype), layer.experts_TK, layer.w_up, layer.w_down,
            layer.b_up, layer.b_down, layer.activation,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_experts_gradients(weight_on):
    torch.manual_seed(4)
    layer = make_layer("unused_slots", stored_as="split", bias=True, sizes=(3, 2, 5, 4))

    def run(*leaves):
        return layer.run(weight_on)

    assert gradcheck(run, layer.leaves)


def test_expert_up_matches_reference():
    torch.manual_seed(5)
    layer = make_layer("unused_slots", bias=True)
    h, a = ops.expert_up(layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing, "swiglu")
    expected_h, expected_a = reference.expert_up(layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing[:3], "swiglu")
    num_used = expected_h.shape[0]
    torch.testing.assert_close(h[:num_used], expected_h)
    torch.testing.assert_close(a[:num_used], expected_a)
    assert h[num_used:].eq(0).all() and a[num_used:].eq(0).all()


def test_expert_down_computes_the_activation_itself_without_a():
    torch.manual_seed(6)
    layer = make_layer()
    h, a = ops.expert_up(layer.x_TD, layer.w_up, [], None, *layer.routing, "swiglu")
    rest = (layer.w_down, [], layer.weights_TK, *layer.routing, "swiglu")
    torch.testing.assert_close(ops.expert_down(h, None, *rest), ops.expert_down(h, a, *rest))


def test_an_unfused_activation_between_identity_ops_matches_the_fused_one():
    torch.manual_seed(7)
    layer = make_layer(bias=True)
    h, empty = ops.expert_up(layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing, "identity")
    assert empty.shape[0] == 0
    a = torch.nn.functional.silu(h[:, 0]) * h[:, 1]
    out = ops.expert_down(
        a.unsqueeze(1), None, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, "identity"
    )
    expected = layer.run()
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, layer.leaves, dout), torch.autograd.grad(expected, layer.leaves, dout), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("case", ROUTINGS)
def test_expert_up_backward_adds_the_routers_gradient(case, parts):
    torch.manual_seed(11)
    layer = make_layer(case, requires_grad=False)
    (T, D), N = layer.x_TD.shape, layer.routing[0].shape[0]
    arguments = (torch.randn(N, *layer.w_up[0].shape[1:3], dtype=torch.float64), None, layer.w_up, None, *layer.routing)
    dlogits_TE, w_router_ED = torch.randn(T, parts * 7, dtype=torch.float64), torch.randn(7, D, dtype=torch.float64)
    dx, _ = ops.expert_up_backward(*arguments, dlogits_TE, w_router_ED)
    wanted = sum((part @ w_router_ED for part in dlogits_TE.split(7, 1)), ops.expert_up_backward(*arguments)[0])
    torch.testing.assert_close(dx, wanted)


def op_arguments(name, layer):
    """Arguments of one op on a layer, as backward would call it."""
    x, weights, routing = layer.x_TD, layer.weights_TK, layer.routing
    slots, offsets, positions, _ = routing
    h, a = (t.detach() for t in ops.expert_up(x, layer.w_up, layer.b_up, None, *routing, layer.activation))
    dout = torch.randn(x.shape, dtype=x.dtype)
    return {
        "expert_up": (x, layer.w_up, layer.b_up, None, *routing, layer.activation),
        "expert_up_weighted": (x, layer.w_up, layer.b_up, weights, *routing, layer.activation),
        "expert_down": (
            h.requires_grad_(x.requires_grad),
            a,
            layer.w_down,
            layer.b_down,
            weights,
            *routing,
            layer.activation,
        ),
        "expert_down_backward": (
            dout,
            h.detach(),
            layer.w_down,
            layer.b_down,
            weights.detach(),
            *routing,
            layer.activation,
        ),
        "expert_up_backward": (h.detach(), None, layer.w_up, None, *routing),
        "expert_up_backward_routed": (h.detach(), None, layer.w_up, None, *routing, dout[:, :3], layer.w_down[0][0, :3]),
        "expert_up_backward_weighted": (h.detach(), x.detach(), layer.w_up, weights.detach(), *routing),
        "expert_weight_grad": (x.detach(), h.detach(), layer.w_up, None, slots, offsets, positions.shape[1]),
        "expert_weight_grad_down": (
            dout,
            a.unsqueeze(1),
            layer.w_down,
            weights.detach(),
            slots,
            offsets,
            positions.shape[1],
        ),
        "expert_bias_grad": (h.detach().flatten(1), None, slots, offsets, positions.shape[1], False),
        "expert_bias_grad_gathered": (dout, weights.detach(), slots, offsets, positions.shape[1], True),
    }[name]


OPS = (
    "expert_up", "expert_up_weighted", "expert_down", "expert_down_backward", "expert_up_backward",
    "expert_up_backward_routed", "expert_up_backward_weighted", "expert_weight_grad", "expert_weight_grad_down",
    "expert_bias_grad", "expert_bias_grad_gathered",
)  # fmt: skip


FORWARD = ("expert_up", "expert_up_weighted", "expert_down")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("case", ["ragged_tail", "unused_slots", "zero_tokens"])
def test_experts_opcheck(name, case):
    """What has a gradient is checked with it."""
    torch.manual_seed(8)
    stored_as = {"ragged_tail": "packed", "unused_slots": "split_transposed", "zero_tokens": "interleaved"}[case]
    layer = make_layer(case, stored_as=stored_as, bias=True, requires_grad=name in FORWARD, sizes=(3, 2, 8, 4))
    op = getattr(ops, re.sub("_(weighted|routed|gathered)$", "", name).replace("grad_down", "grad"))
    arguments = op_arguments(name, layer)
    if name not in FORWARD:
        arguments = detach(arguments)
    opcheck(op.default, arguments)


def test_experts_opcheck_strided_tokens():
    torch.manual_seed(9)
    layer = make_layer(bias=True, sizes=(3, 2, 8, 4))
    wide = torch.randn(layer.x_TD.shape[0], 16, dtype=torch.float64, requires_grad=True)
    opcheck(ops.expert_up.default, (wide[:, ::2], layer.w_up, layer.b_up, None, *layer.routing, "swiglu"))


def test_experts_compile_once_for_several_token_counts():
    torch.manual_seed(10)
    layer = make_layer(requires_grad=True)

    def run(x_TD, weights_TK, experts_TK):
        routing = ops.dispatch(experts_TK, 5)
        h, a = ops.expert_up(x_TD, layer.w_up, [], None, *routing, "swiglu")
        return ops.expert_down(h, a, layer.w_down, [], weights_TK, *routing, "swiglu")

    assert_one_graph_for_several_token_counts(run)


@pytest.mark.parametrize("compiled", [False, True])
def test_only_x_h_weights_and_indices_are_kept_for_backward(compiled):
    torch.manual_seed(11)
    layer = make_layer(dtype=torch.float32, bias=True)
    run = torch.compile(layer.run, backend="aot_eager") if compiled else layer.run
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    T, D = layer.x_TD.shape
    N, F = layer.weights_TK.numel(), layer.stored[-3].shape[2]
    parameters = {t.untyped_storage().data_ptr() for t in layer.stored}
    sizes = {(tuple(t.shape), t.dtype) for t in kept if t.untyped_storage().data_ptr() not in parameters}
    expected = {((T, D), torch.float32), ((N, 2, F), torch.float32), (tuple(layer.weights_TK.shape), torch.float32)}
    expected |= {(tuple(t.shape), torch.int32) for t in layer.routing}
    assert sizes == expected


def test_experts_are_deterministic():
    torch.manual_seed(12)
    layer = make_layer(dtype=torch.bfloat16, bias=True)
    dout = torch.randn_like(layer.x_TD)
    first, second = ([layer.run(), *torch.autograd.grad(layer.run(), layer.leaves, dout)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_tokens_and_weights_but_not_routing_weights(dtype):
    torch.manual_seed(13)
    layer = make_layer(dtype=torch.float32, bias=True)
    low = layer.to(dtype)
    with torch.autocast("cpu", dtype):
        out = layer.run()
    assert out.dtype == dtype
    assert torch.equal(out, low.run())
    out.float().sum().backward()
    assert layer.weights_TK.grad.dtype == torch.float32 and layer.stored[0].grad.dtype == torch.float32


def test_second_derivatives_raise():
    layer = make_layer()
    (gradient,) = torch.autograd.grad(layer.run().square().sum(), layer.x_TD, create_graph=True)
    with pytest.raises(NotImplementedError, match="the gradient of a gradient is not available"):
        gradient.sum().backward()


def test_vmap_raises():
    layer = make_layer(requires_grad=False)
    with pytest.raises(NotImplementedError, match="expert_up: vmap is not supported"):
        torch.vmap(lambda x: ops.expert_up(x, layer.w_up, [], None, *layer.routing, "swiglu")[0])(
            layer.x_TD.expand(2, -1, -1)
        )


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    layer = make_layer()
    N, F, D = layer.weights_TK.numel(), 12, 24
    with FlopCounterMode(display=False) as counter:
        layer.run().sum().backward()
    assert counter.get_total_flops() == 3 * (2 * N * 2 * F * D + 2 * N * F * D)


def test_frozen_weights_get_no_gradient_computation():
    layer = make_layer(bias=True)
    for weights in (layer.w_up, layer.b_up, layer.w_down, layer.b_down):
        weights[:] = [weight.detach() for weight in weights]
    with torch.profiler.profile() as profile:
        layer.run().sum().backward()
    called = {event.name for event in profile.events()}
    assert "moeblaze::expert_up_backward" in called
    assert not called & {"moeblaze::expert_weight_grad", "moeblaze::expert_bias_grad"}


@pytest.mark.parametrize("damage", ["past the end", "falling", "negative", "first row left out"])
@pytest.mark.parametrize("op", ["expert_up", "expert_down", "expert_mlp"])
def test_damaged_offsets_raise_on_a_cpu(op, damage):
    """Rows of no expert would be uninitialised memory."""
    torch.manual_seed(0)
    layer = make_layer(requires_grad=False)
    slots_N, offsets_E1, *rest = layer.routing
    offsets_E1 = offsets_E1.clone()
    where, value = {"past the end": (-1, 10**6), "falling": (1, 10**6), "negative": (1, -3), "first row left out": (0, 1)}[damage]
    offsets_E1[where] = value
    routing = (slots_N, offsets_E1, *rest, layer.activation)
    h, a = ops.expert_up(layer.x_TD, layer.w_up, [], None, *layer.routing, layer.activation)
    with pytest.raises(ValueError, match="offsets_E1 must rise from 0 to at most"):
        if op == "expert_up":
            ops.expert_up(layer.x_TD, layer.w_up, [], None, *routing)
        elif op == "expert_down":
            ops.expert_down(h, a, layer.w_down, [], layer.weights_TK, *routing)
        else:
            ops.expert_mlp(layer.x_TD, layer.w_up, [], layer.w_down, [], layer.weights_TK, *routing, False)
