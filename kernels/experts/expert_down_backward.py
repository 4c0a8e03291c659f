"""Gradients of the down projection with respect to the pre-activation and the routing weights.

For row r in expert order, of expert e and slot ``s = slots[r]``, token ``t = s // K``, with weight ``v = weights.flatten()[s]``:

    da'         = dout[t] @ w[e]^T                      with a low-rank addition  dout[t] @ w[e]^T + q[r] @ lora_a[e], in one sum
    a           = act(h[r])
    dweights[s] = <da', a> + <dout[t], b[e]>
    dh[r]       = act'(h[r]) (v * da')
    wa[r]       = v * a                              the grouped side of the weight's own gradient
    dparams[e]  = sum over rows r of e of <v * da', d act(h[r]) / d params[e]>       where the activation reads parameters

A program computes one tile of BLOCK_M rows by BLOCK_N columns of F: one product, rows of dout read through the index, then
everything else in the epilogue. Each column tile leaves its part of the row sums ``<da', a>`` in ``partials_CN`` and a last
row of it holds ``<dout, b>``; they are added in order and moved to token order by a small kernel, without atomics. What a row
adds to the gradient of each parameter is left in ``shares_PCN`` in the same way, and summed over the rows of each expert.
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.activations import activate_backward
from moeblaze_ops.kernels.configs import choose_expert_down_backward
from moeblaze_ops.kernels.experts.bias_dots import bias_dots
from moeblaze_ops.kernels.experts.bias_grad import launch_expert_bias_grad
from moeblaze_ops.kernels.experts.eight_bit_rows import load_eight_bits
from moeblaze_ops.kernels.formulas.named import num_parameters
from moeblaze_ops.kernels.formulas.program import gradient_cost, gradient_program
from moeblaze_ops.kernels.hopper import ops as hopper_ops
from moeblaze_ops.kernels.hopper.configs import num_partials as hopper_partials
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
    locate_row_tile,
    offsets_of,
)


@triton.jit
def _load_h(row_ptrs, cols, F, stride_h_f, mask):
    if row_ptrs.dtype.element_ty == tl.int8:
        return load_eight_bits(row_ptrs, cols, F, mask)
    return tl.load(row_ptrs + cols[None, :] * stride_h_f, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _halves(tile):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _write_strip(
    da, scale, rows, row_in, cols, F,
    h_ptr, stride_h_n, stride_h_g, stride_h_f, dh_ptr, wa_ptr,
    parameters, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores dh and wa for some columns of a tile, and returns their part of ``<da', a>`` and of each parameter's gradient."""
    G: tl.constexpr = 2 if GATED else 1
    tile_in = row_in[:, None] & (cols < F)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    h_rows = h_ptr + wide_rows * stride_h_n
    gate = _load_h(h_rows, cols, F, stride_h_f, tile_in)  # [BLOCK_M, columns]
    up = gate
    if GATED:
        up = _load_h(h_rows + stride_h_g, cols, F, stride_h_f, tile_in)
    # dh may be h's memory, and in a small tile several threads hold the same element: all load before any stores.
    tl.debug_barrier()
    a, dgate, dup, dparameters = activate_backward(gate, up, da, parameters, (rows[:, None], cols[None, :]), ACTIVATION)
    scale = scale[:, None]
    dh_tile = dh_ptr + wide_rows * (G * F) + cols[None, :]  # [BLOCK_M, columns]
    tl.store(dh_tile, (dgate * scale).to(dh_ptr.dtype.element_ty), mask=tile_in)
    if GATED:
        tl.store(dh_tile + F, (dup * scale).to(dh_ptr.dtype.element_ty), mask=tile_in)
    tl.store(wa_ptr + wide_rows * F + cols[None, :], (a * scale).to(wa_ptr.dtype.element_ty), mask=tile_in)
    # Outside the tile da belongs to another row or column and must not reach the sum.
    sums = (tl.sum(tl.where(tile_in, da * a, 0.0), axis=1),)
    for i in tl.static_range(len(parameters)):
        sums = sums + (tl.sum(tl.where(tile_in, dparameters[i] * scale, 0.0), axis=1),)  # type: ignore[assignment]
    return sums


