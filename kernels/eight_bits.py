"""h in 8 bits, as ``keep="h8"`` keeps it for backward: integers with a scale for 16 columns of a row.

    h = q * s      q = round(h / s), -127 to 127      s = max |h| / 127 over the block, rounded up to (4, 5, 6 or 7) * 2 ** n

A scale is a byte: n goes from -42 to 21, and h to 1.8e9. e4m3, the 8-bit float of GPUs, has five times the error
(``benchmarks/NOTES.md``).

A row of gate or of up is F integers, padded to 16 bytes, and behind them its scales, padded to 16 bytes: 8.5 bits a number
where F is a multiple of 256.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
"""Columns that share a scale."""

SCALE_SHIFT = 21
"""Of a byte, to where fp32 has its exponent, but for the two bits that are behind it."""

SCALE_BIAS = (127 - 40) * 4 + 128
"""Added to a byte before."""


def integers_width(columns: int) -> int:
    """Bytes of a row before its scales."""
    return (columns + 15) // 16 * 16


def row_width(columns: int) -> int:
    """Bytes of a row."""
    return integers_width(columns) + (columns + 255) // 256 * 16


def without_memory(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of the shape of h, whose gradient is that of h: it has one element in memory, which nobody reads."""
    return like.new_empty_strided(shape, (0, 0, 0))


def packed(h_NGF: Tensor) -> Tensor:
    """h in 8 bits, [N, G, row_width(F)] int8."""
    columns = h_NGF.shape[2]
    blocks = F.pad(h_NGF.float(), (0, -columns % BLOCK)).unflatten(2, (-1, BLOCK))
    bits = (blocks.abs().amax(3) * (1 / 127)).view(torch.int32)
    codes = ((bits + (1 << SCALE_SHIFT) - 1 >> SCALE_SHIFT) - SCALE_BIAS).clamp(-128, 127).to(torch.int8)
    integers = (blocks / _scales(codes).unsqueeze(3)).round().to(torch.int8).flatten(2)
    h8_NGB = integers.new_zeros((*h_NGF.shape[:2], row_width(columns)))
    h8_NGB[..., :columns] = integers[..., :columns]
    h8_NGB[..., integers_width(columns) :][..., : codes.shape[2]] = codes
    return h8_NGB


def unpacked(h8_NGB: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """What ``packed`` kept of a number of columns, [N, G, columns], rounded to ``dtype``."""
    scales = _scales(h8_NGB[..., integers_width(columns) :])
    return (h8_NGB[..., :columns] * scales.repeat_interleave(BLOCK, 2)[..., :columns]).to(dtype)


def _scales(codes: Tensor) -> Tensor:
    return (codes.int() + SCALE_BIAS << SCALE_SHIFT).view(torch.float32)
