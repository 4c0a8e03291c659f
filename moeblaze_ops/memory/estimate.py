"""What an expert layer takes in memory, before it runs, and the choice of ``keep`` from it.

``memory_estimate`` follows the buffers of the ops through one training step on a GPU. With N = T * K, s the bytes of a
number and i = 4 those of an index, backward finds in memory, besides x and the parameters,

    routing    i * (2 N + E + 1 + 2 B)       what ``dispatch`` returned, unless the tokens go in chunks
    weights    4 N                           routing weights in fp32
    h          s * N * G * F                 with keep="preactivation" only
    h8         N * G * row_width(F)          with keep="h8", some 17/16 bytes a number

and the peak is the largest sum of what is alive during one op (``_steps``). The rows from which the output and the
gradient of x are summed take what ``config.max_transient_bytes`` leaves of s * N * D, and nothing for K = 1. With
keep="input" and more tokens than ``chunks.tokens_per_chunk``, what backward holds besides its results is that of one range of
rows (``_ranged_steps``), or what grows with N but is not kept that of one chunk of tokens (``_chunked_steps``). Sizes are those
that tensors ask for: an allocator rounds each up, to 512 bytes on CUDA.
"""

import bisect
import functools
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeblaze_ops import config
from moeblaze_ops.arguments.validation import schedule_rows
from moeblaze_ops.arguments.validation_calls import check_memory_estimate
from moeblaze_ops.explanation import size_text
from moeblaze_ops.kernels.configs import COLUMN_UNIT, FEW_CHANNELS, choose_column_ranges
from moeblaze_ops.kernels.eight_bits import row_width
from moeblaze_ops.memory.row_ranges import capped, choose_parts, range_sizes, routing_bytes, row_ranges
from moeblaze_ops.memory.token_chunks import PARTIAL_COLUMNS, token_ranges

log = logging.getLogger(__name__)

_INDEX = 4
_USABLE = 0.9
"""Part of the free memory that ``auto`` plans with: the rest is lost to fragmentation and to other libraries."""
_LARGEST_T = 2**40
_KEPT_H = {"preactivation": ("h",), "h8": ("h8",), "input": ()}


@dataclass(frozen=True)
class LayerSizes:
    """An expert layer but for its number of tokens."""

    D: int
    F: int
    E: int
    K: int
    dtype: torch.dtype
    gated: bool = True
    bias: bool = False
    router: bool = False

    def __str__(self) -> str:
        return f"D={self.D}, F={self.F}, E={self.E}, K={self.K}, {self.dtype}, {'gated' if self.gated else 'ungated'}"


@dataclass(frozen=True, repr=False)
class MemoryEstimate:
    """Bytes of one layer in one training step.

    ``kept`` is alive from forward to backward because of the layer, beyond x, the parameters and the output. ``peak`` is
    the most that is alive at once in forward and backward, beyond the same x, the parameters and the output's gradient:
    output, x gradient and weight gradients count. ``buffers`` splits what is kept by name; ``steps`` has the bytes alive
    during each op, in order.
    """

    kept: int
    peak: int
    buffers: dict[str, int]
    steps: dict[str, int]

    @property
    def peak_step(self) -> str:
        """The op during which the peak occurs."""
        return max(self.steps, key=self.steps.__getitem__)

    def __str__(self) -> str:
        buffers = [f"  {name}: {size_text(size)}" for name, size in self.buffers.items()]
        peak = f"peak: {size_text(self.peak)}, in {self.peak_step}"
        return "\n".join([f"kept for backward: {size_text(self.kept)}", *buffers, peak])

    __repr__ = __str__


def memory_estimate(
    T: int,
    D: int,
    F: int,
    E: int,
    K: int,
    dtype: torch.dtype = torch.bfloat16,
    keep: str | None = "preactivation",
    *,
    gated: bool = True,
    bias: bool = False,
    router: bool = False,
    compiled: bool = False,
    device: torch.device | str | None = None,
) -> MemoryEstimate:
    """Bytes that a layer keeps for backward and the peak of a training step, before anything runs.

    Args:
        T: tokens. D: model width. F: hidden width of an expert. E: experts. K: experts per token.
        dtype: of x and the weights.
        keep: as for ``moe``. ``"auto"`` is settled as a layer on ``device`` would settle it now: ``buffers`` has an h
            where that is ``"preactivation"``.
        gated: the activation has a gate and an up half.
        bias: both projections have biases.
        router: include the router of ``MoE``; without it routing weights and expert ids are given, as to ``moe``.
        compiled: the layer is compiled by Inductor, whose backward writes the gradient of h over a kept h.
        device: the GPU whose memory limits ``keep="input"`` where ``config.max_layer_transient_bytes`` does not, and
            decides ``keep="auto"``; by default the current one. Without a GPU, that is no limit.

    Raises:
        ValueError, TypeError: a size is no int, negative or zero (T may be 0), K > E, or an argument is none of those named.
    """
    keep = config.keep if keep is None else keep
    switches = {"gated": gated, "bias": bias, "router": router, "compiled": compiled}
    check_memory_estimate(T, D, F, E, K, dtype, keep, switches, device)
    sizes = LayerSizes(D, F, E, K, dtype, gated, bias, router)
    device = torch.device("cuda" if device is None else device)
    if keep == "auto":
        keep = _settled(T, LayerSizes(D, F, E, K, dtype, gated), str(device), compiled and device.type == "cuda")
    with torch.enable_grad():
        parts, size = choose_parts(T, D, F, E, K, dtype, gated, device)
    if keep == "input" and parts == "ranges":
        return _ranged_estimate(T, sizes, size, compiled)
    if keep == "input" and parts == "chunks":
        return _chunked_estimate(T, sizes, size, compiled)
    return _estimate(T, sizes, keep, compiled)


