"""Gradient of an expert weight: a product contracted over the rows of each expert.

    dw[e, g, f, :] = sum over rows r of e:  scale[r] * grouped[r, g, f] * gathered[slots[r] // K, :]

``grouped`` is in expert order (dh, or the scaled activation) and ``gathered`` in token order (x, or dout), read through the
index along the contraction. A program computes one tile of BLOCK_M columns of D by BLOCK_N of F for one expert, so that few
columns are read by index, and walks over all of its rows; full blocks need no masks, and the last partial one is peeled off.
Masked rows load as zero on *both* sides, so Inf or NaN of the next expert's rows cannot leak in. An expert without rows gets
zeros.

The same kernel adds to gradients that exist, of any float dtype: the program that owns a tile sums its rows in fp32, adds
what the tile held and rounds once. An expert without rows keeps what it has. Where the rows come in parts, experts that
begin in a part can be marked as fresh: their tiles are written, not added to.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_weight_grad
from moeblaze_ops.kernels.hopper import ops as hopper_ops
from moeblaze_ops.kernels.launch import (
    allows_tf32,
    capability,
    ceil_div,
    has_wide_offsets,
    is_multiple,
    launch,
    operands,
    static_size,
)
from moeblaze_ops.kernels.select import readable, why_portable
from moeblaze_ops.kernels.tiles import grouped_order, load_slot_weights, load_tile, multiply_add, offsets_of


@triton.jit
def _add_row_block(
    accumulator, rows, row_in, cols_f, cols_d, F, D,
    gathered_ptr, grouped_ptr, grouped_offsets, weights_ptr, slots_ptr,
    stride_gathered_t, stride_gathered_d, stride_weights_t, stride_weights_k,
    TOP_K: tl.constexpr, WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr,
    FULL: tl.constexpr, EVEN_F: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """``accumulator`` plus the outer products of BLOCK_K rows; FULL means that every row is in."""
    # A mask would have the gather wait for more than the slots.
    if FULL:
        slots = tl.load(slots_ptr + rows)
    else:
        slots = tl.load(slots_ptr + rows, mask=row_in, other=0)
    rows_of_tokens = offsets_of(slots // TOP_K, stride_gathered_t, WIDE)
    gathered_tile = gathered_ptr + rows_of_tokens[:, None] + cols_d[None, :] * stride_gathered_d
    gathered = load_tile(gathered_tile, row_in, cols_d < D, FULL, EVEN_D)  # [BLOCK_K, BLOCK_M]
    grouped = load_tile(grouped_ptr + grouped_offsets, row_in, cols_f < F, FULL, EVEN_F)  # [BLOCK_K, BLOCK_N]
    if weights_ptr is not None:
        scale = load_slot_weights(weights_ptr, slots, row_in, stride_weights_t, stride_weights_k, TOP_K)
        grouped = (grouped.to(tl.float32) * scale[:, None]).to(gathered.dtype)
    return multiply_add(tl.trans(gathered), grouped, accumulator, ALLOW_TF32)


@triton.jit
def _expert_weight_grad_kernel(
    gathered_ptr, grouped_ptr, weights_ptr, slots_ptr, offsets_ptr, fresh_ptr, dw_ptr,
    F, D,
    stride_gathered_t, stride_gathered_d, stride_grouped_n, stride_grouped_g, stride_grouped_f,
    stride_weights_t, stride_weights_k, stride_dw_e, stride_dw_g, stride_dw_f, stride_dw_d,
    G: tl.constexpr, TOP_K: tl.constexpr, WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr, EVEN_F: tl.constexpr,
    EVEN_D: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_f_tiles = tl.cdiv(F, BLOCK_N)
    num_d_tiles = tl.cdiv(D, BLOCK_M)
    tiles_per_expert = G * num_f_tiles * num_d_tiles
    expert = tl.program_id(0) // tiles_per_expert
    f_tile, d_tile = grouped_order(tl.program_id(0) % tiles_per_expert, G * num_f_tiles, num_d_tiles, GROUP)
    g = f_tile // num_f_tiles
    cols_f = f_tile % num_f_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    cols_d = d_tile * BLOCK_M + tl.arange(0, BLOCK_M)

    first = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    full_end = first + (end - first) // BLOCK_K * BLOCK_K
    ks = tl.arange(0, BLOCK_K)
    grouped_ptr += first.to(tl.int64) * stride_grouped_n + g.to(tl.int64) * stride_grouped_g
    grouped_offsets = ks[:, None] * stride_grouped_n + cols_f[None, :] * stride_grouped_f
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(first, full_end, BLOCK_K):
        rows = row + ks
        accumulator = _add_row_block(
            accumulator, rows, rows < end, cols_f, cols_d, F, D,
            gathered_ptr, grouped_ptr, grouped_offsets, weights_ptr, slots_ptr,
            stride_gathered_t, stride_gathered_d, stride_weights_t, stride_weights_k,
            TOP_K, WIDE, ALLOW_TF32, True, EVEN_F, EVEN_D,
        )  # fmt: skip
        grouped_ptr += BLOCK_K * stride_grouped_n
    if full_end < end:
        rows = full_end + ks
        accumulator = _add_row_block(
            accumulator, rows, rows < end, cols_f, cols_d, F, D,
            gathered_ptr, grouped_ptr, grouped_offsets, weights_ptr, slots_ptr,
            stride_gathered_t, stride_gathered_d, stride_weights_t, stride_weights_k,
            TOP_K, WIDE, ALLOW_TF32, False, EVEN_F, EVEN_D,
        )  # fmt: skip

    dw_ptr += expert.to(tl.int64) * stride_dw_e + g.to(tl.int64) * stride_dw_g
    dw_rows = dw_ptr + cols_d.to(tl.int64)[:, None] * stride_dw_d
    d_in = (cols_d < D)[:, None]
    if ACCUMULATE:
        is_fresh = False
        if fresh_ptr is not None:
            is_fresh = tl.load(fresh_ptr + expert) != 0
        # Half by half: what dW held would not fit in registers beside the whole tile.
        left, right = tl.split(tl.permute(tl.reshape(accumulator, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        half_f = f_tile % num_f_tiles * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        if is_fresh | (first < end):
            _add_tile(left, dw_rows, half_f, d_in, F, stride_dw_f, is_fresh)
            _add_tile(right, dw_rows, half_f + BLOCK_N // 2, d_in, F, stride_dw_f, is_fresh)
    else:
        dw_tile = dw_rows + cols_f.to(tl.int64)[None, :] * stride_dw_f  # [BLOCK_M, BLOCK_N]
        tl.store(dw_tile, accumulator.to(dw_ptr.dtype.element_ty), mask=d_in & (cols_f < F)[None, :])


@triton.jit
def _add_tile(values, dw_rows, cols_f, rows_in, F, stride_dw_f, is_fresh):
    """``values`` plus what dW holds there, unless it is fresh, back to dW."""
    dw_tile = dw_rows + cols_f.to(tl.int64)[None, :] * stride_dw_f
    tile_in = rows_in & (cols_f < F)[None, :]
    sums = values + tl.load(dw_tile, mask=tile_in & (is_fresh == 0), other=0.0).to(tl.float32)
    tl.store(dw_tile, sums.to(dw_rows.dtype.element_ty), mask=tile_in)


def launch_expert_weight_grad(
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    like: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
) -> list[Tensor]:
    """``expert_weight_grad`` on CUDA; ``like`` may be on any device."""
    gradients = [torch.empty_like(weight, device=gathered_TD.device) for weight in like]
    _launch(gathered_TD, grouped_NGF, gradients, weights_TK, slots_N, offsets_E1, top_k, accumulate=False)
    return gradients


def launch_expert_weight_grad_add(
    gathered_TD: Tensor, grouped_NGF: Tensor, dw: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, top_k: int,
    fresh_E: Tensor | None = None, order_E1: Tensor | None = None, early: bool = False,
) -> None:  # fmt: skip
    """``expert_weight_grad_add`` on CUDA.

    Args:
        fresh_E: 1 for experts whose gradient is written instead, zeros without rows, else 0; int32, contiguous, or None. With
            it dw is of the dtype of gathered.
        order_E1: the order in which ``launch_range_routing`` gives the experts, where that is known.
        early: as for ``hopper_weight_grad``; the portable kernel does not.
        Others: those of the op.
    """
    _launch(gathered_TD, grouped_NGF, dw, weights_TK, slots_N, offsets_E1, top_k, True, fresh_E, order_E1, early)


def _launch(
    gathered_TD, grouped_NGF, dw, weights_TK,
    slots_N, offsets_E1, top_k,
    accumulate, fresh_E=None, order_E1=None, early=False,
) -> None:  # fmt: skip
    """Fills ``dw``, or adds to it, with the Hopper kernel or the portable one."""
    gathered_TD, weighted = readable(gathered_TD), weights_TK is not None
    hopper_operands = {"gathered": gathered_TD, "rows": (grouped_NGF,), "weights": dw, "weight_on_input": weighted}
    stored_alike = all(part.stride() == dw[0].stride() for part in dw[1:])
    if why_portable("expert_weight_grad", **hopper_operands) is None and (stored_alike or not accumulate):
        second = dw[1] if len(dw) == 2 else None
        routing, marks = (slots_N, offsets_E1, top_k), (fresh_E, order_E1)
        hopper_ops.weight_grad(gathered_TD, grouped_NGF, *routing, accumulate, dw[0], second, *marks, early)
        return
    for first_g, part in enumerate(dw):
        part_EGFD = part.unsqueeze(1) if part.dim() == 3 else part
        grouped = grouped_NGF.narrow(1, first_g, part_EGFD.shape[1])
        _launch_portable(gathered_TD, grouped, part_EGFD, weights_TK, slots_N, offsets_E1, top_k, accumulate, fresh_E)


def _launch_portable(gathered_TD, grouped_NGF, dw_EGFD, weights_TK, slots_N, offsets_E1, top_k, accumulate, fresh_E) -> None:
    num_experts, G, F, D = dw_EGFD.shape
    config = choose_weight_grad(operands(gathered_TD), static_size(F), static_size(D), capability(gathered_TD))
    launch(
        _expert_weight_grad_kernel,
        num_experts * G * ceil_div(F, config.block_n) * ceil_div(D, config.block_m),
        gathered_TD, grouped_NGF, weights_TK, slots_N, offsets_E1, fresh_E, dw_EGFD,
        F, D,
        *gathered_TD.stride(), *grouped_NGF.stride(), *(weights_TK.stride() if weights_TK is not None else (0, 0)),
        *dw_EGFD.stride(),
        G=G, TOP_K=top_k, WIDE=has_wide_offsets([gathered_TD], first_axis=0), ALLOW_TF32=allows_tf32(),
        EVEN_F=is_multiple(F, config.block_n), EVEN_D=is_multiple(D, config.block_m), ACCUMULATE=accumulate,
        **config.options,
    )  # fmt: skip
