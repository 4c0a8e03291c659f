"""The Hopper kernels compiled for sm_90 without a GPU: they compile, fit in shared memory and spill next to nothing.

Spills are what a change of Triton or of a kernel costs first: a consumer holds a 64 x 256 accumulator in 168 registers.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

triton = pytest.importorskip("triton")
pytest.importorskip("moeblaze_ops.kernels.hopper.gluon_api", exc_type=ImportError)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from moeblaze_ops.arguments.traced_activations import trace_activation  # noqa: E402
from moeblaze_ops.kernels.eight_bits import row_width  # noqa: E402
from moeblaze_ops.kernels.formulas.expression import ARITY  # noqa: E402
from moeblaze_ops.kernels.formulas.named import IDENTITY, NAMED, is_gated, num_parameters  # noqa: E402
from moeblaze_ops.kernels.hopper import launch as hopper_launch  # noqa: E402
from moeblaze_ops.kernels.hopper.configs import num_partials  # noqa: E402
from moeblaze_ops.kernels.hopper.expert_down_backward import hopper_down_backward  # noqa: E402
from moeblaze_ops.kernels.hopper.expert_up import hopper_expert_up  # noqa: E402
from moeblaze_ops.kernels.hopper.row_gemm import hopper_down_rows, hopper_up_backward_rows  # noqa: E402
from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad  # noqa: E402
from tests.corpus import activations  # noqa: E402
from tests.tools.offline import resources_of  # noqa: E402

SHARED_MEMORY_BYTES = 232448
"""What one program may use on compute capability 9.0."""

SPILL_BYTES = 48 if TorchVersion(triton.__version__) < "3.9" else 152
"""Stack bytes allowed: a few values spilled outside the inner loops cost nothing that can be measured. Triton 3.9 spills more."""

T, K, E, D, F = 64, 2, 4, 512, 768
N = T * K


class OfflineDriver:
    """Stands for the driver of a Hopper that is not there."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": SHARED_MEMORY_BYTES,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
        }
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_interface(self):
        return torch.cpu


@pytest.fixture
def compiled(monkeypatch):
    """The kernels compiled, not run, by the launchers that the test calls."""
    kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **keywords):
        kernels.append(run(self, *args, grid=grid, warmup=True, **keywords))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(hopper_launch, "num_programs", lambda device: 132)
    # `driver.reset_active()` raises where there is no GPU.
    monkeypatch.setattr(driver, "_active", OfflineDriver())
    return kernels


def assert_fits(kernels) -> None:
    for kernel in kernels:
        resources = resources_of(kernel)
        assert resources.shared_bytes <= SHARED_MEMORY_BYTES
        assert resources.spill_bytes <= SPILL_BYTES, kernel.metadata.name