def _rows_bytes(N: int, sizes: LayerSizes, limit: int | None = None) -> int:
    """Bytes of the rows of a projection to the model width that exist at the same time; none with one expert a token."""
    if sizes.K == 1:
        return 0
    number = sizes.dtype.itemsize
    widest, *_ = choose_column_ranges(N, sizes.D, number, config.max_transient_bytes if limit is None else limit)
    return number * N * len(widest)


def _most_rows_bytes(N: int, sizes: LayerSizes) -> int:
    """A bound of ``_rows_bytes`` for N rows or fewer: where more rows make it take one range more, it falls."""
    if sizes.K == 1:
        return 0
    column = sizes.dtype.itemsize * N
    if config.max_transient_bytes is None:
        return column * sizes.D
    return min(column * sizes.D, max(column * COLUMN_UNIT, config.max_transient_bytes))


def _estimate(
    T: int, sizes: LayerSizes, keep: str, compiled: bool, rows_bytes: Callable[[int, LayerSizes], int] = _rows_bytes
) -> MemoryEstimate:
    size_of = _buffers(T, sizes) | {"rows": rows_bytes(T * sizes.K, sizes)}
    joins_router = compiled and sizes.router and sizes.E > FEW_CHANNELS
    size_of["dx rows"] = size_of["x"] if sizes.K == 1 and joins_router else size_of["rows"]
    steps = _steps(sizes, keep, compiled) | _router_step(sizes, compiled)
    return _summed(size_of, _kept(sizes, keep), _kept(sizes, "input"), steps)


