"""The router's part of the tokens' gradient, in the code that Inductor generates for a CUDA device; no device is needed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import moeblaze_ops
from moeblaze_ops.lowering.inductor.router_gradient import add_router_gradient
from tests.tools import fakecuda

T, K, E, D, HIDDEN = 32, 2, 8, 64, 128


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


def test_routers_product_is_part_of_the_sum():
    code = backward_code(layer, torch.float16)
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
    monkeypatch.setenv("CI", "1")  # Inductor is stricter there
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


class InParts(torch.autograd.Function):
    """A product whose gradient for x is that of two parts of the logits' gradient, side by side, with one weight or with two."""

    @staticmethod
    def forward(ctx, x, router, same):
        ctx.save_for_backward(x, router)
        ctx.same = same
        return x @ router.mT

    @staticmethod
    def backward(ctx, dlogits):
        x, router = ctx.saved_tensors
        other = router if ctx.same else 2 * router
        parts = torch.cat([dlogits.relu(), -(-dlogits).relu()], 1)
        return parts @ torch.cat([router, other]), dlogits.mT @ x, None


@pytest.mark.parametrize("same", [True, False])
def test_parts_side_by_side_share_the_weight(same):
    def logits_of(x, router):
        return InParts.apply(x, router, same)

    code = backward_code(lambda x, router, *weights: layer(x, router, *weights, logits_of=logits_of))
    assert products(code) == (1, 0)
    assert ("'PARTS': 2" in code) == same and ("'PARTS': 1" in code) == (not same)


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


class Fork(torch.autograd.Function):
    """Two of a tensor, whose gradients are added by a function."""

    @staticmethod
    def forward(ctx, x, add):
        ctx.add = add
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx, of_experts, of_router):
        return ctx.add(of_experts, of_router), None


def forked(add: Callable) -> Callable:
    def function(x, router, *weights):
        of_experts, of_router = Fork.apply(x, add)
        return layer(of_experts, router, *weights, logits_of=lambda x, router: F.linear(of_router, router))

    return function


def two_layers(x, router, *weights):
    return layer(layer(x, router, *weights), router, *weights)


def transposed_router(x, router, *weights):
    return layer(x, router.t().contiguous(), *weights, logits_of=torch.matmul)


def tokens_used_otherwise(x, *parameters):
    return layer(x, *parameters) * x.tanh()


def tokens_in_sequences(x, *parameters):
    return layer(x.view(2, T // 2, D).view(-1, D), *parameters)


def wide_router(x, router, *weights):
    return layer(x, router, *weights, logits_of=lambda x, router: F.linear(x.float(), router.float()))


# The functions, and how many sums become a part of the op.
NUMBERS = {
    "two layers": (two_layers, 2),
    "tokens that something else uses": (tokens_used_otherwise, None),
    "transposed router": (transposed_router, 1),
    "tokens in sequences": (tokens_in_sequences, 1),
    "two routers": (two_routers, None),
    "a router in fp32": (wide_router, 0),
    "weights on the input": (on_input, 0),
    "a sum": (forked(torch.add), 1),
    "a sum of views": (forked(lambda a, b: (a.view(2, -1, D) + b.view(2, -1, D)).view(-1, D)), 1),
    "a multiple": (forked(lambda a, b: torch.add(a, b, alpha=3)), 0),
    "a multiple of the experts' part": (forked(lambda a, b: torch.add(b, a, alpha=3)), 0),
    "a broadcast product": (forked(lambda a, b: (a.view(-1, 1, D) + b).sum(1)), 0),
    "a broadcast gradient": (forked(lambda a, b: (a + b.view(-1, 1, D)).sum(1)), 0),
    "an experts' part that is used twice": (forked(lambda a, b: (a + b) * a), 0),
    "a product that is used twice": (forked(lambda a, b: (a + b) * b), 0),
    "a difference": (forked(torch.sub), 0),
    "another order of rows": (forked(lambda a, b: a + b.flip(0)), 0),
    "another type": (forked(lambda a, b: (a.float() + b.float()).to(a.dtype)), 0),
}


def check_backward(counts: list[int]) -> Callable:
    """A backend that runs each backward graph with and without the router's gradient in the op."""

    def compile_backward(gm: fx.GraphModule, inputs: list) -> Callable:
        changed = fakecuda._for_cuda(gm)
        sums = [node for node in changed.graph.nodes if node.target is torch.ops.aten.add.Tensor]
        counts.append(sum(map(add_router_gradient, sums)))
        for node in changed.graph.nodes:
            node.kwargs = {**node.kwargs, **({"device": torch.device("cpu")} if "device" in node.kwargs else {})}
        changed.graph.lint()
        changed.recompile()

        def run(*args):
            expected, actual = gm(*args), changed(*args)
            for a, b in zip(actual, expected, strict=True):
                if b is not None and not isinstance(b, int):
                    torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-7 * b.abs().max().item())
            return actual

        return run

    return aot_autograd(fw_compiler=lambda gm, inputs: gm, bw_compiler=compile_backward)


SYMBOLIC = ("two layers", "a sum of views", "a broadcast product")


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in NUMBERS), *((name, True) for name in SYMBOLIC)])
def test_numbers(name, dynamic):
    torch.manual_seed(0)
    torch._dynamo.reset()
    function, expected = NUMBERS[name]
    sizes = ((T, D), (E, D), (E, 2 * HIDDEN, D), (E, D, HIDDEN))
    inputs = [torch.randn(size).to(torch.bfloat16).requires_grad_() for size in sizes]
    inputs[0] = (inputs[0].detach() * 3).requires_grad_()
    counts: list[int] = []
    out = torch.compile(function, backend=check_backward(counts), dynamic=dynamic)(*inputs)
    out.backward(torch.randn_like(out))
    assert expected is None or counts == [expected]