def empty(*shape: int, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


OFFSETS_E1 = torch.zeros(E + 1, dtype=torch.int32)
BLOCKS_B2 = torch.zeros(N // 128 + E + 1, 2, dtype=torch.int32)
SLOTS_N = torch.zeros(N, dtype=torch.int32)


def up_weights(storage: str, parts: int, num_f: int, num_d: int, dtype=torch.bfloat16) -> list:
    if storage == "split":
        return [empty(E, 1, num_f, num_d, dtype=dtype) for _ in range(parts)]
    if storage == "f_inner":
        return [empty(E, num_d, parts, num_f, dtype=dtype).permute(0, 2, 3, 1)]
    if storage == "interleaved":
        return [empty(E, num_f, parts, num_d, dtype=dtype).transpose(1, 2)]
    return [empty(E, parts, num_f, num_d, dtype=dtype)]


def up_biases(w_up: list) -> list:
    return [empty(*weight.shape[:3], dtype=weight.dtype) for weight in w_up]


STORAGES = ("packed", "split", "f_inner", "interleaved")
WIDTHS = {"even": (F, D), "ragged": (200, 328), "narrow": (72, 64)}

# Each storage with even widths, and each width with packed weights: kernels read weights apart from where tiles end.
LAYOUTS = [*((storage, "even") for storage in STORAGES), ("packed", "ragged"), ("packed", "narrow"), ("f_inner", "ragged")]

# The widest D leaves the epilogue of dA the fewest warps; what needs most registers is compiled for the other two plans as well.
EPILOGUES = [
    *((activation, 2048) for activation in (*NAMED, IDENTITY)),
    *((activation, num_d) for activation in ("swiglu", "geglu", "geglu_tanh", "swiglu_limited") for num_d in (512, 1536)),
]


FORMULAS = ("situ_glu", "mish_glu", "softplus_glu", "tanh_glu", "swiglu_other_limits", "xielu", "hard_swish", "snake")
EPILOGUES += [(trace_activation(activations.ALL[name]), num_d) for name in FORMULAS for num_d in (1536, 2048)]
LEARNED = ("g * sigmoid(p0 * g) * u", "prelu(h, p0)")
DROPPED = f"{NAMED['swiglu']} * where(draw(p0, n, f) >= 0.1, 1.1111111111111112, 0.0)"
XIELU = "where(h > 0.0, h * h * p0 + h * 0.5, (expm1(clamp(h, None, -1e-06)) - h) * p1 + h * 0.5)"
EPILOGUES += [(XIELU, 2048)]
EPILOGUES += [(text, num_d) for text in LEARNED for num_d in (512, 1536, 2048)]
EPILOGUES += [(DROPPED, 2048)]


def one_plan_each(cases):
    """Each activation with one width in turn, and geglu, which needs most registers, with all."""
    widths = {}
    for activation, num_d in cases:
        widths.setdefault(activation, []).append(num_d)
    return [
        (activation, num_d)
        for number, (activation, given) in enumerate(widths.items())
        for num_d in (given if activation == "geglu" else [given[number % len(given)]])
    ]


# What others hold all of, and more: that each of their functions compiles is tested below.
LIGHTER = {"silu", "relu", "relu2", "reglu", IDENTITY}
LIGHTER |= {trace_activation(activations.ALL[name]) for name in ("softplus_glu", "tanh_glu", "xielu", "hard_swish", "snake")}


@pytest.mark.parametrize(("activation", "num_d"), [case for case in one_plan_each(EPILOGUES) if case[0] not in LIGHTER])
def test_activations_fit(compiled, activation, num_d):
    """Narrow and wide: the tile of dA depends on D."""
    D, parts = num_d, 2 if is_gated(activation) else 1
    table = (SLOTS_N, OFFSETS_E1, BLOCKS_B2, K, activation)
    h, a, partials = empty(N, parts, F), empty(N, F), empty(num_partials(F, D), N, dtype=torch.float32)
    w_up, w_down = up_weights("packed", parts, F, D), empty(E, F, D)
    learned, P = {}, num_parameters(activation)
    if P > 0:
        learned["params_EP"] = empty(E, P, dtype=torch.float32)
    hopper_expert_up(empty(T, D), w_up, up_biases(w_up), *table, h, a, **learned)
    if P > 0:
        learned["shares_PCN"] = empty(P, *partials.shape, dtype=torch.float32)
    given = (empty(T, D), h, [w_down], empty(T, K, dtype=torch.float32), *table, empty(*h.shape), partials, a)
    hopper_down_backward(*given, early=num_d == 2048, **learned)
    assert len(compiled) == 2
    assert_fits(compiled)


def test_every_function_compiles(compiled):
    """What formulas are made of, whatever registers it takes."""
    unary = (name for name, arity in ARITY.items() if arity == 1 and name != "not")
    choice = "where((g < 1.0) & ~(g <= u) | (g == 2.0) | (g != u) & (g > 0.5) | (g >= 3.0), g / u, -u)"
    activation = " + ".join([choice, "maximum(g, u) - minimum(g, 2.0)", *(f"{name}(g)" for name in unary), "mish(g)", "gelu(g)"])
    table = (SLOTS_N, OFFSETS_E1, BLOCKS_B2, K, activation)
    hopper_expert_up(empty(T, D), up_weights("packed", 2, F, D), [], *table, empty(N, 2, F), empty(N, F))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("storage", "widths", "dtype"),
    [*((*layout, torch.bfloat16) for layout in LAYOUTS), ("packed", "even", torch.float16), ("f_inner", "ragged", torch.float16)],
    ids=str,
)
def test_storages_fit(compiled, storage, widths, dtype):
    num_f, num_d = WIDTHS[widths]
    x, h, a = empty(T, num_d, dtype=dtype), empty(N, 2, num_f, dtype=dtype), empty(N, num_f, dtype=dtype)
    y = empty(N, num_d, dtype=dtype)
    w_up = up_weights(storage, 2, num_f, num_d, dtype)
    w_down = up_weights("f_inner" if storage == "f_inner" else "packed", 1, num_f, num_d, dtype)[0][:, 0]
    partials = empty(num_partials(num_f, num_d), N, dtype=torch.float32)
    table = (SLOTS_N, OFFSETS_E1, BLOCKS_B2, K, "swiglu")
    hopper_expert_up(x, w_up, [], *table, h, a)
    hopper_down_rows(a, [w_down], [empty(E, num_d, dtype=dtype)], OFFSETS_E1, BLOCKS_B2, y)
    hopper_down_backward(x, h, [w_down], None, *table, h, partials, a)
    hopper_up_backward_rows(h, w_up, OFFSETS_E1, BLOCKS_B2, y)
    hopper_weight_grad(x, h, w_up, SLOTS_N, OFFSETS_E1, K)
    hopper_weight_grad(x, a.unsqueeze(1), [w_down], SLOTS_N, OFFSETS_E1, K)
    assert len(compiled) == 8
    assert_fits(compiled)


@pytest.mark.parametrize(("parts", "widths"), [(2, "even"), (1, "even"), (2, "ragged")])
def test_few_rows_of_an_expert_fit(compiled, parts, widths):
    """Narrow tiles, which do not read the rows that they lack; they multiply as the wide ones do."""
    num_f, num_d = WIDTHS[widths]
    many, blocks = 2 * N, torch.zeros(N // 128 + 2 * N + 1, 2, dtype=torch.int32)
    table = (SLOTS_N, torch.zeros(many + 1, dtype=torch.int32), blocks, K, "swiglu" if parts == 2 else "silu")
    h, a = empty(N, parts, num_f), empty(N, num_f)
    hopper_expert_up(empty(T, num_d), [empty(many, parts, num_f, num_d)], [], *table, h, a)
    hopper_down_rows(a, [empty(many, num_f, num_d)], [], *table[1:3], empty(N, num_d))
    assert len(compiled) == 2
    assert_fits(compiled)
    assert all("wgmma.mma_async.sync.aligned.m64n128k16" in kernel.asm["ptx"] for kernel in compiled)


# Both ranks with one layout, and each other layout with one: weights and low-rank columns are read by descriptors of their own.
@pytest.mark.parametrize(
    ("storage", "widths", "rank"),
    [("packed", "even", 8), ("packed", "even", 200), ("packed", "ragged", 200), ("f_inner", "narrow", 8), ("split", "even", 200)],
)
def test_low_rank_columns_fit(compiled, storage, widths, rank):
    num_f, num_d = WIDTHS[widths]
    x, h, a, y, rows = empty(T, num_d), empty(N, 2, num_f), empty(N, num_f), empty(N, num_d), empty(N, rank)
    w_up = up_weights(storage, 2, num_f, num_d)
    w_down = up_weights("f_inner" if storage == "f_inner" else "packed", 1, num_f, num_d)[0][:, 0]
    lora_a, lora_b = empty(E, rank, num_d), empty(E, 2, num_f, rank)
    table = (SLOTS_N, OFFSETS_E1, BLOCKS_B2, K, "swiglu")
    hopper_expert_up(x, w_up, [], *table, h, a, rows, lora_b)
    hopper_down_rows(a, [w_down], [], OFFSETS_E1, BLOCKS_B2, y, None, None, rows, lora_a)
    partials = empty(num_partials(num_f, num_d), N, dtype=torch.float32)
    hopper_down_backward(x, h, [w_down], None, *table, h, partials, a, False, rows, empty(E, rank, num_f))
    hopper_up_backward_rows(h, w_up, OFFSETS_E1, BLOCKS_B2, y, du_NR=rows, lora_a_ERD=lora_a)
    assert len(compiled) == 4
    assert_fits(compiled)


@pytest.mark.parametrize(
    ("widths", "channels", "dtype"),
    [
        ("even", 0, torch.bfloat16),
        ("even", 1, torch.bfloat16),
        ("even", 8, torch.bfloat16),
        ("ragged", 8, torch.bfloat16),
        ("narrow", 1, torch.bfloat16),
        ("even", 8, torch.float16),
        ("ragged", 0, torch.float16),
    ],
    ids=str,
)
def test_rows_that_go_to_tokens_fit(compiled, widths, channels, dtype):
    num_f, num_d = WIDTHS[widths]
    h, a, y = empty(N, 2, num_f, dtype=dtype), empty(N, num_f, dtype=dtype), empty(N, num_d, dtype=dtype)
    for weights in (None, empty(N, 1, dtype=torch.float32), empty(N, 1, dtype=dtype)):
        hopper_down_rows(a, [empty(E, num_f, num_d, dtype=dtype)], [], OFFSETS_E1, BLOCKS_B2, y, SLOTS_N, weights)
    product = (empty(N, channels, dtype=dtype), empty(num_d, channels, dtype=dtype).T) if channels else (None, None)
    w_up = up_weights("packed", 2, num_f, num_d, dtype)
    hopper_up_backward_rows(h, w_up, OFFSETS_E1, BLOCKS_B2, y, SLOTS_N, *product, early=channels == 8)
    assert len(compiled) == 4
    assert_fits(compiled)


@pytest.mark.parametrize(
    ("storage", "widths", "sums"),
    [*((*layout, torch.float32) for layout in LAYOUTS[::2]), *((*layout, torch.bfloat16) for layout in LAYOUTS[1::2])],
    ids=str,
)
def test_adding_weight_gradients_fits(compiled, storage, widths, sums):
    num_f, num_d = WIDTHS[widths]
    x, h, a = empty(T, num_d), empty(N, 2, num_f), empty(N, 1, num_f)
    w_down = up_weights("f_inner" if storage == "f_inner" else "packed", 1, num_f, num_d, sums)[0][:, 0]
    hopper_weight_grad(x, h, up_weights(storage, 2, num_f, num_d, sums), SLOTS_N, OFFSETS_E1, K, accumulate=True)
    hopper_weight_grad(x, a, [w_down], SLOTS_N, OFFSETS_E1, K, accumulate=True)
    assert len(compiled) == 4
    assert_fits(compiled)


@pytest.mark.parametrize(("storage", "widths"), LAYOUTS)
def test_writing_or_adding_weight_gradients_fits(compiled, storage, widths):
    num_f, num_d = WIDTHS[widths]
    x, h, a = empty(T, num_d), empty(N, 2, num_f), empty(N, 1, num_f)
    fresh_E = torch.zeros(E, dtype=torch.int32)
    w_down = up_weights("f_inner" if storage == "f_inner" else "packed", 1, num_f, num_d)[0][:, 0]
    options = {"accumulate": True, "fresh_E": fresh_E, "order_E1": OFFSETS_E1, "early": storage == "packed"}
    hopper_weight_grad(x, h, up_weights(storage, 2, num_f, num_d), SLOTS_N, OFFSETS_E1, K, **options)
    hopper_weight_grad(x, a, [w_down], SLOTS_N, OFFSETS_E1, K, **options)
    assert len(compiled) == 2
    assert_fits(compiled)


EIGHT_BITS = [("swiglu", "even"), ("swiglu", "ragged"), ("swiglu", "narrow"), ("silu", "even"), ("geglu", "even")]


@pytest.mark.parametrize(("activation", "widths"), EIGHT_BITS)
def test_h_in_eight_bits_fits(compiled, activation, widths):
    num_f, num_d = WIDTHS[widths]
    parts = 2 if is_gated(activation) else 1
    h8, a = empty(N, parts, row_width(num_f), dtype=torch.int8), empty(N, num_f)
    table = (SLOTS_N, OFFSETS_E1, BLOCKS_B2, K, activation)
    hopper_expert_up(empty(T, num_d), up_weights("packed", parts, num_f, num_d), [], *table, h8, a)
    for width in (num_d, 2048) if widths == "even" else (num_d,):  # the tile of dA depends on D
        partials, dh = empty(num_partials(num_f, width), N, dtype=torch.float32), empty(N, parts, num_f)
        hopper_down_backward(empty(T, width), h8, [empty(E, num_f, width)], None, *table, dh, partials, a)
    assert len(compiled) == (3 if widths == "even" else 2)
    assert_fits(compiled)
