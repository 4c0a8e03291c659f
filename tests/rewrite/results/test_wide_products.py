"""Routers in fp32 over tokens in bf16, in a graph of forward and backward for a CUDA device; no device is needed."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import moeblaze_ops
from moeblaze_ops.lowering.inductor.wide_products import narrow_router_product
from tests.tools import fakecuda

T, D, E, K = 2000, 48, 8, 2
aten = torch.ops.aten
SHAPES = ((T, D), (E, D), (T, K))
OPTIONS = ("softmax", True, 1.0)
CAST = torch.ops.prims.convert_element_type.default


def step(x, router, dweights):
    """Logits, and the gradients of x and the router; both come in any dtype and are used in fp32."""
    wide_x, wide_router = (t if t.dtype == torch.float32 else CAST(t, torch.float32) for t in (x, router))
    logits = aten.mm.default(wide_x, aten.permute.default(wide_router, [1, 0]))
    scores, ids = torch.ops.moeblaze.route.default(logits, None, K, *OPTIONS, 1, 1)
    dlogits = torch.ops.moeblaze.route_backward.default(dweights, logits, scores, ids, *OPTIONS)
    dx = aten.mm.default(dlogits, wide_router)
    drouter = aten.mm.default(aten.permute.default(dlogits, [1, 0]), wide_x)
    return logits, dx if x.dtype == torch.float32 else CAST(dx, x.dtype), drouter


class _OnCpu(fx.Interpreter):
    """Products with a result in another dtype, which CPUs lack."""

    def call_function(self, target, args, kwargs):
        if target == aten.mm.dtype:
            return (args[0].double() @ args[1].double()).to(args[2])
        if target == aten.mm.default:
            return (args[0].double() @ args[1].double()).to(args[0].dtype)
        return super().call_function(target, args, kwargs)


def rewritten(*dtypes):
    fakecuda.require_fake_cuda()
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in zip(SHAPES, dtypes, strict=True)]
        gm = make_fx(step, tracing_mode="real")(*inputs)
        replaced = [narrow_router_product(node) for node in list(gm.graph.nodes) if node.target == aten.mm.default]
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    return gm, replaced


def inputs(*dtypes):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def errors(gm, arguments):
    """Of logits and gradients, relative to their norms, against fp64 of the same numbers."""
    got = _OnCpu(gm).run(*arguments)
    x, router = (t.double() for t in arguments[:2])
    logits = x @ router.mT
    dlogits = _dlogits(logits.float(), arguments[2]).double()
    wanted = logits, dlogits @ router, dlogits.mT @ x
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, wanted, strict=True)]


def _dlogits(logits, dweights):
    scores, ids = torch.ops.moeblaze.route.default(logits, None, K, *OPTIONS, 1, 1)
    return torch.ops.moeblaze.route_backward.default(dweights, logits, scores, ids, *OPTIONS)


def test_products_of_narrow_numbers_are_exact_on_tensor_cores():
    dtypes = torch.bfloat16, torch.bfloat16, torch.float32
    gm, replaced = rewritten(*dtypes)
    assert replaced == [True, True, True]
    products = [node for node in gm.graph.nodes if node.target in (aten.mm.default, aten.mm.dtype)]
    assert all(a.meta["val"].dtype == torch.bfloat16 for node in products for a in node.all_input_nodes)
    cats = [node for node in gm.graph.nodes if node.target == aten.cat.default]
    assert [len(set(cat.args[0])) for cat in cats] == [3, 1], "the parts of dlogits, once, and the router for two of them"
    assert len(cats[1].args[0]) == 2
    of_logits, of_x, of_router = errors(gm, inputs(*dtypes))
    assert of_logits < 1e-7 and of_router < 1e-6, "fp32, and not bf16"
    assert of_x < 3e-3, "rounded to bf16 once"


def test_gradient_of_fp32_tokens_is_as_exact():
    """dx in fp32 shows the three parts of dlogits."""
    dtypes = torch.float32, torch.bfloat16, torch.float32
    gm, replaced = rewritten(*dtypes)
    assert replaced == [False, True, False], "x has no parts: they would be as large"
    assert errors(gm, inputs(*dtypes))[1] < 1e-6


def test_weight_in_fp32_has_parts():
    dtypes = torch.bfloat16, torch.float32, torch.float32
    gm, replaced = rewritten(*dtypes)
    assert replaced == [True, False, True]
    of_logits, _, of_router = errors(gm, inputs(*dtypes))
    assert of_logits < 1e-6 and of_router < 1e-6


def test_products_in_fp32_of_fp32_stay():
    assert rewritten(torch.float32, torch.float32, torch.float32)[1] == [False] * 3


def layer(x, router, w_up, w_down):
    weights, experts = moeblaze_ops.route(F.linear(x.float(), router.float()), K)
    return moeblaze_ops.moe(x, weights, experts, w_up, w_down)


def products_elsewhere(x, router, w_up, w_down):
    """Not a router's: left to the library."""
    return F.linear(x.float(), router.float())


@pytest.mark.parametrize(("function", "narrow"), [(layer, True), (products_elsewhere, False)])
def test_compiled(function, narrow):
    fakecuda.require_fake_cuda()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = (T, D), (E, D), (E, 2 * D, D), (E, D, D)
        arguments = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    code = fakecuda.generated_code(function, tuple(arguments))
    assert ("mm_dtype" in code) == narrow
