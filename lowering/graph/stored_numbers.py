"""What a dtype makes of one number."""

import math
import struct

import torch

_LETTERS = {torch.float64: "d", torch.float32: "f", torch.float16: "e"}


def stored_number(number: float, dtype: torch.dtype) -> float | None:
    """The number that an element of ``dtype`` holds after ``number`` was stored there; None where that is not defined.

    stored_number(1.5, torch.int64) is 1, stored_number(0.5, torch.bool) is 1, stored_number(300, torch.uint8) is 44
    """
    if dtype == torch.bool:
        return int(number != 0)
    if dtype.is_floating_point:
        return _rounded(float(number), dtype)
    if not math.isfinite(number) or dtype.is_complex:
        return None
    limits = torch.iinfo(dtype)
    whole = int(number)
    if limits.min <= whole <= limits.max:
        return whole
    return None if isinstance(number, float) else (whole - limits.min) % 2**limits.bits + limits.min


def _rounded(number: float, dtype: torch.dtype) -> float | None:
    if not math.isfinite(number):
        return number
    if dtype == torch.bfloat16:
        return _rounded_to_bfloat16(number)
    if dtype not in _LETTERS:
        return None
    try:
        return struct.unpack(_LETTERS[dtype], struct.pack(_LETTERS[dtype], number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def _rounded_to_bfloat16(number: float) -> float:
    """The upper half of the bits of fp32, to the nearest one and of two the even one."""
    single = _rounded(number, torch.float32)
    if not math.isfinite(single):
        return single
    (bits,) = struct.unpack("I", struct.pack("f", single))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("f", struct.pack("I", bits >> 16 << 16))[0]
