import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="compiles Triton kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from moeblaze_ops import config
from moeblaze_ops.arguments.traced_activations import trace_activation
from moeblaze_ops.kernels.configs import shared_memory_bytes
from moeblaze_ops.kernels.experts.bias_grad import launch_expert_bias_grad, launch_expert_bias_grad_add
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward, launch_expert_down_backward_learned
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up, launch_expert_up_h8
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_rows, launch_expert_up_backward
from moeblaze_ops.kernels.experts.low_rank_backward import launch_low_rank_backward
from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad, launch_expert_weight_grad_add
from moeblaze_ops.kernels.formulas.named import is_gated, num_parameters
from moeblaze_ops.kernels.routing.dispatch import launch_dispatch
from moeblaze_ops.kernels.routing.router_sums import launch_router_sums, launch_router_sums_backward
from moeblaze_ops.kernels.rows.combine import combine, token_slots
from moeblaze_ops.kernels.rows.row_parts import launch_row_part
from tests.corpus import activations
from tests.tools.offline import compile_launch, recorded_launches, with_wide_sizes

CAPABILITIES = ((8, 0), (9, 0), (10, 0))

# dtype, (T, E, K, D, F), activation, biases, weight on input.
LAYERS = {
    "many_rows": (torch.bfloat16, (32768, 128, 8, 2048, 768), "swiglu", False, False),
    "few_rows": (torch.bfloat16, (64, 128, 4, 2880, 2880), "swiglu_clamped", True, False),
    "middling_rows_weight_on_input": (torch.float16, (1024, 16, 1, 1024, 512), "geglu", True, True),
    "ungated": (torch.bfloat16, (8192, 8, 2, 1024, 4096), "relu2", False, False),
    "fp32": (torch.float32, (8192, 8, 2, 512, 1024), "swiglu", False, False),
    "unaligned_rows": (torch.bfloat16, (8192, 8, 2, 776, 256), "swiglu", False, False),
}


@pytest.fixture(autouse=True)
def portable_kernels(monkeypatch):
    monkeypatch.setattr(config, "hopper", "off")


def routing_of(T, K, E):
    """Slots, offsets, positions and blocks, which nothing has to be launched for: what sorts them is compiled apart."""
    return torch.ops.moeblaze.dispatch(torch.empty(T, K, dtype=torch.int64, device="cuda"), E)


def train(dtype, sizes, activation, bias, weight_on_input):
    """Calls every launcher once, as one training step of a layer would."""
    T, E, K, D, F = sizes
    G = 2 if "glu" in activation else 1

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    x, weights = new(T, D), new(T, K, dtype=torch.float32)
    w_up, w_down = [new(E, G, F, D)], [new(E, D, F).transpose(1, 2)]
    b_up, b_down = ([new(E, G, F)], [new(E, D)]) if bias else ([], [])
    on_input, on_output = (weights, None) if weight_on_input else (None, weights)
    routing = routing_of(T, K, E)
    slots, offsets = routing[:2]
    h, a = launch_expert_up(x, w_up, b_up, on_input, *routing, activation)
    out = launch_expert_down(h, a, w_down, b_down, on_output, *routing, activation)
    dh, _, wa = launch_expert_down_backward(out, h, w_down, b_down, on_output, *routing, activation)
    launch_expert_up_backward(dh, x if weight_on_input else None, w_up, on_input, *routing, new(T, E), new(E, D))
    launch_expert_weight_grad(x, dh, w_up, on_input, slots, offsets, K)
    launch_expert_weight_grad(out, wa.unsqueeze(1), w_down, None, slots, offsets, K)
    sums = torch.float32 if T > 4096 else dtype  # what is stored differs, and not the products
    launch_expert_weight_grad_add(x, dh, [new(E, G, F, D, dtype=sums)], on_input, slots, offsets, K)
    launch_expert_weight_grad_add(out, wa.unsqueeze(1), [new(E, D, F, dtype=sums).mT], None, slots, offsets, K)
    if bias:
        launch_expert_bias_grad(dh.view(T * K, G * F), None, slots, offsets, K, False)
        launch_expert_bias_grad(out, on_output, slots, offsets, K, True)
        launch_expert_bias_grad_add(out, new(E, D, dtype=torch.float32), on_output, slots, offsets, K, True)


