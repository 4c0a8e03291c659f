"""Sums over each token's slots of rows that are dropped element by element, and the gradient of these rows.

    out[t, d]           = sum_k factor[t K + k, d] * rows[t K + k, d]            factor is 0 or 1 / (1 - p)
    drows[t K + k, d]   = factor[t K + k, d] * dout[t, d]

The factor is drawn of a seed and the place, here and there. A program takes a stretch of D of one token.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_add_rows
from moeblaze_ops.kernels.formulas.draws import draw
from moeblaze_ops.kernels.formulas.dropped import factor_of_kept
from moeblaze_ops.kernels.launch import ceil_div, is_multiple, launch, static_size


@triton.jit
def _stretch(D, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The token of a program, its columns, and which of them there are."""
    num_col_tiles = tl.cdiv(D, BLOCK_D)
    token = (tl.program_id(0) // num_col_tiles).to(tl.int64)
    cols = tl.program_id(0) % num_col_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    col_in = (cols < D) | EVEN_D
    return token, cols, col_in


@triton.jit
def _factor(seed_ptr, row, cols, p, kept_factor):
    """What the elements of a row are multiplied by. Shape [BLOCK_D], fp32."""
    return tl.where(draw(tl.load(seed_ptr), row, cols) >= p, kept_factor, 0.0)


@triton.jit
def _sum_dropped_kernel(
    rows_ptr,
    seed_ptr,
    out_ptr,
    D,
    p,
    kept_factor,
    TOP_K: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token, cols, col_in = _stretch(D, EVEN_D, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        values = tl.load(rows_ptr + row * D + cols, mask=col_in, other=0.0).to(tl.float32)
        total += values * _factor(seed_ptr, row, cols, p, kept_factor)
    tl.store(out_ptr + token * D + cols, total.to(out_ptr.dtype.element_ty), mask=col_in)


@triton.jit
def _sum_dropped_backward_kernel(
    dout_ptr, seed_ptr, drows_ptr,
    D,
    stride_dout_t, stride_dout_d,
    p, kept_factor,
    TOP_K: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, cols, col_in = _stretch(D, EVEN_D, BLOCK_D)
    dout = tl.load(dout_ptr + token * stride_dout_t + cols * stride_dout_d, mask=col_in, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        drows = dout * _factor(seed_ptr, row, cols, p, kept_factor)
        tl.store(drows_ptr + row * D + cols, drows.to(drows_ptr.dtype.element_ty), mask=col_in)


def launch_sum_dropped(rows_ND: Tensor, seed: Tensor, top_k: int, p: float) -> Tensor:
    """Returns the sums, shape [T, D]. Arguments are those of the op."""
    rows_ND = rows_ND.contiguous()
    N, D = rows_ND.shape
    out_TD = rows_ND.new_empty((N // top_k, D))
    _launch(_sum_dropped_kernel, N // top_k, rows_ND, seed, out_TD, D, top_k=top_k, p=p)
    return out_TD


def launch_sum_dropped_backward(dout_TD: Tensor, seed: Tensor, top_k: int, p: float) -> Tensor:
    """Returns the gradient of the rows, shape [N, D]."""
    T, D = dout_TD.shape
    drows_ND = dout_TD.new_empty((T * top_k, D))
    _launch(_sum_dropped_backward_kernel, T, dout_TD, seed, drows_ND, D, *dout_TD.stride(), top_k=top_k, p=p)
    return drows_ND


def _launch(kernel, num_tokens, *arguments, top_k, p):
    D = arguments[0].shape[1]
    config = choose_add_rows(static_size(D))
    launch(
        kernel,
        num_tokens * ceil_div(D, config.columns),
        *arguments,
        p,
        factor_of_kept(p),
        TOP_K=top_k,
        EVEN_D=is_multiple(D, config.columns),
        BLOCK_D=config.columns,
        num_warps=config.num_warps,
        num_stages=1,
    )
