"""What a dtype makes of one number, and which dtypes hold all numbers of another."""

import math
from collections.abc import Sequence

import torch


def is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def stored_number(number: float, dtype: torch.dtype) -> float | None:
    """The number that an element of ``dtype`` holds after ``number`` was stored there; None where that is not defined.

    stored_number(1.5, torch.int64) is 1, stored_number(0.5, torch.bool) is 1, stored_number(300, torch.uint8) is 44
    """
    if dtype == torch.bool:
        return int(number != 0)
    if dtype.is_floating_point:
        wide = torch.tensor(float(number), dtype=torch.float64, device="cpu")
        return None if dtype.itemsize < 2 else wide.to(dtype).item()
    if not math.isfinite(number) or dtype.is_complex:
        return None
    limits = torch.iinfo(dtype)
    whole = int(number)
    if limits.min <= whole <= limits.max:
        return whole
    return None if isinstance(number, float) else (whole - limits.min) % 2**limits.bits + limits.min


def holds_all(dtype: torch.dtype, source: torch.dtype) -> bool:
    """True if a cast to ``dtype`` changes no number of ``source``: to fp32 of bf16, not to bf16 of fp16."""
    if dtype == source or source == torch.bool:
        return True
    if dtype == torch.bool or dtype.is_complex or source.is_complex:
        return False
    if not dtype.is_floating_point:
        inner, outer = (None if d.is_floating_point else torch.iinfo(d) for d in (source, dtype))
        return inner is not None and outer.min <= inner.min and inner.max <= outer.max
    own = torch.finfo(dtype)
    if not source.is_floating_point:
        return torch.iinfo(source).max < min(2 / own.eps, own.max)
    other = torch.finfo(source)
    return own.eps <= other.eps and own.tiny <= other.tiny and own.max >= other.max


def underflows_no_earlier(dtype: torch.dtype, source: torch.dtype) -> bool:
    """True if a cast makes no number zero that is normal in ``source``."""
    floating = dtype.is_floating_point and source.is_floating_point
    return floating and torch.finfo(dtype).smallest_normal <= torch.finfo(source).smallest_normal


def rounds_between(dtypes: Sequence[torch.dtype]) -> bool:
    """True if casts from one dtype to the next lose more than a cast of the first to the last does.

    fp32, bf16, fp32 do; fp32, bf16 and bf16, fp32, fp16 do not, nor does one dtype alone.
    """
    return any(not holds_all(dtype, dtypes[0]) and not holds_all(dtype, dtypes[-1]) for dtype in dtypes[1:-1])
