"""Which kernels run: the Gluon kernels for Hopper, or the portable ones. The only place that decides.

Hopper kernels need compute capability 9.0, bf16 or fp16, widths that are multiples of 8 and operands that TMA can
describe. Where experts have few rows, as in decoding, the weights are what a projection waits for, and the portable kernels'
tiles of 16 rows read them faster. ``why_portable`` says what speaks for the portable kernels; launchers ask it, and so can a
person (the ``moeblaze_ops`` logger at debug level).
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moeblaze_ops.kernels.launch import IS_INTERPRETED, capability, ceil_div, static_size
from moeblaze_ops.kernels.settings import settings

log = logging.getLogger(__name__)

_HOPPER = (9, 0)
_ALIGNMENT = 8
"""Elements of two bytes in 16 bytes: what TMA and 16-byte copies ask of strides and of the first element."""
_FEW_ROWS = 16
"""Rows of an expert on average up to which a tile of the portable kernels, 16 rows, has most of them. Measured up to here."""


def why_portable(
    kernel: str,
    *,
    gathered: Tensor | None = None,
    weights: Sequence[Tensor],
    rows: tuple[Tensor, ...] = (),
    scale: Tensor | None = None,
    biases: Sequence[Tensor] = (),
    weight_on_input: bool = False,
    low_rank: Tensor | None = None,
    rows_per_expert: int | None = None,
) -> str | None:
    """Why the portable form of ``kernel`` has to run, or None when the Hopper form can.

    Args:
        kernel: name for the log.
        gathered: rows in token order that are read through the index, [T, D].
        weights: weights or their gradients, [E, G, F, D] or [E, F, D] each.
        rows: tensors in expert order.
        scale: routing weights.
        biases: biases, F or D last.
        weight_on_input: the routing weights scale the experts' input.
        low_rank: what of a low-rank addition is in expert order.
        rows_per_expert: rows of an expert on average, of a projection that is faster where they are few; None where it is not.
    """
    reason = _why_not(gathered, weights, rows, scale, biases, weight_on_input, low_rank)
    if reason is None and rows_per_expert is not None and rows_per_expert <= _FEW_ROWS:
        reason = f"an expert has {rows_per_expert} rows on average, no more than {_FEW_ROWS}"
    log.debug("%s: %s", kernel, "Hopper kernels" if reason is None else f"portable kernels, because {reason}")
    return reason


def is_batch_invariant() -> bool:
    """True if no bit of a token's results may depend on the other tokens."""
    return settings().batch_invariant


def mean_rows(num_rows: int, num_experts: int) -> int | None:
    """Rows of an expert on average, rounded up; ``None`` when either is symbolic, and where no bit may depend on it."""
    if is_batch_invariant() or static_size(num_rows) is None or static_size(num_experts) is None:
        return None
    return ceil_div(num_rows, max(1, num_experts))


def readable(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy that Hopper kernels can read, where the place of a part of a batch in memory may choose no kernel."""
    width = static_size(tensor.shape[1])
    if not is_batch_invariant() or width is None:
        return tensor
    # Routing weights are read one by one, wherever they begin a multiple of 16 bytes; rows that never are stay as they are.
    is_aligned = _is_aligned(tensor) and (width % _ALIGNMENT != 0 or _is_aligned(tensor, tensor.stride(0)))
    return tensor if tensor.stride(1) == 1 and is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def _why_not(gathered, weights, rows, scale, biases, weight_on_input, low_rank) -> str | None:
    first = weights[0]
    if settings().hopper == "off":
        return "config.hopper is 'off'"
    if first.device.type != "cuda" or IS_INTERPRETED:
        return "the tensors are not on a GPU"
    if capability(first) != _HOPPER:
        return f"the device has compute capability {capability(first)}, not {_HOPPER}"
    # Weight gradients may be summed in fp32; what is multiplied may not.
    dtype = first.dtype if gathered is None else gathered.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not a 16-bit type"
    if (missing := _missing_gluon()) is not None:
        return missing
    if low_rank is not None and not (low_rank.is_contiguous() and _is_aligned(low_rank, low_rank.shape[1])):
        return f"the low-rank addition has a rank that is no multiple of {_ALIGNMENT}"
    if weight_on_input:
        return "the routing weights apply to the experts' input"
    if not all(isinstance(size, int) and size % _ALIGNMENT == 0 for size in first.shape[-2:]):
        return f"widths F and D are not multiples of {_ALIGNMENT}: {list(first.shape[-2:])}"
    if not all(_is_described(weight) for weight in weights):
        return "a weight has neither F nor D contiguous, or strides that are no multiples of 16 bytes"
    if len({weight.stride(-1) == 1 for weight in weights}) > 1:
        return "gate and up are stored differently"
    if gathered is not None and not (gathered.stride(1) == 1 and _is_aligned(gathered, gathered.stride(0))):
        return "token rows are not contiguous or not aligned to 16 bytes"
    if not all(tensor.is_contiguous() and _is_aligned(tensor) for tensor in (rows if scale is None else (*rows, scale))):
        return "a tensor in expert order, or the routing weights, are not contiguous"
    if not all(bias.stride(-1) == 1 for bias in biases) or len({bias.stride(0) for bias in biases}) > 1:
        return "a bias is not contiguous"
    return None


def _is_described(weight: Tensor) -> bool:
    """True if TMA can read or write a weight: F or D contiguous, all else in steps of 16 bytes."""
    *others, second, last = weight.stride()
    if last != 1 and second != 1:
        return False
    return _is_aligned(weight, *others, second if last == 1 else last)


def _is_aligned(tensor: Tensor, *strides) -> bool:
    return all(isinstance(stride, int) and stride % _ALIGNMENT == 0 for stride in (tensor.storage_offset(), *strides))


@cache
def _missing_gluon() -> str | None:
    try:
        import moeblaze_ops.kernels.hopper.gluon_api  # noqa: F401
    except (ImportError, AttributeError) as error:
        reason = f"this Triton has no usable Gluon dialect ({error})"
        log.warning("the kernels for Hopper do not run, since %s; the portable ones that run instead take longer", reason)
        return reason
    return None
