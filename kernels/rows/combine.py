"""Gathers the K rows of each token back into token order, and the row-by-row inner products beside it.

    out[t, :]     = sum_k weights[t, k] * rows[positions[t, k], :]        weights None: 1
                    + left[t, :] @ right                                   if given
    dots[t, k]    = <rows[positions[t, k], :], tokens[t, :]>

with fp32 sums, over k in order; a position of -1 (an unused slot) adds nothing and its dot is 0. Rows come whole or a
range of columns at a time: ``out`` is then a range of columns too, with the same bits either way, and the dots are added
up, a tile of columns after the other. Of rows that are the first ones of more, positions behind them add nothing; ``add_rows``
has the others. Both are bound by memory: a program of the sum takes one stretch of D of a few tokens, or of many where a
product reuses its right side for them, with up to UNROLL row loads in flight. Where a token has many slots, as one that may go
to any number of experts, most are unused: ``token_slots`` puts the used ones first, in their order, and unused ones up to the
next multiple of UNROLL. So the first UNROLL are read without waiting for how many there are, and only tokens with more go on.

A left side of the product may be several side by side, as the parts of a number that is wider than a factor is: each is
multiplied by the one right side, which is read once for all of them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import FEW_CHANNELS, choose_combine, choose_combine_few, choose_combine_product, choose_row_dot
from moeblaze_ops.kernels.launch import allows_tf32, ceil_div, is_multiple, launch, operands, static_size
from moeblaze_ops.kernels.settings import settings
from moeblaze_ops.kernels.tiles import add_channels, load_tile, multiply_add

_LARGEST_UNROLL = 8
"""Slots of a token that are loaded at once, and up to which all of them are."""
_SOME_SLOTS = 2 * _LARGEST_UNROLL
"""Slots of a token up to which most may be used, as where some are to spare; of more, few are taken to be."""


class TokenSlots(NamedTuple):
    """What a token's sum is over, from ``token_slots``: where ``counts_T`` is given, the first so many slots of each token."""

    positions_TK: Tensor
    weights_TK: Tensor | None
    counts_T: Tensor | None = None


ColumnSums = Callable[[int, int], Iterator[tuple[int, Tensor]]]
"""Of the first column and the number of them, where sums of tokens are written: the first token, and its sums and those behind.

The next tokens are asked for when those are done."""


