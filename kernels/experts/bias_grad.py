"""Gradient of an expert bias: sums over the rows of each expert.

    db[e, :] = sum over rows r of e:  scale[r] * rows[r, :]                  rows in expert order
                                 or:  scale[r] * rows[slots[r] // K, :]      rows in token order (gathered)

Bound by memory. Each expert's rows are cut into SPLITS equal parts so that few experts still fill the device; a program sums
one part of a stretch of columns, and the parts are added in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import bias_grad_splits, choose_bias_grad
from moeblaze_ops.kernels.launch import ceil_div, is_multiple, launch, static_size
from moeblaze_ops.kernels.tiles import load_slot_weights, load_tile


@triton.jit
def _expert_bias_grad_kernel(
    rows_ptr, weights_ptr, slots_ptr, offsets_ptr, parts_ptr,
    E, C,
    stride_rows_n, stride_rows_c, stride_weights_t, stride_weights_k,
    TOP_K: tl.constexpr, GATHERED: tl.constexpr, EVEN_C: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    num_col_tiles = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % num_col_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(0) // num_col_tiles % SPLITS
    expert = tl.program_id(0) // num_col_tiles // SPLITS
    col_in = cols < C

    first = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    part_rows = tl.cdiv(end - first, SPLITS)
    first += part * part_rows
    end = tl.minimum(end, first + part_rows)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for row in range(first, end, BLOCK_N):
        rows = row + tl.arange(0, BLOCK_N)
        row_in = rows < end
        sources = rows
        if GATHERED or weights_ptr is not None:
            slots = tl.load(slots_ptr + rows, mask=row_in, other=0)
            if GATHERED:
                sources = slots // TOP_K
        tile = rows_ptr + sources.to(tl.int64)[:, None] * stride_rows_n + cols[None, :] * stride_rows_c
        values = load_tile(tile, row_in, col_in, False, EVEN_C).to(tl.float32)  # [BLOCK_N, BLOCK_C]
        if weights_ptr is not None:
            scale = load_slot_weights(weights_ptr, slots, row_in, stride_weights_t, stride_weights_k, TOP_K)
            values *= scale[:, None]
        total += values
    parts_row = parts_ptr + (part * E + expert).to(tl.int64) * C
    tl.store(parts_row + cols, tl.sum(total, axis=0).to(parts_ptr.dtype.element_ty), mask=col_in)


def launch_expert_bias_grad(
    rows: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> Tensor:
    """``expert_bias_grad`` on CUDA: column sums over each expert's rows, contiguous."""
    splits = _num_splits(offsets_E1, rows)
    # One part is the result: written in its dtype.
    parts_dtype = rows.dtype if splits == 1 else torch.float32
    parts_SEC = _launch(rows, weights_TK, slots_N, offsets_E1, top_k, gathered, splits, parts_dtype)
    return parts_SEC.select(0, 0) if splits == 1 else parts_SEC.sum(0).to(rows.dtype)


def launch_expert_bias_grad_add(
    rows: Tensor,
    db_EC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> None:
    """``expert_bias_grad_add`` on CUDA; ``db_EC`` may have any strides."""
    splits = _num_splits(offsets_E1, rows)
    parts_SEC = _launch(rows, weights_TK, slots_N, offsets_E1, top_k, gathered, splits, torch.float32)
    db_EC.add_(parts_SEC.sum(0))


def _num_splits(offsets_E1, rows) -> int:
    C = rows.shape[1]
    num_col_tiles = ceil_div(C, choose_bias_grad(static_size(C)).columns)
    return bias_grad_splits(offsets_E1.shape[0] - 1, static_size(num_col_tiles))


def _launch(rows, weights_TK, slots_N, offsets_E1, top_k, gathered, splits, parts_dtype):
    """The sums of every part. Shape [splits, E, C]."""
    num_experts = offsets_E1.shape[0] - 1
    C = rows.shape[1]
    config = choose_bias_grad(static_size(C))
    parts_SEC = rows.new_empty((splits, num_experts, C), dtype=parts_dtype)
    launch(
        _expert_bias_grad_kernel,
        num_experts * splits * ceil_div(C, config.columns),
        rows, weights_TK, slots_N, offsets_E1, parts_SEC,
        num_experts, C,
        *rows.stride(), *(weights_TK.stride() if weights_TK is not None else (0, 0)),
        TOP_K=top_k, GATHERED=gathered, EVEN_C=is_multiple(C, config.columns), SPLITS=splits,
        BLOCK_N=config.rows, BLOCK_C=config.columns, num_warps=config.num_warps, num_stages=2,
    )  # fmt: skip
    return parts_SEC
