import os

import pytest
import torch

pytest.importorskip("triton", reason="compiles Triton kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.triton_kernel_wrap import (
    get_mutated_tensors,
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from moeblaze_ops.kernels.configs import choose_route, choose_route_backward
from moeblaze_ops.kernels.routing.dispatch import launch_expert_counts
from moeblaze_ops.kernels.routing.route import launch_route, launch_route_at, launch_route_backward
from moeblaze_ops.kernels.routing.router_sums import launch_router_sums, launch_router_sums_backward
from moeblaze_ops.ops.route import route
from tests.corpus.router_cases import Router
from tests.tools.fakecuda import fake_device, launches, shadow_backend
from tests.tools.offline import compile_launch, recorded_launches

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
MODELS = {
    "few_experts": (torch.bfloat16, Router(7, 2)),
    "mixtral": (torch.bfloat16, Router(8, 2, renormalize=True)),
    "qwen": (torch.float32, Router(128, 8, renormalize=True)),
    "gpt_oss": (torch.bfloat16, Router(128, 4, "softmax_topk")),
    "deepseek_v2": (torch.float32, Router(160, 6, scale=16.0, num_groups=8, top_groups=3)),
    "deepseek_v3": (torch.float32, Router(256, 8, "sigmoid", True, 2.5, num_groups=8, top_groups=4, biased=True)),
    "largest": (torch.float32, Router(4096, 32, "sigmoid", True, 2.5, num_groups=8, top_groups=4, biased=True)),
    "largest_softmax": (torch.float32, Router(4096, 32)),
}
OF_ALL_TARGETS = ("deepseek_v3", "largest")
WRITES = {
    "_route_kernel": {"weights_ptr", "experts_ptr"},
    "_route_backward_kernel": {"dlogits_ptr"},
    "_route_at_kernel": {"weights_ptr"},
}


def train(router, logits_TE, bias_E):
    """Calls each launcher once."""
    weights_TK, experts_TK = launch_route(*router.arguments(logits_TE, bias_E))
    backward = (weights_TK, logits_TE, weights_TK, experts_TK, router.scoring, router.renormalize, router.scale)
    at_TK = launch_route_at(logits_TE, experts_TK, router.scoring, router.renormalize, router.scale)
    return weights_TK, experts_TK, launch_route_backward(*backward), at_TK


# No tile follows from the target: each router for one, and those of the largest tiles, of a warp and of several, for all.
TARGETS = [(model, CAPABILITIES[number % 3]) for number, model in enumerate(MODELS) if model not in OF_ALL_TARGETS]
TARGETS += [(model, capability) for model in OF_ALL_TARGETS for capability in CAPABILITIES]


@pytest.mark.parametrize(("model", "capability"), TARGETS, ids=str)
def test_kernels_compile_without_spills(model, capability):
    dtype, router = MODELS[model]
    with recorded_launches(capability) as recorded:
        logits_TE = torch.empty(32768, router.num_experts, dtype=dtype, device="cuda")
        train(router, logits_TE, torch.empty(router.num_experts, device="cuda") if router.biased else None)
    for launch in recorded:
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes == 0, launch.name
        assert resources.shared_bytes <= 48 << 10, launch.name


@pytest.mark.parametrize(
    ("E", "capability"), [(7, (8, 0)), (128, (10, 0)), *((4096, capability) for capability in CAPABILITIES)], ids=str
)
def test_sums_compile_without_spills(E, capability):
    with recorded_launches(capability) as recorded:
        logits_TE = torch.empty(32768, E, dtype=torch.bfloat16, device="cuda")
        kept_T = torch.empty(32768, dtype=torch.bool, device="cuda")
        sums_E, squares = launch_router_sums(logits_TE, kept_T)
        launch_router_sums_backward(sums_E, squares, logits_TE, None)
        launch_expert_counts(torch.empty(32768, 8, dtype=torch.int64, device="cuda"), E)
    assert len(recorded) == 4
    for launch in recorded:
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes == 0, launch.name
        assert resources.shared_bytes <= 48 << 10, launch.name


def test_launchers_trace_for_any_number_of_tokens():
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), fake_device():
        symbol = shape_env.create_symbol(96, ConstantSource("T"), dynamic_dim=DimDynamic.DYNAMIC)
        num_tokens = shape_env.create_symintnode(symbol, hint=96, source=ConstantSource("T"))
        guards_before = len(shape_env.guards)
        kernel_side_table.reset_table()
        router = MODELS["deepseek_v3"][1]
        graph = make_fx(lambda logits_TE, bias_E: train(router, logits_TE, bias_E))(
            torch.empty(num_tokens, router.num_experts, device="cuda"), torch.empty(router.num_experts, device="cuda")
        )
        assert len(shape_env.guards) == guards_before
        written = {}
        for node in graph.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation):
            kwargs = {
                name: value.meta["val"] if isinstance(value, torch.fx.Node) else value
                for name, value in node.kwargs["kwargs"].items()
            }
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            indices = (node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"])
            written[getattr(kernel, "fn", kernel).__name__] = set(get_mutated_tensors(*indices, kwargs, {}))
    assert written == WRITES


@pytest.mark.parametrize("columns", [2**power for power in range(14)])
def test_tiles_hold_16_keys_a_thread_or_fewer_except_at_1024_columns(columns):
    tile = choose_route(columns)
    keys = tile.rows * columns // (32 * tile.num_warps)
    assert keys <= (32 if columns == 1024 else 16)
    assert tile.num_warps <= 16 and choose_route_backward(columns).rows >= 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_launches_the_kernels(dynamic):
    torch.manual_seed(0)
    torch._dynamo.reset()
    sources = []
    bias_E = torch.randn(32)

    def run(logits_TE):
        options = {"scoring": "sigmoid", "renormalize": True, "scale": 2.5, "num_groups": 8, "top_groups": 4}
        return route(logits_TE, 4, bias=bias_E, **options)[0]

    logits_TE = torch.randn(19, 32, requires_grad=True)
    torch.compile(run, backend=shadow_backend(sources), dynamic=dynamic)(logits_TE).sum().backward()
    assert [launches(source) for source in sources] == [["_route_kernel"], ["_route_backward_kernel"]]
    assert not any("torch.ops.moeblaze." in source for source in sources)
