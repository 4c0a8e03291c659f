"""Down projection of every routed slot, and the weighted sum of each token's rows.

For row r in expert order, of expert e:

    y[r, :]   = a[r] @ w[e] + b[e]                 with a low-rank addition  a[r] @ w[e] + v[r] @ lora_b[e] + b[e], in one sum
    out[t, :] = sum_k weights[t, k] * y[positions[t, k], :]

``y`` is ``[N, D]``, written once in the activation's dtype and gathered by ``combine``: deterministic, and faster than
scattering from the GEMM. Where y would be large, it exists for a range of columns at a time (``row_chunks``); with one expert
a token it never exists (``single_rows``). A program computes one tile of BLOCK_M rows by BLOCK_N columns of D.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_expert_rows
from moeblaze_ops.kernels.hopper import ops as hopper_ops
from moeblaze_ops.kernels.launch import (
    allows_tf32,
    capability,
    ceil_div,
    has_wide_offsets,
    is_multiple,
    launch,
    low_rank_blocks,
    most_row_tiles,
    operands,
    static_size,
    strides_of,
)
from moeblaze_ops.kernels.rows.combine import ColumnSums, combine_into, token_slots
from moeblaze_ops.kernels.rows.row_chunks import row_chunks
from moeblaze_ops.kernels.rows.single_rows import fill_unused_tokens, has_single_rows
from moeblaze_ops.kernels.select import mean_rows, why_portable
from moeblaze_ops.kernels.tiles import (
    ROWS_PER_ENTRY,
    add_low_rank,
    add_rows_times_weight,
    count_row_tiles,
    grouped_order,
    load_slot_weights,
    locate_row_tile,
    offsets_of,
)


@triton.jit(do_not_specialize=["N"])
def _expert_down_kernel(
    a_ptr, w_ptr, b_ptr, weights_ptr, slots_ptr, offsets_ptr, blocks_ptr, v_ptr, lora_ptr, y_ptr,
    N, F, D,
    stride_a_n, stride_a_f, stride_w_e, stride_w_f, stride_w_d, stride_b_e, stride_b_d, stride_weights_t,
    stride_v_n, stride_v_r, stride_lora_e, stride_lora_r, stride_lora_d,
    R: tl.constexpr, WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr, EVEN_F: tl.constexpr, EVEN_D: tl.constexpr,
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
    y = add_rows_times_weight(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), a_ptr + read_rows * stride_a_n, stride_a_f,
        w_ptr + expert * stride_w_e, stride_w_f, offsets_of(cols, stride_w_d, WIDE), col_in,
        F, BLOCK_K, EVEN_F, EVEN_D, ALLOW_TF32,
    )  # fmt: skip
    if R > 0:
        y = add_low_rank(
            y, v_ptr + read_rows * stride_v_n, stride_v_r,
            lora_ptr + expert * stride_lora_e, stride_lora_r, stride_lora_d, cols, D,
            R, BLOCK_R, EVEN_D, ALLOW_TF32,
        )  # fmt: skip
    if b_ptr is not None:
        bias_ptrs = b_ptr + expert * stride_b_e + cols * stride_b_d
        y += tl.load(bias_ptrs, mask=col_in, other=0.0).to(tl.float32)[None, :]
    row_in = rows < end_row
    y = y.to(y_ptr.dtype.element_ty)
    if slots_ptr is not None:
        rows = tl.load(slots_ptr + rows, mask=row_in, other=0)
        if weights_ptr is not None:
            weights = load_slot_weights(weights_ptr, rows, row_in, stride_weights_t, 0, 1)
            y = (y.to(tl.float32) * weights[:, None]).to(y_ptr.dtype.element_ty)
    y_tile = y_ptr + rows.to(tl.int64)[:, None] * D + cols[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(y_tile, y, mask=row_in[:, None] & col_in[None, :])


def launch_expert_down(
    h_NGF: Tensor, a_NF: Tensor | None, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    v_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None, lora_b_ERD: Tensor | None = None,
    params_EP: Tensor | None = None, h8_NGB: Tensor | None = None, max_bytes: int | None = None,
    column_sums: ColumnSums | None = None,
) -> Tensor:  # fmt: skip
    """``expert_down`` on CUDA: the experts' outputs summed over each token's slots, in token order.

    Args:
        h_NGF: read in place of a when ``activation`` is "identity".
        lora_a_ERF, params_EP, h8_NGB: what v and a were made with, and what is kept of h: they are not read.
        max_bytes: of the rows that are summed, as for ``row_chunks``.
        column_sums: where the sums are written, of tokens of two slots or more; None for a new tensor.
        Others: those of the op.

    Returns:
        out_TD, contiguous; no token with ``column_sums``.
    """
    (w,) = w_down
    a = h_NGF.select(1, 0) if activation == "identity" else a_NF
    num_rows, D = slots_N.shape[0], w.shape[2]
    out_TD = h_NGF.new_empty((positions_TK.shape[0] if column_sums is None else 0, D))
    rows_per_expert = mean_rows(num_rows, w.shape[0])
    # Ranges begin at multiples of 512 bytes: what TMA can describe whole, it can describe in parts.
    why = why_portable("expert_down", rows=(a,), weights=w_down, biases=b_down, low_rank=v_NR, rows_per_expert=rows_per_expert)

    def write(y_ND, w_part, b_part, lora_part, slots_N=None) -> None:
        """The rows in expert order, or with slots those of each token."""
        given = (a, w_part, b_part, offsets_E1, blocks_B2, y_ND, slots_N, None if slots_N is None else weights_TK)
        if why is None:
            hopper_ops.down_rows(*given, v_NR, lora_part)
        else:
            _launch_portable(D, *given, v_NR, lora_part)

    if has_single_rows(positions_TK):
        write(out_TD, w_down, b_down, lora_b_ERD, slots_N)
        fill_unused_tokens(positions_TK, out_TD)
        return out_TD
    slots = token_slots(positions_TK, weights_TK, num_rows)
    for first, y_ND in row_chunks(h_NGF, num_rows, D, max_bytes):
        columns = first, y_ND.shape[1]
        lora_part = None if lora_b_ERD is None else lora_b_ERD.narrow(2, *columns)
        write(y_ND, [w.narrow(2, *columns)], [b.narrow(1, *columns) for b in b_down], lora_part)
        combine_into(y_ND, slots, out_TD, columns, column_sums)
    return out_TD


def _launch_portable(
    width, a_NF, w_down, b_down, offsets_E1, blocks_B2, y_ND, slots_N, weights_TK, v_NR, lora_b_ERD
) -> None:
    """Fills ``y_ND``, a range of ``width`` columns: all ranges have the same tiles. With slots, its rows are tokens."""
    (w_EFD,) = w_down
    num_experts, F, D = w_EFD.shape
    config = choose_expert_rows(
        operands(a_NF), static_size(F), static_size(width), mean_rows(a_NF.shape[0], num_experts), capability(a_NF)
    )
    num_row_tiles = most_row_tiles(blocks_B2, a_NF.shape[0], config.block_m)
    launch(
        _expert_down_kernel,
        num_row_tiles * ceil_div(D, config.block_n),
        a_NF, w_EFD, b_down[0] if b_down else None, weights_TK, slots_N, offsets_E1, blocks_B2, v_NR, lora_b_ERD, y_ND,
        a_NF.shape[0], F, D,
        *a_NF.stride(), *w_EFD.stride(), *(b_down[0].stride() if b_down else (0, 0)),
        0 if weights_TK is None else weights_TK.stride(0), *strides_of(v_NR, 2), *strides_of(lora_b_ERD, 3),
        **low_rank_blocks(v_NR), WIDE=has_wide_offsets(w_down), ALLOW_TF32=allows_tf32(),
        EVEN_F=is_multiple(F, config.block_k), EVEN_D=is_multiple(D, config.block_n),
        **config.options,
    )  # fmt: skip