@triton.jit(do_not_specialize=["T", "num_rows"])
def _used_first_kernel(
    positions_ptr, weights_ptr, used_positions_ptr, used_weights_ptr, counts_ptr,
    T, num_rows,
    stride_weights_t, stride_weights_k,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    ks = tl.arange(0, BLOCK_K)
    slot_in = (tokens < T)[:, None] & (ks < TOP_K)[None, :]
    positions = tl.load(positions_ptr + tokens[:, None] * TOP_K + ks[None, :], mask=slot_in, other=-1)
    used = (positions >= 0) & (positions < num_rows)
    before = tl.cumsum(used.to(tl.int32), axis=1) - used.to(tl.int32)  # [BLOCK_T, BLOCK_K]
    counts = tl.sum(used.to(tl.int32), axis=1)
    places = tl.where(used, before, counts[:, None] + ks[None, :] - before)
    read = tl.maximum(tl.cdiv(counts, UNROLL), 1) * UNROLL
    place_ptrs = used_positions_ptr + tokens[:, None] * TOP_K + places
    tl.store(place_ptrs, tl.where(used, positions, -1), mask=slot_in & (places < read[:, None]))
    if weights_ptr is not None:
        weight_ptrs = weights_ptr + tokens[:, None] * stride_weights_t + ks[None, :] * stride_weights_k
        weights = tl.load(weight_ptrs, mask=used, other=0.0)
        tl.store(used_weights_ptr + tokens[:, None] * TOP_K + places, weights, mask=used)
    tl.store(counts_ptr + tokens, counts, mask=tokens < T)


@triton.jit
def _add_slots(
    total,
    rows_ptr, weights_ptr, positions_ptr,
    tokens, token_in, cols, col_in, first, D,
    stride_weights_t, stride_weights_k,
    num_rows,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """``total`` plus what the rows of UNROLL slots of each token weigh, from slot ``first`` on."""
    for step in tl.static_range(UNROLL):
        k = first + step
        position = tl.load(positions_ptr + tokens * TOP_K + k, mask=token_in & (k < TOP_K), other=-1).to(tl.int64)
        used = (position >= 0) & (position < num_rows)
        row_tile = rows_ptr + position[:, None] * D + cols[None, :]  # [BLOCK_T, BLOCK_D]
        row = load_tile(row_tile, used, col_in, False, EVEN_D).to(tl.float32)
        if weights_ptr is not None:
            weight_ptrs = weights_ptr + tokens * stride_weights_t + k * stride_weights_k
            row *= tl.load(weight_ptrs, mask=used, other=0.0).to(tl.float32)[:, None]
        total += row
    return total


@triton.jit(do_not_specialize=["T", "num_rows"])
def _combine_kernel(
    rows_ptr, weights_ptr, positions_ptr, counts_ptr, left_ptr, right_ptr, out_ptr,
    T, D, C,
    stride_weights_t, stride_weights_k, stride_left_t, stride_left_c, stride_right_c, stride_right_d, stride_out_t,
    num_rows,
    TOP_K: tl.constexpr, UNROLL: tl.constexpr, ROUNDS: tl.constexpr, PARTS: tl.constexpr, FEW_CHANNELS: tl.constexpr,
    ALLOW_TF32: tl.constexpr, EVEN_C: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    num_col_tiles = tl.cdiv(D, BLOCK_D)
    tile = tl.program_id(0)
    tokens = (tile // num_col_tiles).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tile % num_col_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    token_in = tokens < T
    col_in = cols < D
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    total = _add_slots(
        total, rows_ptr, weights_ptr, positions_ptr, tokens, token_in, cols, col_in,
        0, D, stride_weights_t, stride_weights_k, num_rows, TOP_K, UNROLL, EVEN_D,
    )  # fmt: skip
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + tokens, mask=token_in, other=0)
        for first in range(UNROLL, tl.max(counts, axis=0), UNROLL):
            total = _add_slots(
                total, rows_ptr, weights_ptr, positions_ptr, tokens, token_in & (first < counts), cols, col_in,
                first, D, stride_weights_t, stride_weights_k, num_rows, TOP_K, UNROLL, EVEN_D,
            )  # fmt: skip
    if FEW_CHANNELS > 0:
        left_rows, right_cols = left_ptr + tokens * stride_left_t, right_ptr + cols * stride_right_d
        total = add_channels(total, left_rows, token_in, right_cols, col_in, stride_left_c, stride_right_c, FEW_CHANNELS)
    elif left_ptr is not None:
        product = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for c in range(0, C, BLOCK_C):
            cs = c + tl.arange(0, BLOCK_C)
            right_tile = right_ptr + cs.to(tl.int64)[:, None] * stride_right_c + cols[None, :] * stride_right_d
            right = load_tile(right_tile, cs < C, col_in, EVEN_C, EVEN_D)  # [BLOCK_C, BLOCK_D]
            for part in tl.static_range(PARTS):
                left_tile = left_ptr + tokens[:, None] * stride_left_t + (part * C + cs)[None, :] * stride_left_c
                left = load_tile(left_tile, token_in, cs < C, False, EVEN_C)  # [BLOCK_T, BLOCK_C]
                product = multiply_add(left, right, product, ALLOW_TF32)
        if ROUNDS:
            total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
            product = product.to(out_ptr.dtype.element_ty).to(tl.float32)
        total += product
    out_tile = out_ptr + tokens[:, None] * stride_out_t + cols[None, :]  # [BLOCK_T, BLOCK_D]
    tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=token_in[:, None] & col_in[None, :])


@triton.jit(do_not_specialize=["N", "first_row", "num_rows"])
def _row_dots_kernel(
    rows_ptr, tokens_ptr, positions_ptr, dots_ptr,
    N, D,
    stride_tokens_t, stride_tokens_d,
    first_row, num_rows,
    TOP_K: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot_in = slots < N
    row_of_slot = tl.load(positions_ptr + slots, mask=slot_in, other=-1).to(tl.int64) - first_row
    used = (row_of_slot >= 0) & (row_of_slot < num_rows)
    ds = tl.arange(0, BLOCK_D)
    dots = tl.load(dots_ptr + slots, mask=slot_in, other=0.0)
    for d in range(0, D, BLOCK_D):
        cols = d + ds
        row_tile = rows_ptr + row_of_slot[:, None] * D + cols[None, :]  # [BLOCK_N, BLOCK_D]
        token_tile = tokens_ptr + (slots // TOP_K)[:, None] * stride_tokens_t + cols[None, :] * stride_tokens_d
        row = load_tile(row_tile, used, cols < D, False, EVEN_D).to(tl.float32)
        token = load_tile(token_tile, used, cols < D, False, EVEN_D).to(tl.float32)
        dots += tl.sum(row * token, axis=1)
    tl.store(dots_ptr + slots, dots, mask=slot_in)


def _unroll(top_k: int) -> int:
    return 4 if top_k > _SOME_SLOTS else ceil_div(top_k, ceil_div(top_k, _LARGEST_UNROLL))


def num_parts(product: tuple[Tensor, Tensor] | None) -> int:
    """Left sides of a product that stand side by side: 1 where the sizes are symbols."""
    if product is None:
        return 1
    columns, channels = static_size(product[0].shape[1]), static_size(product[1].shape[0])
    return columns // channels if columns and channels else 1


def token_slots(positions_TK: Tensor, weights_TK: Tensor | None, num_rows: int) -> TokenSlots:
    """The slots to sum over, the used ones first where a token has many.

    Args:
        positions_TK: row of each slot, -1 for none, int32, contiguous.
        weights_TK: routing weights, or None for 1. Shape [T, K], any strides.
        num_rows: the rows that there are; a position behind them adds nothing.
    """
    T, top_k = positions_TK.shape
    if top_k <= _LARGEST_UNROLL:
        return TokenSlots(positions_TK, weights_TK)
    used_positions_TK = torch.empty_like(positions_TK)
    used_weights_TK = None if weights_TK is None else weights_TK.new_empty((T, top_k))
    counts_T = positions_TK.new_empty(T)
    block_k = triton.next_power_of_2(top_k)
    block_t = max(1, 1024 // block_k)
    launch(
        _used_first_kernel,
        ceil_div(T, block_t),
        positions_TK, weights_TK, used_positions_TK, used_weights_TK, counts_T,
        T, num_rows,
        *(weights_TK.stride() if weights_TK is not None else (0, 0)),
        TOP_K=top_k, UNROLL=_unroll(top_k),
        BLOCK_T=block_t, BLOCK_K=block_k, num_warps=4, num_stages=1,
    )  # fmt: skip
    return TokenSlots(used_positions_TK, used_weights_TK, counts_T)


def combine(
    rows_ND: Tensor,
    slots: TokenSlots,
    out_TD: Tensor,
    product: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes the weighted sum of each token's rows, in token order, plus a product if there is one.

    Args:
        rows_ND: rows in expert order, or the first of them, or a range of their columns. Shape [N, D], contiguous.
        slots: the rows of each token and their weights, of these rows.
        out_TD: the output. Shape [T, D], rows_ND's dtype, contiguous in D; a range of columns of a wider tensor.
        product: what is multiplied and added, in rows_ND's dtype: ``(left_TC, right_CD)``, any strides; None for nothing. The
            left side may be P of them side by side, [T, P C], with more than FEW_CHANNELS columns if P is not 1.

    fp32 sums in order of k; two runs agree bit for bit.
    """
    positions_TK, weights_TK, counts_T = slots
    T, top_k = positions_TK.shape
    D = rows_ND.shape[1]
    left_TC, right_CD = product or (None, None)
    num_channels = 0 if product is None else right_CD.shape[0]
    parts = num_parts(product)
    # The sum and the product are rounded apart where eager code has to give the same bits, in which each is a tensor.
    rounds = product is not None and settings().batch_invariant
    has_few_channels = static_size(num_channels) is not None and num_channels <= FEW_CHANNELS and parts == 1 and not rounds
    if has_few_channels:
        config = (choose_combine_few if top_k > _SOME_SLOTS else choose_combine)(static_size(D))
    else:
        config = choose_combine_product(operands(rows_ND), static_size(D), static_size(num_channels))
    block_c = 64 if static_size(num_channels) is None or num_channels > 32 else 32
    launch(
        _combine_kernel,
        ceil_div(T, config.rows) * ceil_div(D, config.columns),
        rows_ND, weights_TK, positions_TK, counts_T, left_TC, right_CD, out_TD,
        T, D, num_channels,
        *(weights_TK.stride() if weights_TK is not None else (0, 0)),
        *((0, 0, 0, 0) if product is None else (*left_TC.stride(), *right_CD.stride())), out_TD.stride(0),
        rows_ND.shape[0],
        TOP_K=top_k, UNROLL=_unroll(top_k), ROUNDS=rounds, PARTS=parts,
        FEW_CHANNELS=num_channels if has_few_channels else 0, ALLOW_TF32=allows_tf32(),
        EVEN_C=is_multiple(num_channels, block_c), EVEN_D=is_multiple(D, config.columns),
        BLOCK_T=config.rows, BLOCK_C=block_c, BLOCK_D=config.columns, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip


def combine_into(
    rows_ND: Tensor,
    slots: TokenSlots,
    out_TD: Tensor,
    columns: tuple[int, int],
    column_sums: ColumnSums | None,
    product: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``combine`` into columns of the output, the first one and their number, or into where ``column_sums`` has them."""
    if column_sums is None:
        combine(rows_ND, slots, out_TD.narrow(1, *columns), product)
        return
    for first_token, out_part_TD in column_sums(*columns):
        tokens = first_token, out_part_TD.shape[0]
        combine(rows_ND, TokenSlots(*(None if each is None else each.narrow(0, *tokens) for each in slots)), out_part_TD)


def add_row_dots(rows_ND: Tensor, tokens_TD: Tensor, positions_TK: Tensor, dots_TK: Tensor, first_row: int) -> None:
    """Adds the inner product of each slot's row with its token; nothing at unused slots.

    Args:
        rows_ND: rows in expert order, or a range of their columns. Shape [N, D], contiguous.
        tokens_TD: the same columns of the tokens. Shape [T, D], any strides.
        positions_TK: row of each slot, -1 for none, int32, contiguous.
        dots_TK: sums so far. Shape [T, K], fp32, contiguous. Two runs agree bit for bit; other ranges may sum in another
            order, since the width of a range decides how a tile of it lies in registers.
        first_row: position of the first row, where these are a range of them.
    """
    T, top_k = positions_TK.shape
    D = rows_ND.shape[1]
    config = choose_row_dot(None)
    launch(
        _row_dots_kernel,
        ceil_div(T * top_k, config.rows),
        rows_ND, tokens_TD, positions_TK, dots_TK,
        T * top_k, D,
        *tokens_TD.stride(),
        first_row, rows_ND.shape[0],
        TOP_K=top_k, EVEN_D=is_multiple(D, config.columns),
        BLOCK_N=config.rows, BLOCK_D=config.columns, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
