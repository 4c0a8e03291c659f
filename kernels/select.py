"""Which kernels a GEMM runs on: the Hopper ones, or the portable ones with the reason.

The choice reads metadata only, so fake and symbolic tensors are welcome: whatever it cannot know it declines. It
never looks at token counts. ``set_backend`` is the one switch; nothing else forces or hides a backend.
"""

import importlib
import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BACKENDS = ("auto", "portable", "hopper")
ALIGNMENT = 8
"""Elements in 16 bytes, for strides, widths and bases: what TMA and 16-byte copies need."""

_backend = "auto"


@dataclass(frozen=True)
class Choice:
    """``hopper`` or not; ``reason`` says why the portable kernels run, and is empty otherwise."""

    hopper: bool
    reason: str = ""


def set_backend(name: str) -> None:
    """Forces a backend for every later choice.

    Args:
        name: ``"auto"``, ``"portable"`` (never Hopper), or ``"hopper"``, which raises where the kernels cannot run.

    Raises:
        ValueError: for another name.
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"set_backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    _backend = name


def choose_expert_up(x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], weights_TK: Tensor | None) -> Choice:
    """For ``hopper_expert_up``; ``weights_TK`` is the weight on the expert's input, or None."""
    return _choose(
        "expert_up",
        lambda: weights_TK is not None and "the routing weight multiplies the expert's input",
        lambda: _decline_rows(x_TD),
        lambda: _decline_weights(x_TD, w_up),
        lambda: _decline_biases(x_TD, b_up),
    )


def choose_down_rows(a_NF: Tensor, w_down: list[Tensor], b_down: list[Tensor]) -> Choice:
    """For ``hopper_down_rows``."""
    return _choose(
        "down_rows",
        lambda: _decline_rows(a_NF),
        lambda: _decline_weights(a_NF, w_down),
        lambda: _decline_biases(a_NF, b_down),
    )


def choose_down_backward(
    dout_TD: Tensor, h_NGF: Tensor, w_down: list[Tensor], weights_TK: Tensor | None, activation: str
) -> Choice:
    """For ``hopper_down_backward``."""
    return _choose(
        "down_backward",
        lambda: activation == "identity" and h_NGF.shape[1] != 1 and "identity has one half",
        lambda: weights_TK is not None and not weights_TK.is_contiguous() and "the routing weights are not contiguous",
        lambda: _decline_rows(dout_TD),
        lambda: _decline_rows(h_NGF.flatten(1)),
        lambda: _decline_weights(dout_TD, w_down),
    )


def choose_up_backward_rows(dh_NGF: Tensor, w_up: list[Tensor]) -> Choice:
    """For ``hopper_up_backward_rows``; what becomes of its rows afterwards is the portable kernels' affair."""
    return _choose(
        "up_backward_rows",
        lambda: _decline_rows(dh_NGF.flatten(1)),
        lambda: _decline_weights(dh_NGF, w_up),
    )


def choose_weight_grad(
    gathered_TD: Tensor, grouped_NGF: Tensor, dw: list[Tensor], weights_TK: Tensor | None
) -> Choice:
    """For ``hopper_weight_grad``; ``dw`` are the outputs or tensors with their sizes and strides."""
    return _choose(
        "weight_grad",
        lambda: weights_TK is not None and "rows are to be weighted",
        lambda: _decline_rows(gathered_TD),
        lambda: _decline_rows(grouped_NGF.flatten(1)),
        lambda: _decline_weights(gathered_TD, dw),
    )


def _choose(what: str, *checks) -> Choice:
    """Portable with the first reason that a check gives; each check returns a reason or something false."""
    if _backend == "portable":
        return Choice(False, "the portable backend is forced")
    reason = next(filter(None, (check() for check in checks)), "")
    if reason and _backend == "hopper":
        raise NotImplementedError(f'{what}: the "hopper" backend is forced, but {reason}; use set_backend("auto")')
    if reason:
        log.debug("%s: portable kernels, since %s", what, reason)
    return Choice(not reason, reason)


def _decline_rows(rows: Tensor) -> str:
    """The reason why a matrix cannot be a row operand, or an empty string."""
    if rows.device.type != "cuda":
        return f"the device is {rows.device.type}"
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {rows.dtype}"
    return _decline_device(rows.device) or _decline_layout(rows, rows.ndim - 1, "an operand")


@cache
def _decline_device(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the compute capability is {capability[0]}.{capability[1]}, not 9.0"
    try:
        importlib.import_module("moeblaze_ops.kernels.gluon_api")
    except (ImportError, AttributeError) as error:
        return f"this Triton has no usable Gluon: {error}"
    return ""


def _decline_weights(rows: Tensor, weights: list[Tensor]) -> str:
    """Weights are [E, G, F, D] or [E, F, D]: all alike, stride 1 in F or D, the rest aligned."""
    inner_axes = set()
    for weight in weights:
        if weight.dtype != rows.dtype:
            return f"weights are {weight.dtype}, rows {rows.dtype}"
        inner = next((axis for axis in (-1, -2) if _is(weight.stride(axis), 1)), None)
        if inner is None:
            return "a weight has stride 1 neither in F nor in D"
        inner_axes.add(inner)
        reason = _decline_layout(weight, weight.ndim + inner, "a weight")
        if reason:
            return reason
    return "" if len(inner_axes) == 1 else "gate and up are stored differently"


def _decline_biases(rows: Tensor, biases: list[Tensor]) -> str:
    for bias in biases:
        if bias.dtype != rows.dtype:
            return f"biases are {bias.dtype}, rows {rows.dtype}"
        if not _is(bias.stride(-1), 1):
            return "a bias is not contiguous"
        if not _is(bias.stride(0), biases[0].stride(0)):
            return "gate and up biases are stored differently"
    return ""


def _decline_layout(tensor: Tensor, inner: int, name: str) -> str:
    """Stride 1 along ``inner``, and every other stride, the inner width and the base in whole 16 bytes."""
    if not _is(tensor.stride(inner), 1):
        return f"{name} is not contiguous in its last axis"
    if not _is_aligned(tensor.shape[inner]):
        return f"{name} is {tensor.shape[inner]} wide, not a multiple of {ALIGNMENT}"
    for axis in range(tensor.ndim):
        if axis != inner and not _is_aligned(tensor.stride(axis)):
            return f"{name} has a stride of {tensor.stride(axis)}, not a multiple of {ALIGNMENT}"
    if not _is_aligned(tensor.storage_offset()):
        return f"{name} starts at element {tensor.storage_offset()} of its storage, not at a multiple of {ALIGNMENT}"
    return ""


def _is(size, value: int) -> bool:
    """Whether ``size`` is known to be ``value``; a symbolic size never is, and gets no guard."""
    return isinstance(size, int) and size == value


def _is_aligned(size) -> bool:
    return isinstance(size, int) and size % ALIGNMENT == 0
