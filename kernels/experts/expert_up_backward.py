"""Gradient of the up projection with respect to the tokens.

For row r in expert order, of expert e:

    dxe[r, :] = sum_{g, f} dh[r, g, f] * w[e, g, f, :]               with a low-rank addition  + du[r] @ lora_a[e], in one sum
    dx[t, :]  = sum_k weights[t, k] * dxe[positions[t, k], :]        weights None: 1
    dweights[t, k] = <dxe[positions[t, k], :], x[t, :]>              when the weights scale an expert's input

``dxe`` is ``[N, D]``, written once in dh's dtype and gathered by ``combine``; where it would be large, it exists for a
range of columns at a time (``row_chunks``), and with one expert a token not at all (``single_rows``). A program computes one
tile of BLOCK_M rows by BLOCK_N columns of D. Gate and up that are one matrix of 2 F rows are contracted as one.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import FEW_CHANNELS, choose_expert_rows
from moeblaze_ops.kernels.hopper import ops as hopper_ops
from moeblaze_ops.kernels.launch import (
    allows_tf32,
    capability,
    ceil_div,
    gate_and_up,
    has_wide_offsets,
    is_multiple,
    launch,
    low_rank_blocks,
    most_row_tiles,
    operands,
    static_size,
    strides_of,
)
from moeblaze_ops.kernels.rows.add_rows import add_rows
from moeblaze_ops.kernels.rows.combine import ColumnSums, add_row_dots, combine_into, num_parts, token_slots
from moeblaze_ops.kernels.rows.row_chunks import row_chunks
from moeblaze_ops.kernels.rows.single_rows import fill_unused_tokens, has_single_rows, num_channels, product_strides
from moeblaze_ops.kernels.select import is_batch_invariant, mean_rows, why_portable
from moeblaze_ops.kernels.tiles import (
    ROWS_PER_ENTRY,
    add_channels,
    add_low_rank,
    add_rows_times_weight,
    count_row_tiles,
    grouped_order,
    locate_row_tile,
    offsets_of,
)


@triton.jit(do_not_specialize=["N"])
def _expert_up_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, slots_ptr, offsets_ptr, blocks_ptr, left_ptr, right_ptr, du_ptr, lora_ptr, dx_ptr,
    N, F, D,
    stride_dh_n, stride_dh_g, stride_dh_f, stride_gate_e, stride_gate_f, stride_gate_d,
    stride_up_e, stride_up_f, stride_up_d, stride_left_t, stride_left_c, stride_right_c, stride_right_d,
    stride_du_n, stride_du_r, stride_lora_e, stride_lora_r, stride_lora_d,
    R: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr,
    EVEN_F: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_col_tiles = tl.cdiv(D, BLOCK_N)
    row_tile, col_tile = grouped_order(tl.program_id(0), tl.num_programs(0) // num_col_tiles, num_col_tiles, GROUP)
    entry, skipped = locate_row_tile(row_tile, BLOCK_M)
    # What is read before the first product is read side by side, not one number after the other.
    expert = tl.load(blocks_ptr + entry)
    first_row = tl.load(blocks_ptr + entry + 1) + skipped
    if row_tile >= count_row_tiles(tl.load(blocks_ptr), BLOCK_M):
        return
    end_row = tl.load(offsets_ptr + expert + 1)
    if (first_row >= end_row) & (BLOCK_M < ROWS_PER_ENTRY):
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    cols = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_in = cols < D
    expert = expert.to(tl.int64)
    # Rows past the end are others' or hold anything: their products are never stored, and the loop needs no mask.
    read_rows = tl.minimum(rows, N - 1).to(tl.int64)
    dh_rows = dh_ptr + read_rows * stride_dh_n
    gate_ptr += expert * stride_gate_e
    gate_cols = offsets_of(cols, stride_gate_d, WIDE)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    accumulator = add_rows_times_weight(
        accumulator, dh_rows, stride_dh_f, gate_ptr, stride_gate_f, gate_cols, col_in, F, BLOCK_K, EVEN_F, EVEN_D, ALLOW_TF32
    )
    if G == 2:
        dh_rows += stride_dh_g
        up_ptr += expert * stride_up_e
        up_cols = offsets_of(cols, stride_up_d, WIDE)
        accumulator = add_rows_times_weight(
            accumulator, dh_rows, stride_dh_f, up_ptr, stride_up_f, up_cols, col_in, F, BLOCK_K, EVEN_F, EVEN_D, ALLOW_TF32
        )
    if R > 0:
        accumulator = add_low_rank(
            accumulator, du_ptr + read_rows * stride_du_n, stride_du_r,
            lora_ptr + expert * stride_lora_e, stride_lora_r, stride_lora_d, cols, D,
            R, BLOCK_R, EVEN_D, ALLOW_TF32,
        )  # fmt: skip
    row_in = rows < end_row
    dx = accumulator.to(dx_ptr.dtype.element_ty)
    if slots_ptr is not None:
        rows = tl.load(slots_ptr + rows, mask=row_in, other=0)
        if CHANNELS > 0:
            left_rows, right_cols = left_ptr + rows.to(tl.int64) * stride_left_t, right_ptr + cols * stride_right_d
            dx = dx.to(tl.float32)
            for c in range(0, CHANNELS):
                left, right = left_rows + c * stride_left_c, right_cols + c * stride_right_c
                dx = add_channels(dx, left, row_in, right, col_in, 0, 0, 1)
    dx_tile = dx_ptr + rows.to(tl.int64)[:, None] * D + cols[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(dx_tile, dx.to(dx_ptr.dtype.element_ty), mask=row_in[:, None] & col_in[None, :])


def launch_expert_up_backward(
    dh_NGF: Tensor, x_TD: Tensor | None, w_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    dlogits_TE: Tensor | None = None, w_router_ED: Tensor | None = None, max_bytes: int | None = None,
    du_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``expert_up_backward`` on CUDA: gradients of the tokens and of routing weights on an expert's input, contiguous."""
    (T, top_k), weighted = positions_TK.shape, weights_TK is not None
    dx_TD = dh_NGF.new_empty((T, w_up[0].shape[3]))
    dweights_TK = dh_NGF.new_zeros((T if weighted else 0, top_k), dtype=torch.float32)
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    router = None if dlogits_TE is None else _router_product(dlogits_TE, w_router_ED)
    into = (dx_TD, dweights_TK)
    low_rank = None if du_NR is None else (du_NR, lora_a_ERD)
    options: dict[str, Any] = {"max_bytes": max_bytes, "router": router, "low_rank": low_rank}
    launch_expert_up_backward_part(dh_NGF, x_TD, w_up, weights_TK, *routing, *into, **options)()
    return dx_TD, dweights_TK.to(weights_TK.dtype) if weighted else dweights_TK