def train_low_rank(dtype, sizes, activation, bias, weight_on_input, rank):
    """Calls every launcher that a frozen layer with low-rank additions has in a training step, once."""
    T, E, K, D, F = sizes
    G = 2 if "glu" in activation else 1

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    x, w_up, w_down = new(T, D), [new(E, G, F, D)], [new(E, D, F).transpose(1, 2)]
    up, down = (new(E, rank, D), new(E, G, F, rank)), (new(E, rank, F), new(E, rank, D))
    routing = routing_of(T, K, E)
    u = launch_expert_up(x, [up[0].unsqueeze(1)], [], None, *routing, "identity")[0].squeeze(1)
    h, a = launch_expert_up(x, w_up, [], None, *routing, activation, u, *up)
    v = launch_expert_rows(a.unsqueeze(1), down[0].transpose(1, 2).unsqueeze(1), routing[1], routing[3])
    weights = new(T, K, dtype=torch.float32)
    out = launch_expert_down(h, a, w_down, [], weights, *routing, activation, v, *down)
    dh, _, wa = launch_expert_down_backward(out, h, w_down, [], weights, *routing, activation, v, down[0])
    launch_expert_up_backward(dh, None, w_up, None, *routing, None, None, None, u, up[0])
    launch_expert_weight_grad(x, u.unsqueeze(1), [up[0].unsqueeze(1)], None, *routing[:2], K)
    launch_low_rank_backward(dh, u, up[1], None, *routing)
    launch_low_rank_backward(out, v, down[1].mT, weights, *routing)
    launch_expert_weight_grad(wa, v.unsqueeze(1), [down[0]], None, *routing[:2], 1)


def launches_of(layer, capability, step=train):
    """Those of a step; weight gradients that are added among them for large tiles and for small ones, for each target."""
    with recorded_launches(capability) as launches:
        step(*LAYERS[layer])
    adds = layer in ("many_rows", "few_rows") and capability in CAPABILITIES
    return [launch for launch in launches if adds or not launch.arguments.get("ACCUMULATE")]


def check_resources(layer, capability, on_tensor_cores, step=train, spill_bytes=0):
    for launch in launches_of(layer, capability, step):
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes <= spill_bytes, launch.name
        assert resources.shared_bytes <= shared_memory_bytes(capability), launch.name
        assert resources.tensor_core == (expected_tensor_core(launch, capability) if on_tensor_cores else None), launch.name


# Tiles follow from the number of experts alone: the most of them for each target, and fewer for one.
OF_INTEGERS = [(1, (8, 0)), (8, (9, 0)), (32, (10, 0)), *((128, capability) for capability in CAPABILITIES)]
SORTS = [(32768, *case) for case in OF_INTEGERS]
SORTS += [(16, 8, (8, 0)), (16, 128, (9, 0)), *((16, 1022, capability) for capability in CAPABILITIES)]


@pytest.mark.parametrize(("num_tokens", "num_experts", "capability"), SORTS, ids=str)
def test_dispatch_compiles(num_tokens, num_experts, capability):
    with recorded_launches(capability) as launches:
        launch_dispatch(torch.empty(num_tokens, 8, dtype=torch.int64, device="cuda"), num_experts)
    assert len(launches) == (1 if num_tokens == 16 else 3)
    for launch in launches:
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes == 0 and resources.shared_bytes <= shared_memory_bytes(capability), launch.name


