"""Up projection of every routed slot, with the activation in the epilogue.

For row r in expert order, of expert e and slot ``s = slots[r]``, token ``t = s // K``:

    h[r, g, :] = scale * (x[t] @ w[e, g]^T) + b[e, g]        scale = weights.flatten()[s], or 1
    a[r, :]    = act(h[r])                                   from h as it is stored, so that backward agrees

With a low-rank addition R more columns are contracted, ``h = scale * (x @ w^T + u[r] @ lora_b[e, g]^T) + b``, in the same sum.

``h`` is ``[N, G, F]`` and ``a`` is ``[N, F]``, both contiguous. A program computes one tile of BLOCK_M rows by
BLOCK_N columns of F, gate and up together: rows of x are read through the index, once for both, and no routed
copy of x exists. Programs are numbered so that a group of row tiles walks over the weight's column tiles together.
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.activations import activate
from moeblaze_ops.kernels.configs import choose_expert_up, joins_columns
from moeblaze_ops.kernels.eight_bits import row_width as bytes_of_row
from moeblaze_ops.kernels.eight_bits import without_memory
from moeblaze_ops.kernels.experts.eight_bit_rows import row_width, store_eight_bits
from moeblaze_ops.kernels.formulas.named import num_parameters
from moeblaze_ops.kernels.formulas.program import value_cost, value_program
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
from moeblaze_ops.kernels.rows.row_parts import RowPart
from moeblaze_ops.kernels.select import mean_rows, readable, why_portable
from moeblaze_ops.kernels.tiles import (
    ROWS_PER_ENTRY,
    add_low_rank,
    add_rows_times_weight,
    count_row_tiles,
    grouped_order,
    load_parameters,
    load_slot_weights,
    load_tile,
    locate_row_tile,
    multiply_add,
    offsets_of,
)


@triton.jit
def _expert_up_kernel(
    x_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, weights_ptr, slots_ptr, offsets_ptr, blocks_ptr, u_ptr, lora_ptr,
    params_ptr, h_ptr, a_ptr,
    D, F,
    stride_x_t, stride_x_d, stride_gate_e, stride_gate_g, stride_gate_f, stride_gate_d,
    stride_up_e, stride_up_f, stride_up_d, stride_gate_bias_e, stride_gate_bias_f, stride_up_bias_e, stride_up_bias_f,
    stride_weights_t, stride_weights_k, stride_u_n, stride_u_r, stride_lora_e, stride_lora_g, stride_lora_f, stride_lora_r,
    R: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr,
    WIDE: tl.constexpr, NUM_PARAMETERS: tl.constexpr, ALLOW_TF32: tl.constexpr, EVEN_D: tl.constexpr, EVEN_F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_col_tiles = tl.cdiv(F, BLOCK_N)
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
    ks = tl.arange(0, BLOCK_K)
    row_in = rows < end_row
    col_in = cols < F
    # Rows past the end read token 0: their products are never stored, and the loop needs no mask.
    slots = tl.load(slots_ptr + rows, mask=row_in, other=0)
    expert = expert.to(tl.int64)

    x_rows = x_ptr + (slots // TOP_K).to(tl.int64) * stride_x_t
    gate_ptr += expert * stride_gate_e
    gate_cols = offsets_of(cols, stride_gate_f, WIDE)
    if GATED and JOINED:
        # Columns of gate and of up side by side: tensor cores that read shared memory then read x once for both.
        both = tl.arange(0, 2 * BLOCK_N)
        both_in = col_tile * BLOCK_N + both % BLOCK_N < F
        both_cols = both // BLOCK_N * stride_gate_g + (col_tile * BLOCK_N + both % BLOCK_N) * stride_gate_f
        sums = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        sums = add_rows_times_weight(
            sums, x_rows, stride_x_d, gate_ptr, stride_gate_d, both_cols, both_in, D, BLOCK_K, EVEN_D, EVEN_F, ALLOW_TF32
        )
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    elif GATED:
        up_ptr += expert * stride_up_e
        x_tile = x_rows[:, None] + ks[None, :] * stride_x_d  # [BLOCK_M, BLOCK_K]
        gate_offsets = ks.to(gate_cols.dtype)[:, None] * stride_gate_d + gate_cols[None, :]  # [BLOCK_K, BLOCK_N]
        up_offsets = ks.to(gate_cols.dtype)[:, None] * stride_up_d + offsets_of(cols, stride_up_f, WIDE)[None, :]
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            in_k = k + ks < D
            x = load_tile(x_tile, row_in, in_k, True, EVEN_D)  # [BLOCK_M, BLOCK_K]
            gate = multiply_add(x, load_tile(gate_ptr + gate_offsets, in_k, col_in, EVEN_D, EVEN_F), gate, ALLOW_TF32)
            up = multiply_add(x, load_tile(up_ptr + up_offsets, in_k, col_in, EVEN_D, EVEN_F), up, ALLOW_TF32)
            x_tile += BLOCK_K * stride_x_d
            gate_ptr += BLOCK_K * stride_gate_d
            up_ptr += BLOCK_K * stride_up_d
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        gate = add_rows_times_weight(
            gate, x_rows, stride_x_d, gate_ptr, stride_gate_d, gate_cols, col_in, D, BLOCK_K, EVEN_D, EVEN_F, ALLOW_TF32
        )
        up = gate

    if R > 0:
        u_rows = u_ptr + tl.minimum(rows, end_row - 1).to(tl.int64) * stride_u_n
        lora_ptr += expert * stride_lora_e
        gate = add_low_rank(
            gate, u_rows, stride_u_r, lora_ptr, stride_lora_r, stride_lora_f, cols, F, R, BLOCK_R, EVEN_F, ALLOW_TF32
        )
        if GATED:
            lora_ptr += stride_lora_g
            up = add_low_rank(
                up, u_rows, stride_u_r, lora_ptr, stride_lora_r, stride_lora_f, cols, F, R, BLOCK_R, EVEN_F, ALLOW_TF32
            )

    if weights_ptr is not None:
        scale = load_slot_weights(weights_ptr, slots, row_in, stride_weights_t, stride_weights_k, TOP_K)[:, None]
        gate *= scale
        up *= scale
    if gate_bias_ptr is not None:
        bias_offsets = expert * stride_gate_bias_e + cols * stride_gate_bias_f
        gate += tl.load(gate_bias_ptr + bias_offsets, mask=col_in, other=0.0).to(tl.float32)[None, :]
        if GATED:
            bias_offsets = expert * stride_up_bias_e + cols * stride_up_bias_f
            up += tl.load(up_bias_ptr + bias_offsets, mask=col_in, other=0.0).to(tl.float32)[None, :]

    stored_in = row_in[:, None] & col_in[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    G: tl.constexpr = 2 if GATED else 1
    gate = gate.to(x_ptr.dtype.element_ty)
    up = up.to(x_ptr.dtype.element_ty)
    if h_ptr is not None:
        if h_ptr.dtype.element_ty == tl.int8:
            WIDTH = row_width(F)
            first_col = col_tile * BLOCK_N
            store_eight_bits(gate, h_ptr + wide_rows * (G * WIDTH), first_col, F, row_in, BLOCK_M, BLOCK_N)
            if GATED:
                store_eight_bits(up, h_ptr + wide_rows * (G * WIDTH) + WIDTH, first_col, F, row_in, BLOCK_M, BLOCK_N)
        elif GATED:
            h_tile = h_ptr + wide_rows * (2 * F) + cols[None, :]  # [BLOCK_M, BLOCK_N]
            tl.store(h_tile, gate, mask=stored_in)
            tl.store(h_tile + F, up, mask=stored_in)
        else:
            tl.store(h_ptr + wide_rows * F + cols[None, :], gate, mask=stored_in)
    if a_ptr is not None:
        parameters = load_parameters(params_ptr, expert, NUM_PARAMETERS)
        a = activate(gate.to(tl.float32), up.to(tl.float32), parameters, (rows[:, None], cols[None, :]), ACTIVATION)
        tl.store(a_ptr + wide_rows * F + cols[None, :], a.to(a_ptr.dtype.element_ty), mask=stored_in)


def launch_expert_up(
    x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    u_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None, lora_b_EGFR: Tensor | None = None,
    params_EP: Tensor | None = None, store_h: bool = True, h_NGF: Tensor | None = None,
    parts: Iterable[RowPart] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``expert_up`` on CUDA: the pre-activation and the activation of every routed slot, in expert order.

    Args:
        store_h: False leaves h empty, [0, G, F]: it is never written to memory.
        h_NGF: written in place of a new tensor, contiguous; in 8 bits where it is int8.
        parts: parts of the rows, one launch each, where their tokens are there once the part is; None: all rows at once.
        Others: those of the op. Of ``lora_a_ERD`` u was made: it is not read.

    Returns:
        h_NGF and a_NF, contiguous; rows from ``offsets_E1[E]`` on are not written.
    """
    x_TD = readable(x_TD)
    num_experts, F, D = w_up[0].shape[0], w_up[0].shape[2], w_up[0].shape[3]
    num_rows = slots_N.shape[0]
    gated = len(w_up) == 2 or w_up[0].shape[1] == 2
    store_a = activation != "identity"
    gate, up = gate_and_up(w_up)
    gate_bias, up_bias = gate_and_up(b_up) if b_up else (None, None)
    if h_NGF is None:
        h_NGF = x_TD.new_empty((num_rows if store_h else 0, 2 if gated else 1, F))
    a_NF = x_TD.new_empty((num_rows if store_a else 0, F))
    if params_EP is not None:
        params_EP = params_EP.contiguous()
    weighted = weights_TK is not None
    operands_of: dict[str, Any] = {"gathered": x_TD, "weights": w_up, "biases": b_up}
    rows_per_expert = mean_rows(num_rows, num_experts)
    operands_of |= {"weight_on_input": weighted, "low_rank": u_NR, "rows_per_expert": rows_per_expert}
    whole = (None, offsets_E1, blocks_B2)
    if why_portable("expert_up", **operands_of) is None:
        top_k = positions_TK.shape[1]
        for begins_E, ends_E1, blocks_B2 in [whole] if parts is None else parts:
            given = (x_TD, w_up, b_up, slots_N, ends_E1, blocks_B2, top_k, activation)
            hopper_ops.expert_up(*given, h_NGF, a_NF, u_NR, lora_b_EGFR, params_EP, begins_E)
        return h_NGF, a_NF

    config = choose_expert_up(
        operands(x_TD),
        static_size(D),
        static_size(F),
        gated,
        rows_per_expert,
        capability(x_TD),
        value_cost(activation).num_steps,
    )
    wide = has_wide_offsets(w_up)
    joined = len(w_up) == 1 and not wide and joins_columns(config, capability(x_TD))
    for _, ends_E1, blocks_B2 in [whole] if parts is None else parts:
        num_row_tiles = most_row_tiles(blocks_B2, num_rows, config.block_m)
        launch(
            _expert_up_kernel,
            num_row_tiles * ceil_div(F, config.block_n),
            x_TD, gate, up, gate_bias, up_bias, weights_TK, slots_N, ends_E1, blocks_B2, u_NR, lora_b_EGFR, params_EP,
            h_NGF if store_h else None, a_NF if store_a else None,
            D, F,
            *x_TD.stride(), gate.stride(0), w_up[0].stride(1), *gate.stride()[1:], *up.stride(),
            *(gate_bias.stride() if b_up else (0, 0)), *(up_bias.stride() if b_up else (0, 0)),
            *(weights_TK.stride() if weights_TK is not None else (0, 0)), *strides_of(u_NR, 2), *strides_of(lora_b_EGFR, 4),
            **low_rank_blocks(u_NR), TOP_K=positions_TK.shape[1], ACTIVATION=value_program(activation), GATED=gated,
            JOINED=joined, WIDE=wide, NUM_PARAMETERS=num_parameters(activation), ALLOW_TF32=allows_tf32(),
            EVEN_D=is_multiple(D, config.block_k), EVEN_F=is_multiple(F, config.block_n),
            **config.options,
        )  # fmt: skip
    return h_NGF, a_NF


def launch_expert_up_h8(x_TD: Tensor, w_up: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``launch_expert_up`` with h in 8 bits: a tensor of the shape of h without memory, a, and h as ``eight_bits`` has it."""
    num_rows, F, G = rest[2].shape[0], w_up[0].shape[2], len(w_up) * w_up[0].shape[1]
    h8_NGB = x_TD.new_empty((num_rows, G, bytes_of_row(F)), dtype=torch.int8)
    written: dict[str, Any] = {"h_NGF": h8_NGB}
    _, a_NF = launch_expert_up(x_TD, w_up, *rest, **written)
    return without_memory(x_TD, (num_rows, G, F)), a_NF, h8_NGB
