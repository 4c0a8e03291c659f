"""Helpers shared by the kernels: which tile a program computes, masked loads, and the plain inner loop.

The schedule ``blocks_B2`` cuts every expert's rows into entries of ROW_BLOCK rows; a *row tile* is one BLOCK_M
part of an entry. Row tiles past an expert's end exist in the numbering and hold no rows.

What a helper returns for use in the address of a store must come from values, not from pointers it was given: the analysis
by which Inductor learns what a kernel writes takes every argument of such a call for an output, and clones it.
"""

import triton
import triton.language as tl

from moeblaze_ops.kernels.configs import ROW_BLOCK

ROWS_PER_ENTRY = tl.constexpr(ROW_BLOCK)


@triton.jit
def count_row_tiles(num_entries, BLOCK_M: tl.constexpr):
    """Row tiles of so many entries; programs beyond them have nothing to do."""
    return num_entries * (ROWS_PER_ENTRY // BLOCK_M)


@triton.jit
def grouped_order(tile, num_row_tiles, num_col_tiles, GROUP: tl.constexpr):
    """``(row_tile, col_tile)`` of a program: GROUP row tiles share a column tile, for reuse in L2."""
    first = tile // (GROUP * num_col_tiles) * GROUP
    within = tile % (GROUP * num_col_tiles)
    num_rows = tl.minimum(num_row_tiles - first, GROUP)
    return first + within % num_rows, within // num_rows


@triton.jit
def locate_row_tile(row_tile, BLOCK_M: tl.constexpr):
    """``(offset, skipped)``: where in ``blocks_B2`` the tile's entry starts, and the rows of it that come before the tile."""
    tiles_per_entry: tl.constexpr = ROWS_PER_ENTRY // BLOCK_M
    return 2 * (1 + row_tile // tiles_per_entry), row_tile % tiles_per_entry * BLOCK_M


@triton.jit
def load_tile(pointers, rows_in, cols_in, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr):
    """A 2-d block, zero outside ``rows_in`` and ``cols_in``; an axis known to be even is not tested."""
    if EVEN_ROWS and EVEN_COLS:
        return tl.load(pointers)
    elif EVEN_ROWS:
        return tl.load(pointers, mask=cols_in[None, :], other=0.0)
    elif EVEN_COLS:
        return tl.load(pointers, mask=rows_in[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=rows_in[:, None] & cols_in[None, :], other=0.0)


@triton.jit
def load_slot_weights(weights_ptr, slots, rows_in, stride_t, stride_k, TOP_K: tl.constexpr):
    """fp32 routing weight of each slot, 0 outside ``rows_in``."""
    offsets = (slots // TOP_K).to(tl.int64) * stride_t + slots % TOP_K * stride_k
    return tl.load(weights_ptr + offsets, mask=rows_in, other=0.0).to(tl.float32)


@triton.jit
def add_channels(
    total, left_rows, row_in, right_cols, col_in, stride_left_c, stride_right_c, CHANNELS: tl.constexpr
):
    """``total`` plus the product of CHANNELS columns and rows, one by one, in fp32.

    Args:
        left_rows: where each row of the left side begins, one pointer a row; ``right_cols`` likewise, one a column.
    """
    for c in tl.static_range(CHANNELS):
        left = tl.load(left_rows + c * stride_left_c, mask=row_in, other=0.0)
        right = tl.load(right_cols + c * stride_right_c, mask=col_in, other=0.0)
        total += left.to(tl.float32)[:, None] * right.to(tl.float32)[None, :]
    return total


@triton.jit
def multiply_add(a, b, accumulator, ALLOW_TF32: tl.constexpr):
    """``a @ b + accumulator`` in fp32."""
    precision: tl.constexpr = "tf32" if ALLOW_TF32 else "ieee"
    return tl.dot(a, b, accumulator, input_precision=precision)


@triton.jit
def load_parameters(params_ptr, expert, NUM_PARAMETERS: tl.constexpr):
    """What the activation of an expert reads as p0, p1 and so on."""
    parameters = ()
    for i in tl.static_range(NUM_PARAMETERS):
        value = tl.load(params_ptr + expert.to(tl.int64) * NUM_PARAMETERS + i).to(tl.float32)
        parameters = parameters + (value,)  # type: ignore[assignment]
    return parameters


@triton.jit
def offsets_of(indices, stride, WIDE: tl.constexpr):
    """``indices * stride`` in 64 bits where WIDE, in 32 where all fit: offsets that stay in registers take half as many."""
    if WIDE:
        return indices.to(tl.int64) * stride
    else:
        return indices * stride


@triton.jit
def add_rows_times_weight(
    accumulator, row_pointers, stride_row_k,
    w_ptr, stride_w_k, w_cols, col_in,
    num_contracted, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, ALLOW_TF32: tl.constexpr,
):  # fmt: skip
    """``accumulator`` plus the product of whole rows, one pointer each, with columns of one expert's weight, whose offsets are
    ``w_cols``.

    Every pointer must be readable: rows past an expert's end may be any, since a row of the product depends on no other
    row, and a clamped pointer costs the loop nothing while a mask does.
    """
    ks = tl.arange(0, BLOCK_K)
    row_tile = row_pointers[:, None] + ks[None, :] * stride_row_k  # [BLOCK_M, BLOCK_K]
    # The weight's one pointer moves and the offsets stay: a pointer for each element would be twice the registers to step.
    w_offsets = ks.to(w_cols.dtype)[:, None] * stride_w_k + w_cols[None, :]  # [BLOCK_K, BLOCK_N]
    for k in range(0, num_contracted, BLOCK_K):
        in_k = k + ks < num_contracted
        rows = load_tile(row_tile, in_k, in_k, True, EVEN_K)  # [BLOCK_M, BLOCK_K]
        w = load_tile(w_ptr + w_offsets, in_k, col_in, EVEN_K, EVEN_N)  # [BLOCK_K, BLOCK_N]
        accumulator = multiply_add(rows, w, accumulator, ALLOW_TF32)
        row_tile += BLOCK_K * stride_row_k
        w_ptr += BLOCK_K * stride_w_k
    return accumulator


@triton.jit
def add_low_rank(
    accumulator, row_pointers, stride_row_r,
    w_ptr, stride_w_r, stride_w_n, cols, num_cols,
    R: tl.constexpr, BLOCK_R: tl.constexpr, EVEN_N: tl.constexpr, ALLOW_TF32: tl.constexpr,
):  # fmt: skip
    """``accumulator`` plus the product of R more columns of whole rows with columns of one expert's low-rank factor.

    Pointers are as for ``add_rows_times_weight``.
    """
    rs = tl.arange(0, BLOCK_R)
    row_tile = row_pointers[:, None] + rs[None, :] * stride_row_r  # [BLOCK_M, BLOCK_R]
    w_tile = w_ptr + rs.to(tl.int64)[:, None] * stride_w_r + cols.to(tl.int64)[None, :] * stride_w_n  # [BLOCK_R, BLOCK_N]
    # One step for most ranks: nothing is gained by stages, which would take shared memory beside those of the other loop.
    for r in tl.range(0, R, BLOCK_R, num_stages=1):
        in_r = r + rs < R
        rows = load_tile(row_tile, in_r, in_r, True, R % BLOCK_R == 0)
        w = load_tile(w_tile, in_r, cols < num_cols, R % BLOCK_R == 0, EVEN_N)
        accumulator = multiply_add(rows, w, accumulator, ALLOW_TF32)
        row_tile += BLOCK_R * stride_row_r
        w_tile += BLOCK_R * stride_w_r
    return accumulator
