"""What memory_estimate predicts against what is allocated, and what keep="auto" makes of it.

The step on a GPU is measured without one: the launchers run on CPU tensors, allocate all that they allocate, and launch
nothing; the profiler counts.
"""

import importlib
import json
import logging
import types
from pathlib import Path

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.kernels.configs import choose_column_ranges
from moeblaze_ops.memory import estimate as memory
from moeblaze_ops.memory import row_ranges
from moeblaze_ops.memory.estimate import LayerSizes, memory_estimate
from moeblaze_ops.memory.row_ranges import range_sizes
from moeblaze_ops.memory.token_chunks import transient_bytes
from moeblaze_ops.ops.recomputed import expert_mlp_ranged, ranged_backward

LAUNCHERS = {
    "dispatch": "routing.dispatch",
    "expert_up": "experts.expert_up",
    "expert_up_h8": "experts.expert_up",
    "expert_up_backward": "experts.expert_up_backward",
    "expert_down": "experts.expert_down",
    "expert_down_backward": "experts.expert_down_backward",
    "expert_mlp": "experts.expert_mlp",
    "expert_mlp_backward": "experts.expert_mlp",
    "expert_weight_grad": "experts.weight_grad",
    "expert_weight_grad_add": "experts.weight_grad",
    "expert_bias_grad": "experts.bias_grad",
    "expert_bias_grad_add": "experts.bias_grad",
}
RANGED_LAUNCHERS = {
    "expert_mlp_ranged": expert_mlp_ranged.forward_launcher,
    "expert_mlp_ranged_backward": expert_mlp_ranged.backward_launcher,
}

# T, D, F, E, K: proportions of layers in use, small.
SHAPES = {
    "fine": (2048, 128, 48, 32, 8),
    "coarse": (1024, 256, 896, 8, 2),
    "few_experts": (4096, 32, 128, 4, 1),
    "weights_dominate": (64, 256, 256, 16, 2),
    "wide": (2048, 2304, 64, 4, 4),
}

# Layers of full size, and the most that a step with keep="input" may take, in MiB.
FULL_SIZE = {
    "fine": ((32768, 2048, 768, 128, 8), 2400),
    "finest": ((24576, 1536, 256, 128, 8), 800),
    "mid": ((32768, 2048, 1024, 64, 8), 2250),
    "wide": ((32768, 4096, 1024, 128, 8), 4630),
    "coarse": ((16384, 4096, 14336, 8, 2), 4750),
}


@pytest.fixture
def launchers_on_cpu(monkeypatch):
    """Let the CPU run what a GPU would, but for the kernels themselves."""
    pytest.importorskip("triton", reason="the launchers import Triton")
    monkeypatch.setattr(config, "hopper", "off")
    rows = "rows.add_rows", "rows.combine", "rows.single_rows"
    others = *rows, "experts.bias_dots", "routing.few_slots", "routing.range_routing"
    for file in {*LAUNCHERS.values(), *others} - {"experts.expert_mlp"}:
        module = importlib.import_module(f"moeblaze_ops.kernels.{file}")
        monkeypatch.setattr(module, "launch", lambda *args, **keywords: None)
    with torch.library._scoped_library("moeblaze", "IMPL") as library:
        for name, file in LAUNCHERS.items():
            launcher = getattr(importlib.import_module(f"moeblaze_ops.kernels.{file}"), f"launch_{name}")
            if name == "dispatch":  # whether ids are checked is no matter of the kernel
                launcher = lambda experts_TK, num_experts, check_ids=False, launch=launcher: launch(experts_TK, num_experts)  # noqa: E731
            library.impl(name, launcher, "CPU", allow_override=True)
        for name, launcher in RANGED_LAUNCHERS.items():
            library.impl(name, launcher(), "CPU", allow_override=True)
        yield


