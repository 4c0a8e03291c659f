"""h in 8 bits, as ``keep="h8"`` keeps it for backward: integers with a scale for 32 columns of a row.

    h = s * q * (127 + |q|)      |q| = round(sqrt(63.5 ** 2 + |h| / s) - 63.5)      s = SCALE * max |h| over the block, in bf16

Steps grow with the number, by 3 from zero to the largest: what is near zero is kept twice as well as by equal steps, and what
stands beside one large number loses less. e4m3, the 8-bit float of GPUs, has four times the error (``benchmarks/NOTES.md``).

A row of gate or of up is F integers, padded to 16, and behind them its scales, padded to 16 bytes: 8.5 bits a number where F is a
multiple of 256.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Columns that share a scale."""

SCALE = (1 + 2**-8) / (2 * 127 * 127)
"""Of the largest number, whose q is to be 127 at most however its scale is rounded."""


def integers_width(columns: int) -> int:
    """Bytes of a row before its scales."""
    return (columns + 15) // 16 * 16


def row_width(columns: int) -> int:
    """Bytes of a row."""
    return integers_width(columns) + (columns + 255) // 256 * 16


def without_memory(like: Tensor, N: int, G: int, columns: int) -> Tensor:
    """A tensor of the shape of h, whose gradient is that of h: it has one element in memory, which nobody reads."""
    return like.new_empty_strided((N, G, columns), (0, 0, 0))


def packed(h_NGF: Tensor) -> Tensor:
    """h in 8 bits, [N, G, row_width(F)] int8."""
    columns = h_NGF.shape[2]
    blocks = F.pad(h_NGF.float(), (0, -columns % BLOCK)).unflatten(2, (-1, BLOCK))
    scales = (blocks.abs().amax(3) * SCALE).to(torch.bfloat16)
    steps = blocks.abs() / scales.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(3)
    integers = (((steps + 63.5**2).sqrt() - 63.5).round() * blocks.sign()).flatten(2).to(torch.int8)
    h8_NGB = integers.new_zeros((*h_NGF.shape[:2], row_width(columns)))
    h8_NGB[..., :columns] = integers[..., :columns]
    h8_NGB[..., integers_width(columns) :][..., : 2 * scales.shape[2]] = scales.view(torch.int8)
    return h8_NGB


def unpacked(h8_NGB: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """What ``packed`` kept of a number of columns, [N, G, columns], rounded to ``dtype``."""
    integers = h8_NGB[..., :columns].float()
    scales = h8_NGB[..., integers_width(columns) :].contiguous().view(torch.bfloat16).float()
    return (integers * (integers.abs() + 127) * scales.repeat_interleave(BLOCK, 2)[..., :columns]).to(dtype)