def _router_product(dlogits_TE: Tensor, w_router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """What is multiplied: so few columns that they are added one by one have a row each."""
    parts = num_parts((dlogits_TE, w_router_ED))
    few = parts > 1 and dlogits_TE.shape[1] <= FEW_CHANNELS
    return dlogits_TE, w_router_ED.repeat(parts, 1) if few else w_router_ED


def launch_expert_up_backward_part(
    dh_NGF: Tensor, x_TD: Tensor | None, w_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    dx_TD: Tensor, dweights_TK: Tensor, rows: range | None = None, max_bytes: int | None = None,
    router: tuple[Tensor, Tensor] | None = None, early: bool = False, low_rank: tuple[Tensor, Tensor] | None = None,
    column_sums: ColumnSums | None = None,
) -> Callable[[], None]:  # fmt: skip
    """``launch_expert_up_backward`` into tensors that exist, of all rows or a range of them.

    The products are launched, but for the last sum over a token's rows: the caller launches that, perhaps with something
    before it that takes the multiprocessors which have no product left.

    Args:
        dx_TD: written by the first range, added to by any other one, and rounded; a token without rows in that keeps what it
            has. Contiguous.
        dweights_TK: added to where weights scaled the input. Shape [T, K], fp32, contiguous.
        rows: the range, None for all. Slots, offsets and blocks are its own, positions those of all rows; dh and slots may
            have more rows, of no expert.
        max_bytes: of the rows that are summed, as for ``row_chunks``.
        router: dlogits_TE and w_router_ED, or None; with all rows only.
        early: as for ``hopper_up_backward_rows``.
        low_rank: du_NR and lora_a_ERD, or None.
        column_sums: where dx of tokens of two slots or more is written, without weights on the input; then nothing else is.
        Others: as for ``launch_expert_up_backward``.

    Returns:
        What launches the last sum.
    """
    D = w_up[0].shape[3]
    first_row, num_rows = (0, dh_NGF.shape[0]) if rows is None else (rows.start, len(rows))
    # Ranges begin at multiples of 512 bytes: what TMA can describe whole, it can describe in parts.
    du_NR, lora_a_ERD = low_rank or (None, None)
    on_hopper = why_portable("expert_up_backward", rows=(dh_NGF,), weights=w_up, low_rank=du_NR) is None

    def write(dx_ND, w_part, lora_part, slots_N=None) -> None:
        """The rows in expert order, or with slots those of each token, the router's product added."""
        product = (None, None) if slots_N is None or router is None else router
        given = (dh_NGF, w_part, offsets_E1, blocks_B2, dx_ND, slots_N, *product)
        if on_hopper:
            hopper_ops.up_backward_rows(*given, early, du_NR, lora_part)
        else:
            _launch_portable(D, *given, du_NR, lora_part)

    if weights_TK is None and has_single_rows(positions_TK, router):
        write(dx_TD, w_up, lora_a_ERD, slots_N)
        if first_row == 0:
            fill_unused_tokens(positions_TK, dx_TD, router)
        return lambda: None

    def add_up(first, dx_ND) -> None:
        columns, dx_ND = (first, dx_ND.shape[1]), dx_ND.narrow(0, 0, num_rows)
        product = None if router is None else (router[0], router[1].narrow(1, *columns))
        if first_row == 0:
            combine_into(dx_ND, slots, dx_TD, columns, column_sums, product)
        else:
            add_rows(dx_ND, weights_TK, positions_TK, dx_TD.narrow(1, *columns), slots_N, first_row)
        if weights_TK is not None:
            add_row_dots(dx_ND, x_TD.narrow(1, *columns), positions_TK, dweights_TK, first_row)

    last = slots = None
    if weights_TK is not None and is_batch_invariant():
        max_bytes = sys.maxsize  # the inner product of a row and its token is a sum over all columns
    for first, dx_ND in row_chunks(dh_NGF, dh_NGF.shape[0], D, max_bytes):
        if last is not None:
            add_up(*last)
        columns = first, dx_ND.shape[1]
        lora_part = None if lora_a_ERD is None else lora_a_ERD.narrow(2, *columns)
        write(dx_ND, [w.narrow(3, *columns) for w in w_up], lora_part)
        if slots is None and first_row == 0:
            slots = token_slots(positions_TK, weights_TK, num_rows)
        last = first, dx_ND
    return lambda: add_up(*last)


def launch_expert_up_backward_into(
    dh_NGF: Tensor,
    w_up: list[Tensor],
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    column_sums: ColumnSums,
) -> None:
    """Gradients of tokens of two slots or more, written where ``column_sums`` has them."""
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    nothing = dh_NGF.new_empty((0, 0))
    launch_expert_up_backward_part(dh_NGF, None, w_up, None, *routing, nothing, nothing, column_sums=column_sums)()


def launch_expert_rows(rows_NGF: Tensor, w_EGFC: Tensor, offsets_E1: Tensor, blocks_B2: Tensor) -> Tensor:
    """``expert_rows`` on CUDA; rows from ``offsets_E1[E]`` on are unwritten."""
    y_NC = rows_NGF.new_empty((rows_NGF.shape[0], w_EGFC.shape[3]))
    given = (rows_NGF, [w_EGFC], offsets_E1, blocks_B2, y_NC, None, None, None)
    if why_portable("expert_rows", rows=(rows_NGF,), weights=[w_EGFC]) is None:
        hopper_ops.up_backward_rows(*given, False, None, None)
    else:
        _launch_portable(y_NC.shape[1], *given, None, None)
    return y_NC


def _launch_portable(
    width, dh_NGF, w_up, offsets_E1, blocks_B2, dx_ND, slots_N, left_TC, right_CD, du_NR, lora_a_ERD
) -> None:
    """Fills ``dx_ND``, a range of ``width`` columns: all ranges have the same tiles. With slots, its rows are tokens."""
    dh_NGF, w_up = _as_one_matrix(dh_NGF, w_up)
    num_experts, _, F, D = w_up[0].shape
    num_rows, G, _ = dh_NGF.shape
    config = choose_expert_rows(
        operands(dh_NGF), static_size(F), static_size(width), mean_rows(num_rows, num_experts), capability(dh_NGF)
    )
    gate, up = gate_and_up(w_up)
    product = None if left_TC is None else (left_TC, right_CD)
    num_row_tiles = most_row_tiles(blocks_B2, num_rows, config.block_m)
    launch(
        _expert_up_backward_kernel,
        num_row_tiles * ceil_div(D, config.block_n),
        dh_NGF, gate, up, slots_N, offsets_E1, blocks_B2, left_TC, right_CD, du_NR, lora_a_ERD, dx_ND,
        num_rows, F, D,
        *dh_NGF.stride(), *gate.stride(), *up.stride(), *product_strides(product), *strides_of(du_NR, 2),
        *strides_of(lora_a_ERD, 3),
        **low_rank_blocks(du_NR), CHANNELS=num_channels(product), G=G, WIDE=has_wide_offsets(w_up),
        ALLOW_TF32=allows_tf32(), EVEN_F=is_multiple(F, config.block_k), EVEN_D=is_multiple(D, config.block_n),
        **config.options,
    )  # fmt: skip


def _as_one_matrix(dh_NGF, w_up):
    """Both without their second half where the halves follow each other in memory, [N, 1, 2 F] and [E, 1, 2 F, D]."""
    (_, dh_g, dh_f), (_, w_g, w_f, _), F = dh_NGF.stride(), w_up[0].stride(), w_up[0].shape[2]
    is_known = all(isinstance(number, int) for number in (F, dh_g, dh_f, w_g, w_f))
    if len(w_up) == 1 and is_known and (dh_g, w_g) == (F * dh_f, F * w_f):
        return dh_NGF.flatten(1).unsqueeze(1), [w_up[0].flatten(1, 2).unsqueeze(1)]
    return dh_NGF, w_up