@pytest.mark.parametrize(("num_experts", "capability"), OF_INTEGERS, ids=str)
def test_row_part_compiles(num_experts, capability):
    with recorded_launches(capability) as launches:
        new = [torch.empty(size, dtype=torch.int32, device="cuda") for size in (65536, num_experts + 1)]
        launch_row_part(*new, range(16384, 49152))
    (launch,) = launches
    assert compile_launch(launch, capability).spill_bytes == 0


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_many_slots_compile(capability):
    """Dispatch with a list of used slots, sums over these, a product in parts, and what is added to a router's gradient."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    T, E, D = 4096, 32, 2048
    with recorded_launches(capability) as launches:
        positions = launch_dispatch(new(T, E, dtype=torch.int64), E)[2]
        for weights, product in ((new(T, E), None), (None, (new(T, 3 * E), new(E, D)))):
            slots = token_slots(positions, weights, 4 * T)
            combine(new(4 * T, D), slots, new(T, D), product)
        sums = launch_router_sums(new(T, E), None)
        launch_router_sums_backward(*sums, new(T, E), None, new(T, E))
    names = {launch.name for launch in launches}
    assert {"_count_kernel", "_place_kernel", "_used_first_kernel", "_combine_kernel", "_router_sums_backward_kernel"} <= names
    for launch in launches:
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes == 0, launch.name
        assert resources.shared_bytes <= shared_memory_bytes(capability), launch.name


LEARNED = {
    "learned slope": "g * sigmoid(p0 * g) * u",
    "learned xielu": "where(h > 0.0, h * h * p0 + h * 0.5, (expm1(clamp(h, None, -1e-06)) - h) * p1 + h * 0.5)",
    "dropped": "g * sigmoid(g) * u * where(draw(p0, n, f) >= 0.1, 1.1111111111111112, 0.0)",
}
# Each target with two formulas, and the one that takes most registers with all.
FUSED = [
    ("mish_glu", (8, 0)),
    ("swiglu_other_limits", (9, 0)),
    ("learned slope", (10, 0)),
    ("dropped", (8, 0)),
    ("dropped", (9, 0)),
    *(("learned xielu", capability) for capability in CAPABILITIES),
]


def name_of(case):
    return case if isinstance(case, str) else f"sm_{case[0]}{case[1]}"


@pytest.mark.parametrize(("name", "capability"), FUSED, ids=name_of)
def test_formulas_compile_without_spills(name, capability):
    """Next to none: what a few values cost outside the loops cannot be measured."""
    activation = LEARNED.get(name) or trace_activation(activations.ALL[name])
    dtype, (T, E, K, D, F), *_ = LAYERS["many_rows"]
    G = 2 if is_gated(activation) else 1

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    with recorded_launches(capability) as launches:
        x, routing = new(T, D), routing_of(T, K, E)
        learned = [new(E, num_parameters(activation), dtype=torch.float32)] if name in LEARNED else []
        h, _ = launch_expert_up(x, [new(E, G, F, D)], [], None, *routing, activation, *[None] * 3, *learned)
        weights = new(T, K, dtype=torch.float32)
        launch = launch_expert_down_backward_learned if learned else launch_expert_down_backward
        launch(x, h, [new(E, D, F).transpose(1, 2)], [], weights, *routing, activation, None, None, *learned)
    expert_launches = [launch for launch in launches if "_expert_" in launch.name]
    assert len(expert_launches) == 2 + len(learned)
    for launch in expert_launches:
        assert compile_launch(launch, capability).spill_bytes <= (80 if learned else 32), launch.name


# Each kernel for every target, with large tiles and with small ones and biases; each other layer for the target with the least
# shared memory or registers for it.
TARGETS = [
    *(("many_rows", capability) for capability in CAPABILITIES),
    *(("few_rows", capability) for capability in CAPABILITIES),
    ("many_rows", (8, 9)),
    ("many_rows", (12, 0)),
    ("middling_rows_weight_on_input", (9, 0)),
    ("ungated", (8, 0)),
    ("fp32", (8, 0)),
    ("fp32", (10, 0)),
]


@pytest.mark.parametrize(("layer", "capability"), TARGETS, ids=name_of)
def test_kernels_compile_without_spills(layer, capability):
    check_resources(layer, capability, on_tensor_cores=LAYERS[layer][0] != torch.float32)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)], ids=name_of)
def test_rows_of_other_widths_than_multiples_of_16_fit(capability):
    """One operand of two may take all stages then, and registers may spill: such rows are read number by number."""
    for launch in launches_of("unaligned_rows", capability):
        assert compile_launch(launch, capability).shared_bytes <= shared_memory_bytes(capability), launch.name


def keep_eight_bits(dtype, sizes, activation, bias, weight_on_input):
    """The launchers that write and read h in 8 bits."""
    T, E, K, D, F = sizes
    G = 2 if "glu" in activation else 1

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    x, weights, routing = new(T, D), new(T, K, dtype=torch.float32), routing_of(T, K, E)
    _, _, h8 = launch_expert_up_h8(x, [new(E, G, F, D)], [], None, *routing, activation)
    launch_expert_down_backward(x, h8, [new(E, D, F).transpose(1, 2)], [], weights, *routing, activation)


EIGHT_BITS = [("many_rows", (8, 0)), ("many_rows", (9, 0)), ("few_rows", (10, 0)), ("ungated", (8, 0)), ("fp32", (9, 0))]


@pytest.mark.parametrize(("layer", "capability"), EIGHT_BITS, ids=name_of)
def test_kernels_of_eight_bits_compile_without_spills(layer, capability):
    """Next to none, outside the loops."""
    on_tensor_cores = LAYERS[layer][0] != torch.float32
    check_resources(layer, capability, on_tensor_cores, keep_eight_bits, spill_bytes=32)


# A small rank and a large one with each size of tiles and for each target.
LOW_RANK = [
    ("many_rows", (8, 0), 256),
    ("many_rows", (9, 0), 16),
    ("many_rows", (10, 0), 256),
    ("few_rows", (8, 0), 24),
    ("few_rows", (9, 0), 256),
    ("few_rows", (10, 0), 16),
    ("fp32", (8, 0), 256),
]


@pytest.mark.parametrize(("layer", "capability", "rank"), LOW_RANK, ids=str)
def test_low_rank_kernels_compile_without_spills(layer, capability, rank):
    step = partial(train_low_rank, rank=rank)
    check_resources(layer, capability, on_tensor_cores=LAYERS[layer][0] != torch.float32, step=step)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=name_of)
def test_tf32_kernels_compile_without_spills(capability):
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_resources("fp32", capability, on_tensor_cores=True)
    finally:
        torch.set_float32_matmul_precision(precision)


def expected_tensor_core(launch, capability):
    """The instruction that a GEMM should multiply with: the asynchronous ones take 64 rows or more."""
    if launch.arguments.keys() >= {"BLOCK_M", "BLOCK_K"}:
        rows = launch.arguments["BLOCK_M"]
    elif launch.name == "_low_rank_backward_kernel":
        rows = launch.arguments["BLOCK_K"]
    elif launch.arguments.get("left_ptr") is not None and not launch.arguments["FEW_CHANNELS"]:
        rows = launch.arguments["BLOCK_T"]
    else:
        return None
    return {9: "wgmma", 10: "tcgen05"}.get(capability[0], "mma") if rows >= 64 else "mma"


def specialised(parameter, value):
    """What of an argument is compiled for: a constant's value; of another number whether it is 1, or a multiple of 16."""
    return value if parameter.is_constexpr or value is None else (value == 1, value % 16 == 0)