@triton.jit(do_not_specialize=["N"])
def _expert_down_backward_kernel(
    dout_ptr, h_ptr, w_ptr, weights_ptr, slots_ptr, offsets_ptr, blocks_ptr, q_ptr, lora_ptr, dh_ptr, wa_ptr, partials_ptr,
    params_ptr, shares_ptr,
    N, D, F,
    stride_dout_t, stride_dout_d, stride_h_n, stride_h_g, stride_h_f, stride_w_e, stride_w_f, stride_w_d,
    stride_weights_t, stride_weights_k, stride_q_n, stride_q_r, stride_lora_e, stride_lora_r, stride_lora_f,
    R: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, NUM_PARAMETERS: tl.constexpr,
    WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr, EVEN_D: tl.constexpr, EVEN_F: tl.constexpr,
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
    row_in = rows < end_row
    # Rows past the end read token 0: none of their results is stored, and the loop needs no mask.
    slots = tl.load(slots_ptr + rows, mask=row_in, other=0)
    da = add_rows_times_weight(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), dout_ptr + (slots // TOP_K).to(tl.int64) * stride_dout_t, stride_dout_d,
        w_ptr + expert.to(tl.int64) * stride_w_e, stride_w_d, offsets_of(cols, stride_w_f, WIDE), cols < F,
        D, BLOCK_K, EVEN_D, EVEN_F, ALLOW_TF32,
    )  # fmt: skip

    if R > 0:
        da = add_low_rank(
            da, q_ptr + tl.minimum(rows, end_row - 1).to(tl.int64) * stride_q_n, stride_q_r,
            lora_ptr + expert.to(tl.int64) * stride_lora_e, stride_lora_r, stride_lora_f, cols, F,
            R, BLOCK_R, EVEN_F, ALLOW_TF32,
        )  # fmt: skip
    scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if weights_ptr is not None:
        scale = load_slot_weights(weights_ptr, slots, row_in, stride_weights_t, stride_weights_k, TOP_K)
    # Strips keep h, dh and a of one strip in registers at a time, beside the product.
    strips = _halves(da)
    if BLOCK_N > 128:
        strips = _halves(strips[0]) + _halves(strips[1])
    STRIP_N: tl.constexpr = BLOCK_N // len(strips)
    parameters = load_parameters(params_ptr, expert, NUM_PARAMETERS)
    for strip in tl.static_range(len(strips)):
        sums = _write_strip(
            strips[strip], scale, rows, row_in, col_tile * BLOCK_N + strip * STRIP_N + tl.arange(0, STRIP_N), F,
            h_ptr, stride_h_n, stride_h_g, stride_h_f, dh_ptr, wa_ptr,
            parameters, ACTIVATION, GATED,
        )  # fmt: skip
        if strip == 0:
            totals = sums
        else:
            added = ()
            for i in tl.static_range(1 + NUM_PARAMETERS):
                added = added + (totals[i] + sums[i],)  # type: ignore[assignment]
            totals = added
    for i in tl.static_range(NUM_PARAMETERS):
        place = (i * num_col_tiles + col_tile).to(tl.int64) * N
        tl.store(shares_ptr + place + rows, totals[1 + i], mask=row_in)
    if weights_ptr is not None:
        tl.store(partials_ptr + col_tile.to(tl.int64) * N + rows, totals[0], mask=row_in)


@triton.jit(do_not_specialize=["num_slots", "N"])
def _dweights_kernel(
    partials_ptr,
    slots_ptr,
    positions_ptr,
    dweights_ptr,
    num_slots,
    N,
    num_partials,
    BY_ROW: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of all slots, with zeros for those that are not in the first range of rows, or of another range's rows."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BY_ROW:
        row = slots
        slots = tl.load(slots_ptr + row, mask=row < N, other=-1).to(tl.int64)
        inside = slots >= 0
        slot_in = inside
    else:
        slot_in = slots < num_slots
        row = tl.load(positions_ptr + slots, mask=slot_in, other=-1).to(tl.int64)
        inside = (row >= 0) & (row < N)
    partials = partials_ptr + row
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_partials, UNROLL):
        for step in tl.static_range(UNROLL):
            total += tl.load(partials, mask=inside & (first + step < num_partials), other=0.0)
            partials += N
    tl.store(dweights_ptr + slots, total.to(dweights_ptr.dtype.element_ty), mask=slot_in)


def _launch(
    dout_TD: Tensor, h_NGF: Tensor, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    q_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None,
    overwrite_h: bool = False, dweights_TK: Tensor | None = None, first_row: int = 0, wa_NF: Tensor | None = None,
    early: bool = False, params_EP: Tensor | None = None, parts: Iterable[RowPart] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``expert_down_backward`` on CUDA, and the gradient of the activation's parameters, None where there are none.

    Args:
        slots_N, offsets_E1, positions_TK, blocks_B2: of a range of rows, positions are those of all rows.
        overwrite_h: write dh over h, which must be contiguous: the program that reads an element is the one that writes it.
        dweights_TK: written in place of a new tensor, contiguous; by another range of rows than the first one, only where the
            slots are in it.
        first_row: position of the first row.
        wa_NF: written in place of a new tensor, contiguous.
        early: as for ``hopper_down_backward``.
        params_EP: contiguous.
        parts: as for ``launch_expert_up``.
        Others: those of the op.

    Returns:
        Contiguous; rows of dh and wa are unwritten from ``offsets_E1[E]`` on.
    """
    dout_TD, weights_TK = readable(dout_TD), None if weights_TK is None else readable(weights_TK)
    num_rows, G, _ = h_NGF.shape
    F = w_down[0].shape[1]
    dh_NGF = h_NGF if overwrite_h else dout_TD.new_empty((num_rows, G, F))
    if wa_NF is None:
        wa_NF = dout_TD.new_empty((num_rows, F))
    whole = (None, offsets_E1, blocks_B2)
    top_k = positions_TK.shape[1]
    operands_of: dict[str, Any] = {"gathered": dout_TD, "rows": (h_NGF,), "weights": w_down}
    operands_of |= {"scale": weights_TK, "low_rank": q_NR}
    shares_PCN = None
    if why_portable("expert_down_backward", **operands_of) is None:
        num_partials = hopper_partials(F, w_down[0].shape[2])
        partials_CN = _new_partials(h_NGF, num_partials, b_down)
        shares_PCN = _new_shares(params_EP, num_partials, h_NGF)
        written = (dh_NGF, partials_CN, wa_NF)
        for _, ends_E1, blocks_B2 in [whole] if parts is None else parts:
            given = (dout_TD, h_NGF, w_down, weights_TK, slots_N, ends_E1, blocks_B2, top_k, activation)
            hopper_ops.down_backward(*given, *written, early, q_NR, lora_a_ERF, params_EP, shares_PCN)
    else:
        config = _choose_config(dout_TD, h_NGF, w_down, activation)
        num_partials = ceil_div(F, config.block_n)
        partials_CN = None if weights_TK is None else _new_partials(h_NGF, num_partials, b_down)
        shares_PCN = _new_shares(params_EP, num_partials, h_NGF)
        for _, ends_E1, blocks_B2 in [whole] if parts is None else parts:
            given = (dout_TD, h_NGF, w_down, weights_TK, slots_N, ends_E1, blocks_B2, top_k, activation)
            _launch_portable(config, *given, q_NR, lora_a_ERF, dh_NGF, partials_CN, wa_NF, params_EP, shares_PCN)
    dparams_EP = None
    if params_EP is not None:
        shares_NC = shares_PCN.flatten(0, 1).t()
        sums_EC = launch_expert_bias_grad(shares_NC, None, slots_N, offsets_E1, top_k, False)
        dparams_EP = sums_EC.view(-1, params_EP.shape[1], num_partials).sum(2)
    if weights_TK is None:
        return dh_NGF, h_NGF.new_empty((0, top_k), dtype=torch.float32), wa_NF, dparams_EP
    if b_down:
        bias_dots(dout_TD, b_down[0], slots_N, *whole[1:], top_k, partials_CN.select(0, num_partials))
    if dweights_TK is None:
        dweights_TK = weights_TK.new_empty(positions_TK.shape)
    num_slots = positions_TK.shape[0] * top_k
    by_row = first_row > 0
    block = 64 if by_row else 256
    launch(
        _dweights_kernel,
        ceil_div(num_rows if by_row else num_slots, block),
        partials_CN, slots_N, positions_TK, dweights_TK,
        num_slots, num_rows, partials_CN.shape[0],
        BY_ROW=by_row, UNROLL=8,
        BLOCK_N=block, num_warps=block // 64, num_stages=1,
    )  # fmt: skip
    return dh_NGF, dweights_TK, wa_NF, dparams_EP


def launch_expert_down_backward(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``_launch`` of an activation without parameters: dh, dweights and wa."""
    return _launch(*args, **options)[:3]


def launch_expert_down_backward_learned(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``_launch`` of a formula that reads parameters, the last argument, [E, P] fp32 of any strides, and their gradient."""
    options["params_EP"] = args[-1].contiguous()
    return _launch(*args[:-1], **options)


def _new_shares(params_EP, num_partials, h_NGF):
    """What each row adds to the gradient of each parameter: a row of it for each column block; None without parameters."""
    if params_EP is None:
        return None
    return params_EP.new_empty((params_EP.shape[1], num_partials, h_NGF.shape[0]))


def _new_partials(h_NGF, num_partials, b_down):
    """Partial sums of dweights: a row for each column block, and one for ``<dout, b>`` where there is a bias."""
    # With strides: where a compiler does not know N, it takes those of a plain one for (max(1, N), 1) here and (N, 1) there.
    N = h_NGF.shape[0]
    return h_NGF.new_empty_strided((num_partials + len(b_down), N), (N, 1), dtype=torch.float32)


def _choose_config(dout_TD, h_NGF, w_down, activation):
    num_experts, F, D = w_down[0].shape
    return choose_expert_down_backward(
        operands(dout_TD),
        static_size(D),
        static_size(F),
        mean_rows(h_NGF.shape[0], num_experts),
        capability(dout_TD),
        gradient_cost(activation).num_steps,
        h_NGF.dtype == torch.int8,
    )


def _launch_portable(
    config, dout_TD, h_NGF, w_down, weights_TK,
    slots_N, offsets_E1, blocks_B2, top_k,
    activation,
    q_NR, lora_a_ERF,
    dh_NGF, partials_CN, wa_NF, params_EP, shares_PCN,
) -> None:  # fmt: skip
    """Fills dh, wa and, with weights, the partial sums, with parameters, what rows add to their gradients."""
    (w,) = w_down
    _, F, D = w.shape
    num_rows, G = h_NGF.shape[0], h_NGF.shape[1]
    num_row_tiles = most_row_tiles(blocks_B2, num_rows, config.block_m)
    launch(
        _expert_down_backward_kernel,
        num_row_tiles * ceil_div(F, config.block_n),
        dout_TD, h_NGF, w, weights_TK, slots_N, offsets_E1, blocks_B2, q_NR, lora_a_ERF, dh_NGF, wa_NF, partials_CN,
        params_EP, shares_PCN,
        num_rows, D, F,
        *dout_TD.stride(), *h_NGF.stride(), *w.stride(), *(weights_TK.stride() if weights_TK is not None else (0, 0)),
        *strides_of(q_NR, 2), *strides_of(lora_a_ERF, 3),
        **low_rank_blocks(q_NR), TOP_K=top_k, ACTIVATION=gradient_program(activation), GATED=G == 2,
        NUM_PARAMETERS=num_parameters(activation), WIDE=has_wide_offsets([w]), ALLOW_TF32=allows_tf32(),
        EVEN_D=is_multiple(D, config.block_k), EVEN_F=is_multiple(F, config.block_n),
        **config.options,
    )  # fmt: skip
