"""Random numbers of a seed and a place, which backward draws again: what dropout inside of experts keeps is the seed.

The bits are those of ``kernels/formulas/draws.py``: unsigned numbers of 32 bits, in 64 here, of which no product overflows.
Compilers of C++ take overflows of signed numbers for what never happens.
"""

import torch
from torch import Tensor

from moeblaze_ops.kernels.formulas.dropped import factor_of_kept

SEEDS = 2**24
"""Seeds are whole numbers below, which fp32 holds."""

_BITS = 2**32 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97


def draw(seed: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """A multiple of ``2 ** -23`` in [0, 1) for each place, in fp32; the three are broadcast, whole numbers of any dtype."""
    own = _mixed(row.long() ^ _mixed(seed.long()))
    bits = (own + column.long() * _GOLDEN) & _BITS
    bits = ((bits ^ (bits >> 16)) * _FIRST) & _BITS
    bits = ((bits ^ (bits >> 15)) * ((own >> 1) | 1)) & _BITS
    return (bits >> 9).float() * 2**-23


def dropped_rows(rows_ND: Tensor, seed: Tensor, p: float) -> Tensor:
    """``F.dropout(rows, p)`` with the numbers that a seed draws. Shape [N, D], dtype of the rows."""
    rows_N, columns_D = (torch.arange(size, device=rows_ND.device) for size in rows_ND.shape)
    is_kept_ND = draw(seed, rows_N.unsqueeze(1), columns_D) >= p
    wide_ND = rows_ND.to(torch.promote_types(rows_ND.dtype, torch.float32))
    return torch.where(is_kept_ND, wide_ND * factor_of_kept(p), wide_ND * 0.0).to(rows_ND.dtype)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers: each bit of x changes half the bits. Its factors: github.com/skeeto/hash-prospector."""
    x = ((x ^ (x >> 16)) * _FIRST) & _BITS
    x = ((x ^ (x >> 15)) * _SECOND) & _BITS
    return x ^ (x >> 15)