@pytest.mark.parametrize("layer", ["few_rows", "fp32"])
def test_sizes_known_only_when_run_compile(layer):
    """Tokens from other ranks come in a number that a compiler takes for one of 64 bits."""
    dtype, (T, *sizes), *rest = LAYERS[layer]
    with recorded_launches((9, 0)) as launches:
        train(dtype, (T, *sizes), *rest)
    with recorded_launches((9, 0)) as others:
        train(dtype, (2 * T, *sizes), *rest)
    for launch, other in zip(launches, others, strict=True):
        assert compile_launch(with_wide_sizes(launch, other), (9, 0)).spill_bytes == 0, launch.name


def test_tokens_do_not_change_what_is_compiled():
    """The most tokens take the rows of a projection in ranges of columns, with the same kernels."""

    def compiled(T):
        with recorded_launches((9, 0)) as launches:
            dtype, (_, *sizes), *rest = LAYERS["many_rows"]
            train(dtype, (T, *sizes), *rest)
        kernels = []
        for launch in launches:
            plain = {
                parameter.name: specialised(parameter, launch.arguments[parameter.name])
                for parameter in launch.kernel.params
                if not parameter.do_not_specialize and not isinstance(launch.arguments[parameter.name], torch.Tensor)
            }
            kernel = (launch.name, plain, launch.options)
            if kernel not in kernels:
                kernels.append(kernel)
        return len(launches), kernels

    (few, kernels), (odd, odd_kernels), (many, many_kernels) = compiled(16384), compiled(16387), compiled(50000)
    assert few < odd < many
    assert kernels == odd_kernels == many_kernels