def allocated(run):
    """Bytes that ``run`` leaves allocated, and the most allocated at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return result, now, peak


def make_step(shape, keep, activation, router, dtype):
    T, D, F, E, K = SHAPES[shape]
    torch.manual_seed(0)
    module = moeblaze_ops.MoE(D, F, E, K, activation=activation, bias=True, keep=keep).to(dtype)
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    if router:
        return lambda: module(x), torch.randn(T, D, dtype=dtype)
    weights = torch.rand(T, K, dtype=torch.float32, requires_grad=True)
    experts = torch.randint(0, E, (T, K))

    def run():
        return moeblaze_ops.moe(
            x, weights, experts, module.w_up, module.w_down, b_up=module.b_up, b_down=module.b_down,
            activation=activation, keep=keep,
        )  # fmt: skip

    return run, torch.randn(T, D, dtype=dtype)


# Every pair of activation, router and dtype.
LAYERS = [
    ("swiglu", False, torch.bfloat16),
    ("swiglu", True, torch.float32),
    ("relu2", False, torch.float32),
    ("relu2", True, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("shape", "keep", "activation", "router", "dtype"),
    [
        (shape, keep, *layer)
        for number, shape in enumerate(SHAPES)
        for keep, layers in (
            ("preactivation", LAYERS[number % 2 :: 2]),
            ("input", LAYERS[1 - number % 2 :: 2]),
            ("h8", LAYERS[number % 4 :: 4]),
        )
        for layer in layers
    ],
    ids=str,
)
def test_estimate_matches_what_a_gpu_step_allocates(shape, keep, activation, router, dtype, launchers_on_cpu):
    assert_estimate_matches(shape, keep, activation, router, dtype)


def assert_estimate_matches(shape, keep, activation, router, dtype):
    forward, dout = make_step(shape, keep, activation, router, dtype)
    estimate = memory_estimate(
        *SHAPES[shape], dtype, keep, gated=activation == "swiglu", bias=True, router=router, device="cpu"
    )  # fmt: skip
    out, after_forward, _ = allocated(forward)
    given = 0 if router else estimate.buffers["weights"]
    kept = after_forward - out.numel() * out.element_size() + given
    assert kept == pytest.approx(estimate.kept, rel=0.05)

    def step():
        out = forward()
        out.backward(dout)
        return out

    _, _, peak = allocated(step)
    assert peak + given == pytest.approx(estimate.peak, rel=0.05)


@pytest.mark.parametrize("keep", ["preactivation", "input"])
@pytest.mark.parametrize(("limit", "widths"), [(None, [2304]), (24 << 20, [1280, 1024]), (1, [256] * 9)], ids=str)
def test_estimate_knows_ranges_of_columns(keep, limit, widths, launchers_on_cpu, monkeypatch):
    monkeypatch.setattr(config, "max_transient_bytes", limit)
    T, D, *_, K = SHAPES["wide"]
    assert [len(columns) for columns in choose_column_ranges(T * K, D, 2, limit)] == widths
    assert_estimate_matches("wide", keep, "swiglu", False, torch.bfloat16)


@pytest.mark.parametrize(("shape", "chunks"), [("fine", 2), ("few_experts", 3), ("wide", 2)])
@pytest.mark.parametrize(("activation", "router", "dtype"), LAYERS, ids=str)
def test_estimate_knows_chunks_of_tokens(shape, chunks, activation, router, dtype, launchers_on_cpu, monkeypatch):
    monkeypatch.setattr(row_ranges, "MOST_RANGES", 0)
    T, D, F, _, K = SHAPES[shape]
    chunk_tokens = -(-T // chunks // 1024) * 1024
    limit = chunk_tokens * transient_bytes(D, F, K, dtype, activation == "swiglu")
    monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
    assert_estimate_matches(shape, "input", activation, router, dtype)
    assert "routing" not in memory_estimate(*SHAPES[shape], dtype, "input", gated=activation == "swiglu").buffers


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200_BYTES = int(139.80 * 2**30)

# D, F, E, K of the layers that were measured.
MEASURED_LAYERS = {name: sizes[1:] for name, (sizes, _) in FULL_SIZE.items()} | {
    "conf1": (512, 2048, 4, 1),
    "conf1_2m": (512, 2048, 4, 1),
    "conf3": (1024, 4096, 16, 4),
    "conf4_silu": (2048, 8192, 16, 4),
}


def measured_rows():
    """What was measured on an H200 of layers of ours, with their router."""
    for file in ("memory_h200.json", "memory_scaling_h200.json"):
        if not (RESULTS / file).is_file():
            continue
        for row in json.loads((RESULTS / file).read_text())["measurements"]:
            keep, _, suffix = row["contender"].partition("+")
            if keep in ("preactivation", "input") and not row["failure"]:
                name = f"{row['shape']}-{row['T']}-{row['contender']}"
                yield pytest.param(row, keep, bool(suffix), id=name)


@pytest.mark.parametrize(("row", "keep", "compiled"), list(measured_rows()))
def test_estimate_matches_what_was_measured(row, keep, compiled, monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", H200_BYTES // 16)
    sizes, gated = MEASURED_LAYERS[row["shape"]], row["shape"] != "conf4_silu"
    estimate = memory_estimate(row["T"], *sizes, keep=keep, gated=gated, router=True, compiled=compiled)
    assert estimate.peak == pytest.approx(row["peak_mib"] * 2**20, rel=0.05)
    if row["kept_mib"] > 1:
        assert estimate.kept == pytest.approx(row["kept_mib"] * 2**20, rel=0.05)


def test_without_a_gpu_there_are_no_chunks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = (512, 2048, 4, 1)
    peaks = [memory_estimate(T, *sizes, keep="input").peak for T in (1 << 22, 1 << 23)]
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.01)


@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_chunks_follow_the_memory_of_the_device(device, monkeypatch):
    memory_of = {None: H200_BYTES, 1: H200_BYTES // 8}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(total_memory=memory_of[index]))
    shape = (1 << 22, 512, 2048, 4, 1)
    got = memory_estimate(*shape, keep="input", device=device)
    monkeypatch.setattr(config, "max_layer_transient_bytes", memory_of[None if device is None else 1] // 16)
    assert got == memory_estimate(*shape, keep="input", device="cpu")
    assert "routing" not in got.buffers


def test_compiled_backward_has_one_buffer_for_h_and_its_gradient():
    shape = SHAPES["few_experts"]
    eager, compiled = (memory_estimate(*shape, compiled=compiled) for compiled in (False, True))
    for step in ("expert_down_backward", "gradient of w_down"):
        assert eager.steps[step] - compiled.steps[step] == eager.buffers["h"]
    assert eager.steps["expert_up_backward"] == compiled.steps["expert_up_backward"]
    assert eager.kept == compiled.kept
    assert memory_estimate(*shape, keep="input") == memory_estimate(*shape, keep="input", compiled=True)


@pytest.mark.parametrize("name", FULL_SIZE)
@pytest.mark.parametrize("keep", ["preactivation", "h8", "input"])
def test_a_step_of_full_size_stays_in_bounds(name, keep, launchers_on_cpu):
    (T, D, F, E, K), most = FULL_SIZE[name]
    estimate = memory_estimate(T, D, F, E, K, keep=keep, device="cpu")
    peak = full_size_peak(name, keep)
    assert peak + estimate.buffers["weights"] == pytest.approx(estimate.peak, rel=0.05)
    if keep == "input":
        assert peak <= most * 2**20


def full_size_peak(name, keep):
    """What a step allocates at most; memory that nobody writes costs the CPU nothing."""
    T, D, F, E, K = FULL_SIZE[name][0]

    def leaf(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    x, weights, w_up, w_down = leaf(T, D), leaf(T, K, dtype=torch.float32), leaf(E, 2 * F, D), leaf(E, D, F)
    experts, dout = torch.empty(T, K, dtype=torch.int32), torch.empty(T, D, dtype=torch.bfloat16)

    def step():
        moeblaze_ops.moe(x, weights, experts, w_up, w_down, keep=keep).backward(dout)

    return allocated(step)[2]


# A limit for layers of full size, and the ranges of rows that it makes.
LIMIT = 240 << 20
RANGES = {"fine": 4, "finest": 1, "mid": 6, "wide": 5, "coarse": 10}


@pytest.mark.parametrize("name", FULL_SIZE)
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_limited_step_of_full_size_takes_little_more_than_its_results(name, is_planned, launchers_on_cpu, monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", LIMIT)
    (T, D, F, E, K), _ = FULL_SIZE[name]
    offsets = [T * K * e // E for e in range(E + 1)]
    device = ranged_backward.gpu_device()._replace(read=lambda tensor: lambda: offsets if is_planned else None)
    monkeypatch.setattr(expert_mlp_ranged, "gpu_device", lambda: device)
    sizes = range_sizes(D, F, E, torch.bfloat16, gated=True)
    assert len(row_ranges.row_ranges(T * K, E, sizes, LIMIT)) == RANGES[name]
    estimate = memory_estimate(T, D, F, E, K, keep="input", device="cpu")
    peak = full_size_peak(name, "input")
    assert peak + estimate.buffers["weights"] == pytest.approx(estimate.peak, rel=0.01)
    results = 2 * 2 * T * D + 2 * 3 * E * F * D
    assert peak <= results + (256 << 20)


def test_the_bound_that_auto_plans_with_never_falls(monkeypatch):
    """The peak itself does: a few more tokens may make the rows take one range of columns more."""
    sizes = LayerSizes(D=2048, F=64, E=8, K=8, dtype=torch.bfloat16)
    tokens = range(1, 1 << 18, 1237)
    for limit in (None, 1, 512 << 20):
        monkeypatch.setattr(config, "max_transient_bytes", limit)
        exact = [memory._rows_bytes(T * 8, sizes) for T in tokens]
        bound = [memory._most_rows_bytes(T * 8, sizes) for T in tokens]
        assert bound == sorted(bound)
        assert all(rows <= most for rows, most in zip(exact, bound, strict=True))
    assert exact != sorted(exact)


@pytest.mark.parametrize(
    ("shape", "mib"),
    [
        ((65536, 1024, 4096, 16, 4), {"h": 4096, "total": 4224}),
        ((32768, 2048, 8192, 16, 4), {"h": 2048, "total": 2176}),
    ],
    ids=["conf3_swiglu", "conf4_silu"],
)
def test_known_layers(shape, mib):
    """The floors of two layers of the MoEBlaze paper: x and h."""
    T, D, *_ = shape
    estimate = memory_estimate(*shape, gated=mib["h"] == 4096)
    assert estimate.buffers["h"] == mib["h"] * 2**20
    assert estimate.kept + 2 * T * D == pytest.approx(mib["total"] * 2**20, rel=0.01)
    assert memory_estimate(*shape, keep="input").kept < 4 * 2**20


def test_memory_estimate_rejects_a_keep_that_is_no_point():
    message = "memory_estimate: keep must be one of preactivation, h8, input, auto, got 'all'"
    with pytest.raises(ValueError, match=message):
        memory_estimate(8, 8, 8, 8, 2, keep="all")


SIZES = LayerSizes(D=16, F=24, E=4, K=2, dtype=torch.float32)


@pytest.fixture
def free_memory(monkeypatch):
    """Set the free memory to what a step of ``tokens`` tokens takes in ``layers`` layers, and ask anew."""

    def set_to_fit(tokens, layers=1):
        estimate = memory_estimate(tokens, 16, 24, 4, 2, torch.float32)
        free = None if tokens is None else -(-((layers - 1) * estimate.kept + estimate.peak) * 10 // 9)
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        memory.forget_choices()

    yield set_to_fit
    memory.forget_choices()


@pytest.mark.parametrize("layers", [1, 12])
def test_auto_takes_the_fastest_point_that_fits(layers, free_memory, monkeypatch):
    monkeypatch.setattr(config, "layers_in_flight", layers)
    free_memory(1000, layers)
    cpu = torch.device("cpu")
    assert [memory.choose_keep(T, SIZES, cpu) for T in (0, 1000, 1001)] == ["preactivation", "preactivation", "input"]


def test_auto_counts_on_a_compiled_backward_on_a_gpu_only(free_memory):
    free_memory(1000)
    limits = {
        (device, compiled): memory._token_limit(16, 24, 4, 2, torch.float32, True, device, None, compiled, 1)
        for device in ("cuda", "cpu")
        for compiled in (False, True)
    }
    assert limits["cuda", False] == 1000 < limits["cuda", True]
    assert [memory.choose_keep(1001, SIZES, torch.device(device), compiled=True) for device in ("cuda", "cpu")] == [
        "preactivation",
        "input",
    ]
    assert [memory.choose_keep(1001, SIZES, torch.device(device)) for device in ("cuda", "cpu")] == ["input", "input"]
    assert any("on cuda, compiled:" in str(choice) for choice in memory.recent_choices())


def test_auto_goes_in_chunks_where_only_they_fit(free_memory, monkeypatch):
    """Every T beyond the limit of "preactivation" gets "input", which takes no more than a chunk beside its results."""
    free_memory(1000)
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)
    module = moeblaze_ops.MoE(16, 24, 4, 2, keep="auto")
    x = torch.randn(5000, 16)
    with torch.profiler.profile() as profile:
        module(x)
    names = {event.name for event in profile.events()}
    assert "moeblaze::expert_mlp_chunked" in names and "moeblaze::expert_up" not in names
    growth = [memory_estimate(T, 16, 24, 4, 2, torch.float32, "input").peak for T in (1 << 20, 1 << 21)]
    results = 2 * 4 * 16 + 8 * 2 * 4
    assert growth[1] - growth[0] <= results * (1 << 20)


def test_auto_keeps_more_where_the_free_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.forget_choices()
    assert memory.choose_keep(10**9, SIZES, torch.device("cpu")) == "preactivation"
    assert "the free memory of the device is unknown" in str(memory.recent_choices()[-1])
    memory.forget_choices()


def test_auto_says_what_it_chose_and_why(free_memory, caplog):
    free_memory(1 << 20)
    with caplog.at_level(logging.INFO, logger="moeblaze_ops.memory.estimate"):
        memory.choose_keep(8, SIZES, torch.device("cpu"))
        memory.choose_keep(9, SIZES, torch.device("cpu"))
    (message,) = caplog.messages
    assert message == str(memory.recent_choices()[-1])
    assert message == (
        'keep="auto" for D=16, F=24, E=4, K=2, torch.float32, gated on cpu: "preactivation" up to 1048576 tokens, "input" '
        "beyond: 1.15 GiB are free, 90% of which are for a step of 1 such layers, which keep 408 bytes a token each"
    )


def test_auto_sticks_to_its_choice_until_it_is_asked_anew(free_memory, monkeypatch):
    free_memory(100)
    assert memory.choose_keep(50, SIZES, torch.device("cpu")) == "preactivation"
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert memory.choose_keep(50, SIZES, torch.device("cpu")) == "preactivation"
    memory.forget_choices()
    assert memory.choose_keep(50, SIZES, torch.device("cpu")) == "input"


def test_auto_compiles_to_one_graph_for_each_point(free_memory):
    free_memory(100)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = moeblaze_ops.MoE(16, 24, 4, 2, keep="auto")
    graphs = []

    def backend(gm, inputs):
        graphs.append([n.target.__name__ for n in gm.graph.nodes if str(n.target).startswith("moeblaze.expert")])
        return gm.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for tokens in (10, 99, 100, 101, 500, 60):
        x = torch.randn(tokens, 16)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), module(x))
    assert graphs == [["expert_up.default", "expert_down.default"], ["expert_mlp.default"]]


def test_free_memory_of_this_machine_is_known():
    assert memory.free_bytes("cpu") > 0
    assert memory.free_bytes("meta") is None


def test_estimate_is_printed_in_words():
    estimate = memory_estimate(4096, 1024, 512, 8, 2)
    assert repr(estimate) == str(estimate)
    assert str(estimate).startswith("kept for backward: 16.1 MiB\n  weights: 32.0 KiB\n")
    assert "peak: 56.1 MiB, in" in str(estimate)