def _chunked_estimate(T: int, sizes: LayerSizes, chunk_tokens: int, compiled: bool) -> MemoryEstimate:
    chunk = next(token_ranges(T, chunk_tokens)).stop
    of_chunk = _buffers(chunk, sizes) | {"rows": _rows_bytes(chunk * sizes.K, sizes)}
    size_of = _buffers(T, sizes)
    size_of |= {f"chunk of {name}": size for name, size in of_chunk.items()}
    size_of |= {f"sum of {name}": size_of[name] * max(1, 4 // sizes.dtype.itemsize) for name in ("w_up", "w_down")}
    kept = tuple(name for name in _kept(sizes, "input") if name != "routing")
    return _summed(size_of, kept, kept, _chunked_steps(sizes) | _router_step(sizes, compiled))


def _ranged_estimate(T: int, sizes: LayerSizes, limit: int, compiled: bool) -> MemoryEstimate:
    N, E = T * sizes.K, sizes.E
    of_rows = range_sizes(sizes.D, sizes.F, E, sizes.dtype, sizes.gated)
    first, *others = row_ranges(N, E, of_rows, limit)
    size_of = _buffers(T, sizes) | {"routing of ranges": routing_bytes(N, E)}
    size_of["rows"] = _rows_bytes(N, sizes, capped(of_rows.forward_column_bytes(limit, N)))
    for name, rows in (("first", first), ("other", others[0] if others else range(0))):
        of_range = {part: size_of[part] * len(rows) // N for part in ("h", "a")}
        of_range["partials"] = (size_of["partials"] - size_of["weights"]) * len(rows) // N
        column_bytes = capped(of_rows.column_bytes(limit - size_of["routing of ranges"], rows))
        of_range["rows"] = _rows_bytes(len(rows), sizes, column_bytes) if rows else 0
        size_of |= {f"{name} {part}": size for part, size in of_range.items()}
    kept = _kept(sizes, "input")
    keeps_rows = of_rows.keeps_rows(limit - size_of["routing of ranges"], first)
    return _summed(size_of, kept, kept, _ranged_steps(keeps_rows, bool(others)) | _router_step(sizes, compiled))


def _summed(
    size_of: dict[str, int], kept: tuple[str, ...], alive_throughout: tuple[str, ...], steps: dict[str, tuple[str, ...]]
) -> MemoryEstimate:
    buffers = {name: size_of[name] for name in kept}
    totals = {step: sum(size_of[name] for name in (*alive_throughout, *alive)) for step, alive in steps.items()}
    return MemoryEstimate(sum(buffers.values()), max(totals.values()), buffers, totals)


def _kept(sizes: LayerSizes, keep: str) -> tuple[str, ...]:
    router = ("logits", "experts") if sizes.router else ()
    return (*router, "weights", "routing", *_KEPT_H[keep])


def _buffers(T: int, sizes: LayerSizes) -> dict[str, int]:
    """Bytes of every buffer by name, but for the rows of a projection to the model width."""
    D, F, E, K = sizes.D, sizes.F, sizes.E, sizes.K
    G = 2 if sizes.gated else 1
    N = T * K
    number = sizes.dtype.itemsize
    weight = max(number, 4)
    partials = -(-F // PARTIAL_COLUMNS) + sizes.bias
    return {
        "x": number * T * D,
        "routing": _INDEX * (2 * N + E + 1 + 2 * schedule_rows(N, E)),
        "weights": weight * N,
        "logits": number * T * E,
        "experts": _INDEX * N,
        "h": number * N * G * F,
        "h8": N * G * row_width(F),
        "a": number * N * F,
        "partials": 4 * N * partials + weight * N,
        "w_up": number * E * G * F * (D + sizes.bias),
        "w_down": number * E * D * (F + sizes.bias),
        "router": number * E * D,
    }


def _steps(sizes: LayerSizes, keep: str, compiled: bool) -> dict[str, tuple[str, ...]]:
    """Names of the buffers alive during each op, beyond the routing; a gradient has the name of what it belongs to.

    The output is an ``x``, the rows of a projection to the model width are ``rows``, and ``wa`` is an ``a``.
    """
    kept_h = _KEPT_H[keep]
    dh = () if keep == "preactivation" and compiled else ("h",)
    steps = {
        "expert_up": (*kept_h, "a"),
        "expert_down": (*kept_h, "a", "rows", "x"),
        "expert_down_backward" if kept_h else "expert_mlp_backward": ("x", *kept_h, *dh, "a", "partials"),
        "gradient of w_down": ("x", "h", *(() if compiled else kept_h), "a", "w_down"),
        "expert_up_backward": ("x", "h", "w_down", "dx rows", "x"),
        "gradient of w_up": ("x", "h", "w_down", "x", "w_up"),
    }
    return steps


def _ranged_steps(keeps_rows: bool, has_others: bool) -> dict[str, tuple[str, ...]]:
    """As ``_steps`` for the first range of rows, which is there before the weight gradients are, and for any other one."""
    out = ("x", "weights", "routing of ranges")
    steps = {
        "expert_up": ("a",),
        "expert_down": ("a", "rows", "x"),
        "expert_mlp_backward": (*out, "first h", "first a", "first partials"),
        "expert_up_backward": (*out, "first h", "first a", "first rows", "x"),
        "gradient of w_up": (*out, "first h", "first a", "x", "w_up", *(("first rows",) if keeps_rows else ())),
        "gradient of w_down": (*out, "first a", "x", "w_up", "w_down"),
    }
    results = (*out, "x", "w_up", "w_down")
    others = {
        "expert_mlp_backward, other range": (*results, "other h", "other a", "other partials"),
        "expert_up_backward, other range": (*results, "other h", "other rows"),
    }
    return steps | (others if has_others else {})


def _chunked_steps(sizes: LayerSizes) -> dict[str, tuple[str, ...]]:
    """As ``_steps`` for one chunk after another: the results are there as a whole, and the sums of weight gradients."""
    results = ("x", "x", "weights", "sum of w_up", "sum of w_down")
    dh = ("chunk of routing", "chunk of h")
    steps = {
        "expert_up": ("x", "chunk of routing", "chunk of a"),
        "expert_down": ("x", "chunk of routing", "chunk of a", "chunk of rows", "chunk of x"),
        "expert_mlp_backward": (*results, *dh, "chunk of a", "chunk of partials"),
        "expert_up_backward": (*results, *dh, "chunk of rows", "chunk of x"),
    }
    if sizes.dtype.itemsize < 4:
        steps["gradient of w_up"] = (*results, "w_up")
        steps["gradient of w_down"] = ("x", "x", "weights", "w_up", "sum of w_down", "w_down")
    return steps


def _router_step(sizes: LayerSizes, compiled: bool) -> dict[str, tuple[str, ...]]:
    """The gradient of the router; compiled, its part of the tokens' gradient has no buffer of its own."""
    if not sizes.router:
        return {}
    of_tokens = ("x",) if compiled and sizes.dtype.itemsize == 2 else ("x", "x")
    return {"router": ("x", "w_down", *of_tokens, "w_up", "router", "logits", "logits")}


@dataclass(frozen=True)
class KeepChoice:
    """How ``keep="auto"`` was settled for one layer: ``"preactivation"`` up to ``tokens``, ``"input"`` beyond."""

    sizes: LayerSizes
    device: str
    compiled: bool
    layers: int
    free_bytes: int | None
    tokens: int

    def __str__(self) -> str:
        return f'keep="auto" for {self.sizes} on {self.device}{", compiled" if self.compiled else ""}: {self._limits()}'

    def _limits(self) -> str:
        if self.free_bytes is None:
            return '"preactivation", since the free memory of the device is unknown'
        kept = _estimate(1 << 20, self.sizes, "preactivation", self.compiled).kept / 2**20
        return (
            f'"preactivation" up to {self.tokens} tokens, "input" beyond: {self.free_bytes / 2**30:.2f} GiB are free, '
            f"{_USABLE:.0%} of which are for a step of {self.layers} such layers, which keep {kept:.0f} bytes a token each"
        )


_choices: deque[KeepChoice] = deque(maxlen=64)


def recent_choices() -> list[KeepChoice]:
    """What ``keep="auto"`` was settled to, oldest first; ``str`` of a choice says why."""
    return list(_choices)


def forget_choices() -> None:
    """Let ``keep="auto"`` look at the free memory again, in eager calls and in what is compiled from now on."""
    _choices.clear()
    _choose.cache_clear()


def choose_keep(T: int, sizes: LayerSizes, device: torch.device, compiled: bool = False) -> str:
    """``"preactivation"``, the fastest, if it fits the memory free now; else ``"input"``, which goes in chunks of tokens.

    It fits if ``config.layers_in_flight`` times what a layer keeps, and the rest of one layer's peak, are at most 90% of
    the free memory of the device. That is looked at once for each kind of layer and device: with ``torch.compile`` at
    compile time. What is allocated later, such as optimizer state, is not seen. Eager calls stick to the answer, so that
    a checkpointed layer does the same when it is run again. A compiled graph guards on T, not on the memory; on a GPU it
    is taken to be Inductor's, which needs less.
    """
    layer = (sizes.D, sizes.F, sizes.E, sizes.K, sizes.dtype, sizes.gated)
    is_inductors = compiled and device.type == "cuda"
    limit = _token_limit(*layer, device.type, device.index, is_inductors, config.layers_in_flight)
    return "preactivation" if limit >= T else "input"


def _token_limit(*given) -> int:
    """The tokens up to which ``"preactivation"`` fits; a number, so that a graph with a symbolic T can compare with it."""
    *layer, device_type, device_index, compiled, layers = given
    device = device_type if device_index is None else f"{device_type}:{device_index}"
    return _choose(LayerSizes(*layer), device, compiled, layers).tokens


# What `torch.compiler.assume_constant_result` does, without importing the compiler with this package.
_token_limit._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _choose(sizes: LayerSizes, device: str, compiled: bool, layers: int) -> KeepChoice:
    choice = _weighed(sizes, device, compiled, layers)
    log.info("%s", choice)
    _choices.append(choice)
    return choice


def _weighed(sizes: LayerSizes, device: str, compiled: bool, layers: int) -> KeepChoice:
    free = free_bytes(device)
    tokens = _LARGEST_T if free is None else _largest_fitting(sizes, compiled, layers, _USABLE * free)
    return KeepChoice(sizes, device, compiled, layers, free, tokens)


def _settled(T: int, sizes: LayerSizes, device: str, compiled: bool) -> str:
    """What ``choose_keep`` has settled, or would settle now: an estimate before a layer exists must not decide for it."""
    asked = (sizes, device, compiled, config.layers_in_flight)
    known = (choice for choice in _choices if (choice.sizes, choice.device, choice.compiled, choice.layers) == asked)
    choice = next(known, None) or _weighed(*asked)
    return "preactivation" if choice.tokens >= T else "input"


def _largest_fitting(sizes: LayerSizes, compiled: bool, layers: int, budget: float) -> int:
    def too_many(T: int) -> bool:
        estimate = _estimate(T, sizes, "preactivation", compiled, _most_rows_bytes)
        return (layers - 1) * estimate.kept + estimate.peak > budget

    return bisect.bisect_left(range(_LARGEST_T), True, key=too_many) - 1


def free_bytes(device: str) -> int | None:
    """Bytes that can still be allocated on ``device``, PyTorch's own cache included; None where it is unknown."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if torch.device(device).type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
