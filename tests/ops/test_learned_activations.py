"""Parameters of an activation in the ops and in ``moe``: gradients against fp64, in all precisions, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.library import opcheck

import moeblaze_ops
from moeblaze_ops import moe
from tests.corpus.layers import ROUTINGS, routing
from tests.tools.op_harness import detach

ops = torch.ops.moeblaze
E, K, D, FF = 5, 2, 16, 12


def swish(g, u, beta, shift):
    return g * torch.sigmoid(beta * g) * (u + shift)


def leaky(h, slope):
    return torch.where(h > 0, h, slope * h)


def make_case(function, name="ragged_tail", dtype=torch.float64, per_expert=False):
    """x, weights, w_up, w_down, parameters, all that need gradients; and ids."""
    torch.manual_seed(0)
    experts_TK = routing(name, E, K)
    T, gated = experts_TK.shape[0], function is swish
    shapes = (T, D), (T, K), (E, FF * (1 + gated), D), (E, D, FF)
    tensors = [(torch.randn(shape, dtype=torch.float64) / 3).to(dtype).requires_grad_() for shape in shapes]
    wide = torch.promote_types(dtype, torch.float32)
    count = 2 if gated else 1
    tensors += [(torch.rand(E if per_expert else (), dtype=wide) + 0.5).requires_grad_() for _ in range(count)]
    return tensors, experts_TK


def plain(x, weights, w_up, w_down, *parameters, experts_TK, function):
    out = torch.zeros_like(x)
    for e in range(E):
        h = x @ w_up[e].T
        own = [p if p.dim() == 0 else p[e] for p in parameters]
        a = function(*(h.chunk(2, dim=-1) if function is swish else (h,)), *own).to(x.dtype)
        out = out + (weights * (experts_TK == e)).sum(-1, keepdim=True) * (a @ w_down[e].T)
    return out


def ours(x, weights, w_up, w_down, *parameters, experts_TK, function):
    return moe(x, weights, experts_TK, w_up, w_down, activation=function, activation_parameters=parameters)


def gradients(run, tensors, **options):
    out = run(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out.double().square().sum(), tensors)]


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("function", [swish, leaky])
@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "zero_tokens"])
def test_gradients_are_those_of_a_loop(name, function, per_expert):
    tensors, experts_TK = make_case(function, name, per_expert=per_expert)
    options = {"experts_TK": experts_TK, "function": function}
    for got, want in zip(gradients(ours, tensors, **options), gradients(plain, tensors, **options), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [swish, leaky])
def test_low_precision_is_as_near_as_eager(function, dtype):
    tensors, experts_TK = make_case(function, dtype=dtype)
    options = {"experts_TK": experts_TK, "function": function}
    exact = gradients(plain, [t.detach().double().requires_grad_() for t in tensors], **options)
    got, eager, again = (gradients(run, tensors, **options) for run in (ours, plain, ours))
    for mine, twice, other, want in zip(got, again, eager, exact, strict=True):
        assert torch.equal(mine, twice)
        error, eager_error = ((values.double() - want).norm() / want.norm() for values in (mine, other))
        assert error <= 2 * eager_error + 4 * torch.finfo(dtype).eps


def test_autocast_leaves_parameters_in_fp32():
    tensors, experts_TK = make_case(swish, dtype=torch.float32)
    options = {"experts_TK": experts_TK, "function": swish}
    exact = gradients(plain, [t.detach().double().requires_grad_() for t in tensors], **options)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(ours, tensors, **options)
    assert [g.dtype for g in got[-2:]] == [torch.float32] * 2
    for mine, want in zip(got, exact, strict=True):
        assert (mine.double() - want).norm() <= 0.03 * want.norm()


def test_expert_down_backward_learned_opcheck():
    (x, weights, w_up, w_down, *_), experts_TK = make_case(swish, dtype=torch.float32)
    params_EP = torch.rand(E, 2)
    routed = ops.dispatch(experts_TK, E)
    text = "g * sigmoid(p0 * g) * (u + p1)"
    w_up, w_down = [w_up.view(E, 2, FF, D)], [w_down.transpose(1, 2)]
    up = (x, w_up, [], None, *routed, text, None, None, None, params_EP)
    opcheck(ops.expert_up, detach(up))
    h_NGF, a_NF = ops.expert_up(*detach(up))
    params_EP.requires_grad_()
    opcheck(ops.expert_down, (h_NGF.requires_grad_(), a_NF, w_down, [], weights, *routed, text, None, None, None, params_EP))
    opcheck(ops.expert_down_backward_learned, detach((x, h_NGF, w_down, [], weights, *routed, text, None, None, params_EP)))


def test_compiled_code_does_the_same():
    tensors, experts_TK = make_case(swish, dtype=torch.float32, per_expert=True)
    options = {"experts_TK": experts_TK, "function": swish}
    compiled = torch.compile(ours, fullgraph=True)
    for got, want in zip(gradients(compiled, tensors, **options), gradients(ours, tensors, **options), strict=True):
        torch.testing.assert_close(got, want)


def test_a_module_has_one_parameter():
    layer = moeblaze_ops.MoE(D, FF, E, K, activation=swish, activation_parameters=[1.0, 0.5])
    assert layer.activation == "g * sigmoid(p0 * g) * (u + p1)"
    layer(torch.randn(9, D)).sum().backward()
    assert layer.activation_parameters.grad.shape == (2,) and layer.activation_parameters.grad.all()


def call(**options):
    (x, weights, w_up, w_down, *_), experts_TK = make_case(swish)
    return moe(x, weights, experts_TK, w_up, w_down, **{"activation": "g * p0 * u", **options})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "activation_parameters must hold 1 tensors"),
        ({"activation": "swiglu", "activation_parameters": [torch.ones(())]}, ValueError, "hold 0 tensors"),
        ({"activation_parameters": [torch.ones(FF)]}, ValueError, r"one element or shape \[5\]"),
        ({"activation_parameters": [torch.ones(E, dtype=torch.int32)]}, TypeError, "floating-point"),
        ({"activation_parameters": [1.0]}, TypeError, "tensor"),
        ({"activation": "g * p4 * u", "activation_parameters": [torch.ones(())] * 5}, ValueError, "p4"),
    ],
)
def test_moe_refuses(options, error, words):
    with pytest.raises(error, match=words):
        call(**options)


def test_forward_mode_is_refused():
    (x, weights, w_up, w_down, beta, shift), experts_TK = make_case(swish)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        moe(dual, weights, experts_TK, w_up, w_down, activation=swish, activation_parameters=[beta, shift])


def test_a_function_that_reads_a_tensor_of_its_own_is_told_of_parameters():
    beta = torch.tensor(1.0)
    with pytest.raises(ValueError, match="activation_parameters"):
        call(activation=lambda g, u: F.silu(beta * g) * u)


@pytest.mark.parametrize("is_made", ["outside", "inside"])
def test_guards_of_compiled_code_are_none_of_a_function_and_its_numbers_are(is_made):
    (x, weights, w_up, w_down, *_), experts_TK = make_case(swish)

    def of(factor):
        return lambda g, u: F.relu(g) * u * factor

    def run(x, factor, given):
        x = x + 1 if len(x) > 5 and factor > 1 else x
        return moe(x, weights, experts_TK, w_up, w_down, activation=given if is_made == "outside" else of(factor))

    compiled = torch.compile(run, backend="eager", dynamic=True)
    for factor in (1.5, 2.5, 3.5):
        torch.testing.assert_close(compiled(x, factor, of(factor)), run(x, factor, of(factor)))
