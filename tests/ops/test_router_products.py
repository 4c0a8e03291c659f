"""The products of a router of few experts: the ops, and where compiled code for a CUDA device has them."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import moeblaze_ops
from moeblaze_ops.ops.router_products import router_logits, router_weight_grad
from tests.tools import fakecuda

T, D, HIDDEN = 32, 64, 128
SIZES = {
    "few": (37, 24, 4),
    "one_expert": (5, 8, 1),
    "many_experts": (130, 16, 16),
    "one_token": (1, 8, 3),
    "no_tokens": (0, 8, 3),
}


def make_operands(sizes, dtype=torch.float64):
    torch.manual_seed(0)
    T, D, E = sizes
    return torch.randn(T, D, dtype=dtype), torch.randn(E, D, dtype=dtype), torch.randn(T, E, dtype=dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(sizes):
    x, w, dlogits = make_operands(sizes)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    logits, expected = router_logits(x, w), F.linear(x, w)
    torch.testing.assert_close(logits, expected)
    gradients = [torch.autograd.grad(out, leaves, dlogits) for out in (logits, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_of_many_experts_may_be_wide(monkeypatch, batch_invariant):
    monkeypatch.setattr(moeblaze_ops.config, "batch_invariant", batch_invariant)
    x, w, dlogits = (operand.bfloat16() for operand in make_operands((37, 24, 40)))
    leaves = [x.requires_grad_(), w.requires_grad_()]
    logits, expected = router_logits(x, w, True), F.linear(x.float(), w.float())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, dlogits.float()) for out in (logits, expected)))
    opcheck(router_logits, (x, w, True))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_opcheck(sizes):
    x, w, dlogits = make_operands(sizes)
    opcheck(router_logits, (x.requires_grad_(), w.requires_grad_()))
    opcheck(router_logits, (x.detach().T.contiguous().T, w.detach().T.contiguous().T))
    opcheck(router_weight_grad, (dlogits, x.detach()))


REJECTED = {
    "x_TD must have 2 dimensions": (router_logits, (2, 3, 8), (4, 8)),
    r"w_ED must have shape \[E, 8\] with 1 expert or more, got shape \[0, 8\]": (router_logits, (3, 8), (0, 8)),
    r"w_ED must have shape \[E, 8\] with 1 expert or more, got shape \[4, 9\]": (router_logits, (3, 8), (4, 9)),
    r"dlogits_TE must have shape \[3, E\] with 1 to 16 experts, got shape \[3, 17\]": (router_weight_grad, (3, 17), (3, 8)),
    r"dlogits_TE must have shape \[3, E\] with 1 to 16 experts, got shape \[4, 2\]": (router_weight_grad, (4, 2), (3, 8)),
    r"dlogits_TE must have shape \[3, E\] with 1 to 16 experts, got shape \[3\]": (router_weight_grad, (3,), (3, 8)),
}


@pytest.mark.parametrize("message", REJECTED)
def test_bad_shapes_are_rejected(message):
    op, *shapes = REJECTED[message]
    with pytest.raises(ValueError, match=message):
        op(*(torch.randn(shape) for shape in shapes))


def test_bad_dtypes_are_rejected():
    with pytest.raises(TypeError, match="w_ED must have the activations' dtype torch.float32, got torch.float64"):
        router_logits(torch.randn(3, 8), torch.randn(4, 8).double())
    with pytest.raises(TypeError, match="x_TD must be bfloat16, float16, float32"):
        router_weight_grad(torch.ones(3, 4, dtype=torch.int32), torch.ones(3, 8, dtype=torch.int32))


def layer(x, router, w_up, w_down, logits_of=F.linear, route=moeblaze_ops.route):
    weights, experts = route(logits_of(x, router), 1)
    return moeblaze_ops.moe(x, weights, experts, w_up, w_down)


def kernels(function, num_experts=4, dtype=torch.bfloat16, dynamic=None) -> tuple[list[str], list[str]]:
    """What is launched forward and backward for a router of this size."""
    torch._dynamo.reset()
    shapes = (T, D), (num_experts, D), (num_experts, 2 * HIDDEN, D), (num_experts, D, HIDDEN)
    inputs = [(torch.randn(shape) * 0.1).to(dtype).requires_grad_() for shape in shapes]
    sources: list[str] = []
    torch.compile(function, backend=fakecuda.shadow_backend(sources, (9, 0)), dynamic=dynamic)(*inputs).sum().backward()
    forward, backward = map(fakecuda.launches, sources)
    return forward, backward


def number_of(launched: tuple[list[str], list[str]]) -> tuple[int, int]:
    forward, backward = launched
    return forward.count("_router_logits_kernel"), backward.count("_router_weight_grad_kernel")


def in_sequences(x, *parameters):
    def logits_of(x, router):
        return F.linear(x.view(2, T // 2, D), router).view(-1, router.shape[0])

    return layer(x, *parameters, logits_of=logits_of)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_experts", [1, 4, 7, 12])
def test_few_experts_have_kernels_of_their_own(num_experts, dtype):
    assert number_of(kernels(layer, num_experts, dtype)) == (1, 1)


@pytest.mark.parametrize("function", [in_sequences, layer], ids=["sequences", "dynamic"])
def test_so_they_have_in_other_shapes(function):
    assert number_of(kernels(function, dynamic=function is layer)) == (1, 1)


ON_THE_WAY = {
    "shift": lambda x, router: F.linear(x, router) + torch.arange(router.shape[0]).to(x.dtype),
    "scale": lambda x, router: F.linear(x, router) * 0.5,
    "temperature and cast": lambda x, router: (F.linear(x, router) / 0.7).float(),
}


@pytest.mark.parametrize("logits_of", ON_THE_WAY.values(), ids=ON_THE_WAY)
def test_logits_may_be_shifted_and_scaled(logits_of):
    assert number_of(kernels(lambda *inputs: layer(*inputs, logits_of=logits_of))) == (1, 1)


@pytest.mark.parametrize("num_experts", [8, 16, 20])
def test_a_number_of_experts_that_suits_the_library_is_left_alone(num_experts):
    assert number_of(kernels(layer, num_experts)) == (0, 0)


def unfused(logits, top_k):
    weights, experts = logits.softmax(-1).topk(top_k)
    return weights, experts


def not_a_router(x, router, *weights):
    """The product goes to the output, too far from ``route``."""
    logits = F.linear(x, router)
    return layer(x, router, *weights, logits_of=lambda x, router: logits.sin()) + logits.sum()


def test_another_product_is_left_alone():
    assert number_of(kernels(lambda *inputs: layer(*inputs, route=unfused))) == (0, 0)


def test_logits_that_are_computed_on_are_left_alone():
    """Their gradient is a sum of which a router's is a part, as it is with a loss."""
    assert number_of(kernels(not_a_router)) == (0, 1)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, torch.bfloat16), (20, torch.float32)])
def test_no_product_of_tokens_is_the_library_s_with_the_switch(monkeypatch, num_experts, dtype):
    """Neither the logits nor the gradient of the tokens, which is no part of another sum where a token has one expert."""
    monkeypatch.setattr(moeblaze_ops.config, "batch_invariant", True)
    assert [launched.count("_router_logits_kernel") for launched in kernels(layer, num_experts, dtype)] == [1, 1]


def test_fp32_is_left_alone():
    assert number_of(kernels(layer, dtype=torch.float32)) == (0, 0)
