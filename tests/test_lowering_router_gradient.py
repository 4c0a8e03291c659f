"""The router's part of the tokens' gradient, in the code that Inductor generates for a CUDA device; no device is needed."""

import pytest
import torch
import torch.nn.functional as F

import moeblaze_ops
from tests import fakecuda

T, K, E, D, HIDDEN = 32, 2, 4, 64, 128

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")


def layer(x, router, w_up, w_down, logits_of=F.linear, **options):
    weights, experts = moeblaze_ops.route(logits_of(x, router), K)
    return moeblaze_ops.moe(x, weights, experts, w_up, w_down, **options)


def backward_code(function, dtype=torch.bfloat16, shape=(T, D), capability=(9, 0)) -> str:
    """What Inductor generates for the gradients of everything, with tokens of this shape."""
    torch._dynamo.reset()
    inputs = [
        (torch.randn(size) * 0.1).to(dtype).requires_grad_() for size in (shape, (E, D), (E, 2 * HIDDEN, D), (E, D, HIDDEN))
    ]
    sources: list[str] = []
    torch.compile(function, backend=fakecuda.shadow_backend(sources, capability))(*inputs).sum().backward()
    assert len(sources) == 2, "one forward and one backward graph"
    return sources[1]


def products(code: str) -> tuple[int, int]:
    """Calls of ``mm`` and of ``addmm``: the router's own gradient is one of the former."""
    return code.count("extern_kernels.mm("), code.count("extern_kernels.addmm(")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_product_is_part_of_the_sum(dtype):
    code = backward_code(layer, dtype)
    assert products(code) == (1, 0)
    assert fakecuda.launches(code).count("_combine_kernel") == 1


def kept_input(x, router, *weights):
    return layer(x, router, *weights, keep="input")


@pytest.mark.parametrize("limited", [False, True])
def test_routers_product_is_part_of_the_sum_where_the_input_is_kept(limited, monkeypatch):
    if limited:
        monkeypatch.setattr("moeblaze_ops.functional.choose_parts", lambda *args: ("ranges", 1 << 20))
    code = backward_code(kept_input)
    assert products(code) == (1, 0)
    assert fakecuda.launches(code).count("_combine_kernel") == 1


@pytest.mark.parametrize("parts", [("ranges", 110_000), ("chunks", 3 * T)], ids=["ranges", "chunks"])
def test_routers_product_is_added_in_place_to_a_gradient_in_parts(parts, monkeypatch):
    """It follows from the routing weights' gradient, which all parts give together."""
    monkeypatch.setattr("moeblaze_ops.functional.choose_parts", lambda *args: parts)
    code = backward_code(kept_input, shape=(8 * T, D))
    assert products(code) == (1, 0)
    assert code.count("aten.addmm_.default(") == 1


def test_tokens_in_sequences():
    def flat_inside(x, *parameters):
        return layer(x.view(-1, D), *parameters).view(x.shape)

    assert products(backward_code(flat_inside, shape=(2, T // 2, D))) == (1, 0)


def test_router_that_sees_sequences():
    def logits_of(x, router):
        return F.linear(x.view(2, T // 2, D), router).view(-1, E)

    def flat_experts(x, *parameters):
        return layer(x.view(-1, D), *parameters, logits_of=logits_of).view(x.shape)

    assert products(backward_code(flat_experts, shape=(2, T // 2, D))) == (1, 0)


def test_product_comes_before_the_weight_gradients():
    """Were dx computed after them, its rows would need room beside them."""
    kernels = fakecuda.launches(backward_code(layer, capability=(8, 0)))
    assert kernels.index("_combine_kernel") < max(i for i, name in enumerate(kernels) if name == "_expert_weight_grad_kernel")


def two_routers(x, router, *weights):
    return layer(x, router, *weights, logits_of=lambda x, router: F.linear(x, router) + F.linear(2 * x, router))


def on_input(x, router, *weights):
    return layer(x, router, *weights, weight_on="input")


LEFT_ALONE = {
    "the gradient of the weights comes out of the op and leads to the logits": on_input,
    "a sum of two products": two_routers,
}


@pytest.mark.parametrize("function", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_alone(function):
    assert sum(products(backward_code(function))) >= 2


def test_fp32_is_left_alone():
    assert sum(products(backward_code(layer, torch.float32))) == 2


def test_residual_is_added_to_the_sum():
    def residual(x, *parameters):
        return layer(x.relu(), *parameters) + x.relu()

    assert products(backward_code(residual)) == (1, 0)
