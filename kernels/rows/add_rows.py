"""Adds a range of rows to the tokens that they belong to.

    out[t, :] += sum_k weights[t, k] * rows[positions[t, k] - first_row, :]        over the slots whose row is in the range

What ``combine`` does of the first rows, for those behind them: few tokens have more than one row among them, so that a
program takes a stretch of D of one token and passes over the slots without. Where there are fewer rows than tokens, programs
are those of the rows, and that of a token's first row takes the token.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_add_rows
from moeblaze_ops.kernels.launch import ceil_div, is_multiple, launch, static_size


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _add_rows_kernel(
    rows_ptr, weights_ptr, slots_ptr, positions_ptr, out_ptr,
    D,
    stride_weights_t, stride_weights_k, stride_out_t,
    first_row, num_rows,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    num_col_tiles = tl.cdiv(D, BLOCK_D)
    token = (tl.program_id(0) // num_col_tiles).to(tl.int64)
    slot = token
    if BY_ROW:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        token = tl.maximum(slot, 0) // TOP_K
    cols = tl.program_id(0) % num_col_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    col_in = (cols < D) | EVEN_D
    positions_ptr += token * TOP_K
    ks = tl.arange(0, BLOCK_K)
    rows = tl.load(positions_ptr + ks, mask=ks < TOP_K, other=-1) - first_row
    is_inside = (rows >= 0) & (rows < num_rows)
    takes_token = tl.max(is_inside.to(tl.int32), 0) > 0
    if BY_ROW:
        takes_token = takes_token & (slot == token * TOP_K + tl.min(tl.where(is_inside, ks, TOP_K), 0))
    if takes_token:
        out_ptrs = out_ptr + token * stride_out_t + cols
        total = tl.load(out_ptrs, mask=col_in, other=0.0).to(tl.float32)
        for k in range(TOP_K):
            row = tl.load(positions_ptr + k).to(tl.int64) - first_row
            if (row >= 0) & (row < num_rows):
                values = tl.load(rows_ptr + row * D + cols, mask=col_in, other=0.0).to(tl.float32)
                if weights_ptr is not None:
                    weight = tl.load(weights_ptr + token * stride_weights_t + k * stride_weights_k)
                    values *= weight.to(tl.float32)
                total += values
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=col_in)


def add_rows(
    rows_ND: Tensor,
    weights_TK: Tensor | None,
    positions_TK: Tensor,
    out_TD: Tensor,
    slots_N: Tensor,
    first_row: int,
) -> None:
    """Adds to each token the weighted sum of its rows, if it has any.

    Args:
        rows_ND: a range of the rows in expert order, or a range of their columns. Shape [N, D], contiguous.
        weights_TK: routing weights, or None for 1. Shape [T, K], any strides.
        positions_TK: row of each slot among all rows, -1 for none, int32, contiguous.
        out_TD: what is added to. Shape [T, D], rows_ND's dtype, contiguous in D; a range of columns of a wider tensor.
        slots_N: slot of each of these rows, int32, contiguous.
        first_row: position of the first of these rows, greater than 0.

    fp32 sums in order of k, rounded once; two runs agree bit for bit.
    """
    T, top_k = positions_TK.shape
    num_rows, D = rows_ND.shape
    config = choose_add_rows(static_size(D))
    by_row = num_rows < T
    launch(
        _add_rows_kernel,
        (num_rows if by_row else T) * ceil_div(D, config.columns),
        rows_ND, weights_TK, slots_N, positions_TK, out_TD,
        D,
        *(weights_TK.stride() if weights_TK is not None else (0, 0)), out_TD.stride(0),
        first_row, num_rows,
        TOP_K=top_k, BY_ROW=by_row, EVEN_D=is_multiple(D, config.columns),
        BLOCK_K=triton.next_power_of_2(top_k), BLOCK_D=config.columns, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
