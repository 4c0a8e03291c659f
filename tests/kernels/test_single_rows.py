"""One expert a token: what is launched and written, kernels compiled offline, and layers on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="compiles Triton kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table, triton_kernel_wrapper_mutation
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.kernels.configs import shared_memory_bytes
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward
from moeblaze_ops.kernels.routing.dispatch import launch_dispatch
from tests.kernels.test_traceable import symbolic_size
from tests.tools import fakecuda
from tests.tools.offline import compile_launch, recorded_launches

E, D, F = 4, 256, 128
WRITES = {
    "_expert_down_kernel": {"y_ptr"},
    "_unused_tokens_kernel": {"out_ptr"},
    "_expert_up_backward_kernel": {"dx_ptr"},
}


def project(experts, h, a, w_down, weights, dh, w_up, left, right):
    """Calls both launchers, with all that they can add."""
    routing = launch_dispatch(experts, E)
    out = launch_expert_down(h, a, [w_down], [], weights, *routing, "swiglu")
    return out, launch_expert_up_backward(dh, None, [w_up], None, *routing, left, right)[0]


def arguments(num_tokens, dtype=torch.bfloat16):
    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    rows, weights = new(num_tokens, 2, F), new(num_tokens, 1, dtype=torch.float32)
    experts, w_down = new(num_tokens, 1, dtype=torch.int64), new(E, D, F).transpose(1, 2)
    return experts, rows, new(num_tokens, F), w_down, weights, rows, new(E, 2, F, D), new(num_tokens, E), new(E, D)


@pytest.fixture(autouse=True)
def portable_kernels(monkeypatch):
    monkeypatch.setattr(config, "hopper", "off")


def test_kernels_write_results_alone():
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), fakecuda.fake_device():
        num_tokens = symbolic_size(shape_env)
        guards = len(shape_env.guards)
        kernel_side_table.reset_table()
        graph = make_fx(project)(*arguments(num_tokens))
        assert len(shape_env.guards) == guards
        written = {}
        for node in graph.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation):
            values = node.kwargs["kwargs"].items()
            kwargs = {name: value.meta["val"] if isinstance(value, torch.fx.Node) else value for name, value in values}
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            indices = (node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"])
            written[getattr(kernel, "fn", kernel).__name__] = set(get_mutated_tensors(*indices, kwargs, {}))
    assert {name: names for name, names in written.items() if name in WRITES} == WRITES
    assert "_combine_kernel" not in written


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_compile_without_spills(dtype, capability):
    with recorded_launches(capability) as recorded:
        project(*arguments(4096, dtype))
    launches = [launch for launch in recorded if launch.name in WRITES]  # without what sorts
    assert {launch.name for launch in launches} == WRITES.keys()
    for launch in launches:
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes == 0, launch.name
        assert resources.shared_bytes <= shared_memory_bytes(capability), launch.name


@pytest.mark.parametrize(("num_experts", "sums"), [(4, 0), (8, 0), (16, 1)])
def test_compiled_layers_sum_nothing(num_experts, sums):
    """But where more experts than a product of few channels has give a part of dx."""
    torch._dynamo.reset()

    def layer(x, router, w_up, w_down):
        weights, experts = moeblaze_ops.route(x @ router.T, 1)
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down)

    shapes = ((64, D), (num_experts, D), (num_experts, 2 * F, D), (num_experts, D, F))
    inputs = [(torch.randn(shape) * 0.1).to(torch.bfloat16).requires_grad_() for shape in shapes]
    sources: list[str] = []
    torch.compile(layer, backend=fakecuda.shadow_backend(sources, (9, 0)))(*inputs).sum().backward()
    forward, backward = map(fakecuda.launches, sources)
    assert forward.count("_combine_kernel") == 0 and forward.count("_unused_tokens_kernel") == 1
    assert backward.count("_combine_kernel") == sums and backward.count("_unused_tokens_kernel") == 1 - sums


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", ["auto", "off"])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_experts", [4, 16])
def test_layers_on_a_gpu(hopper, unused, compiled, num_experts, monkeypatch):
    """Against fp64 on the CPU, with uninitialised memory full of NaN."""
    monkeypatch.setattr(config, "hopper", hopper)
    torch.manual_seed(0)
    torch._dynamo.reset()
    T = 700
    exact_router = torch.eye(num_experts, D)  # logits are numbers of x: no rounding makes another choice
    w_up, w_down = (torch.randn(shape) * shape[-1] ** -0.5 for shape in ((num_experts, 2 * F, D), (num_experts, D, F)))
    truth = [value.bfloat16().double() for value in (torch.randn(T, D), exact_router, w_up, w_down)]
    dropped = torch.rand(T, 1) < (0.3 if unused else 0.0)

    def layer(dropped, x, router, w_up, w_down):
        weights, experts = moeblaze_ops.route(x @ router.T, 1)
        return moeblaze_ops.moe(x, weights, experts.masked_fill(dropped, -1), w_up, w_down)

    def step(run, dropped, leaves):
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = run(dropped, *leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = step(layer, dropped, [leaf.clone() for leaf in truth])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        run = torch.compile(layer) if compiled else layer
        got = step(run, dropped.cuda(), [leaf.bfloat16().cuda() for leaf in truth])
    finally:
        torch.use_deterministic_algorithms(False)
    for value, exact in zip(got, expected, strict=True):
        assert (value.double().cpu() - exact).norm() <= 2e-2 * exact.norm()
