"""Tiles of h in the 8 bits of ``kernels/eight_bits.py``, as the portable kernels write and read them."""

import triton
import triton.language as tl

from moeblaze_ops.kernels import eight_bits

_BLOCK = tl.constexpr(eight_bits.BLOCK)
_SHIFT = tl.constexpr(eight_bits.SCALE_SHIFT)
_BIAS = tl.constexpr(eight_bits.SCALE_BIAS)
_ROUND_UP = tl.constexpr((1 << eight_bits.SCALE_SHIFT) - 1)


@triton.jit
def row_width(F):
    """Bytes of a row of gate or of up."""
    return _integers_width(F) + (F + 255) // 256 * 16


@triton.jit
def _integers_width(F):
    return (F + 15) // 16 * 16


@triton.jit
def _scales(codes):
    return ((codes.to(tl.int32) + _BIAS) << _SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def load_eight_bits(row_ptrs, cols, F, mask):
    """h of rows that begin at ``row_ptrs``, [BLOCK_M, 1], at columns ``cols``, fp32."""
    integers = tl.load(row_ptrs + cols[None, :], mask=mask, other=0)
    codes = tl.load(row_ptrs + _integers_width(F) + (cols // _BLOCK)[None, :], mask=mask, other=0)
    return integers.to(tl.float32) * _scales(codes)


@triton.jit
def store_eight_bits(h, row_ptrs, first_col, F, row_in, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a tile of h, [BLOCK_M, BLOCK_N], in rows that begin at ``row_ptrs``, from column ``first_col`` on."""
    cols = first_col + tl.arange(0, BLOCK_N)
    h = tl.where((cols < F)[None, :], h.to(tl.float32), 0.0)
    blocks = tl.reshape(h, (BLOCK_M, BLOCK_N // _BLOCK, _BLOCK))
    bits = (tl.max(tl.abs(blocks), axis=2) * (1 / 127)).to(tl.int32, bitcast=True)  # [BLOCK_M, blocks]
    codes = ((bits + _ROUND_UP) >> _SHIFT) - _BIAS
    codes = tl.minimum(tl.maximum(codes, -128), 127).to(tl.int8)
    # 1.5 * 2 ** 23 has what is added to it in its last bits, rounded to an integer.
    rounded = blocks * (1.0 / _scales(codes))[:, :, None] + 12582912.0
    integers = tl.reshape(rounded.to(tl.int32, bitcast=True).to(tl.int8), (BLOCK_M, BLOCK_N))
    tl.store(row_ptrs + cols[None, :], integers, mask=row_in[:, None] & (cols < F)[None, :])
    block = first_col // _BLOCK + tl.arange(0, BLOCK_N // _BLOCK)
    tl.store(row_ptrs + _integers_width(F) + block[None, :], codes, mask=row_in[:, None] & (block * _BLOCK < F)[None, :])
