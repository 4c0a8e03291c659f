"""Tiles of h in the 8 bits of ``kernels/eight_bits.py``, as the portable kernels write and read them."""

import triton
import triton.language as tl

from moeblaze_ops.kernels import eight_bits

_BLOCK = tl.constexpr(eight_bits.BLOCK)
_SCALE = tl.constexpr(eight_bits.SCALE)


@triton.jit
def _scales_of(row_ptrs, F):
    """Where the scales of rows begin, which begin at ``row_ptrs``."""
    return (row_ptrs + (F + 15) // 16 * 16).to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def row_width(F):
    """Bytes of a row of gate or of up."""
    return (F + 15) // 16 * 16 + (F + 255) // 256 * 16


@triton.jit
def load_eight_bits(row_ptrs, cols, F, mask):
    """h of rows that begin at ``row_ptrs``, [BLOCK_M, 1], at columns ``cols``, fp32."""
    integers = tl.load(row_ptrs + cols[None, :], mask=mask, other=0).to(tl.float32)
    scales = tl.load(_scales_of(row_ptrs, F) + (cols // _BLOCK)[None, :], mask=mask, other=0.0).to(tl.float32)
    return integers * (tl.abs(integers) + 127.0) * scales


@triton.jit
def store_eight_bits(h, row_ptrs, first_col, F, row_in, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a tile of h, [BLOCK_M, BLOCK_N], in rows that begin at ``row_ptrs``, from column ``first_col`` on."""
    # A tile narrower than a block has all columns.
    WIDTH: tl.constexpr = min(_BLOCK, BLOCK_N)
    NUM_BLOCKS: tl.constexpr = BLOCK_N // WIDTH
    cols = first_col + tl.arange(0, BLOCK_N)
    blocks = tl.reshape(tl.where((cols < F)[None, :], h.to(tl.float32), 0.0), (BLOCK_M, NUM_BLOCKS, WIDTH))
    scales = (tl.max(tl.abs(blocks), axis=2) * _SCALE).to(tl.bfloat16)  # [BLOCK_M, NUM_BLOCKS]
    steps = tl.abs(blocks) / tl.maximum(scales.to(tl.float32), 1.1754944e-38)[:, :, None]
    integers = (tl.sqrt(steps + 4032.25) - 63.0).to(tl.int32)
    integers = tl.reshape(tl.where(blocks < 0, -integers, integers).to(tl.int8), (BLOCK_M, BLOCK_N))
    tl.store(row_ptrs + cols[None, :], integers, mask=row_in[:, None] & (cols < F)[None, :])
    block = first_col // _BLOCK + tl.arange(0, NUM_BLOCKS)
    tl.store(_scales_of(row_ptrs, F) + block[None, :], scales, mask=row_in[:, None] & (block * _BLOCK < F)[None, :])
