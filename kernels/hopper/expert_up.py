"""The up projection: ``h[r, g] = x[t(r)] @ W[e, g]^T + b[e, g]`` and ``a = act(h)``, token rows read through ``slots_N``.

A tile holds 128 rows and, for a gated expert, 128 columns of the gate beside the same 128 columns of up, so that one
program has both halves of every ``a``. The epilogue lets TMA write h straight from the consumers' buffer and
computes ``a`` from the rounded h in it, as the backward pass will. Half tiles that reach past their expert's rows
are written by masked stores, and so is h in 8 bits.
"""

from functools import cache

import torch
from torch import Tensor

from moeblaze_ops.kernels.activations import IDENTITY
from moeblaze_ops.kernels.formulas.named import num_parameters
from moeblaze_ops.kernels.formulas.program import value_program
from moeblaze_ops.kernels.hopper.activations import activate, load_parameters
from moeblaze_ops.kernels.hopper.configs import GatherPlan, has_few_rows, reads_more_than_cached, up_tile
from moeblaze_ops.kernels.hopper.expert_order import spread_blocks
from moeblaze_ops.kernels.hopper.gather import CHUNK, allocate_handoff, consume, produce, row_layout
from moeblaze_ops.kernels.hopper.gluon_api import gl, gluon, mbarrier, tma_store, tma_store_wait
from moeblaze_ops.kernels.hopper.kept_h import store_eight_bits
from moeblaze_ops.kernels.hopper.launch import (
    bias_stride,
    describe,
    describe_low_rank,
    describe_weight,
    launch_persistent,
    needs_wide_offsets,
    part_views,
)
from moeblaze_ops.kernels.hopper.tiles import allocate_ring, begin, box_of, read_tile_order

STRIP_ROWS = gl.constexpr(16)
"""Rows of a half tile that the epilogue works on at a time."""


@gluon.jit
def _store_h(tiles, half, h_desc, row, column, PLAN: gl.constexpr):
    """Starts the TMA stores of a half tile whose rows all belong to its expert; columns past F are not written."""
    parts: gl.constexpr = PLAN.parts
    for part in gl.static_range(parts):
        tma_store(h_desc, [part, row, column], box_of(tiles, half * parts + part, h_desc))


@gluon.jit
def _finish_strip(handoff, half, strip, row, end, column, is_whole, h_ptr, a_ptr, parameters, PLAN: gl.constexpr):
    """Stores ``a`` of STRIP_ROWS rows, and their h too when TMA could not."""
    num_chunks: gl.constexpr = PLAN.part_n // CHUNK
    program: gl.constexpr = PLAN.activation
    layout: gl.constexpr = row_layout(gl.num_warps())
    rows = row + gl.arange(0, STRIP_ROWS, gl.SliceLayout(1, layout))
    a_rows = gl.expand_dims(rows.to(gl.int64) * PLAN.columns, 1)
    for chunk in gl.static_range(num_chunks):
        columns = gl.expand_dims(column + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)
        inside = gl.expand_dims(rows < end, 1)
        if PLAN.columns % PLAN.part_n != 0:
            inside = inside & (columns < PLAN.columns)
        gate = handoff.load(half, strip * STRIP_ROWS, chunk, STRIP_ROWS, layout)  # [STRIP_ROWS, CHUNK]
        up = gate
        if PLAN.parts == 2:
            up = handoff.load(half, strip * STRIP_ROWS, num_chunks + chunk, STRIP_ROWS, layout)
        if PLAN.activation != IDENTITY:
            place = (gl.expand_dims(rows, 1), columns)
            a = activate(gate.to(gl.float32), up.to(gl.float32), parameters, place, program)
            gl.store(a_ptr + a_rows + columns, a.to(gate.dtype), mask=inside)
        if PLAN.store_h8:
            store_eight_bits(gate, h_ptr, 0, row, end, column + chunk * CHUNK, PLAN)
            if PLAN.parts == 2:
                store_eight_bits(up, h_ptr, 1, row, end, column + chunk * CHUNK, PLAN)
        if PLAN.store_h:
            if not is_whole:
                h_ptrs = h_ptr + PLAN.parts * a_rows + columns
                gl.store(h_ptrs, gate, mask=inside)
                if PLAN.parts == 2:
                    gl.store(h_ptrs + PLAN.columns, up, mask=inside)


@gluon.jit
def _finish(handoff, order, h_desc, h_ptr, a_ptr, learned, PLAN: gl.constexpr):
    half_m: gl.constexpr = PLAN.tile.half_m
    num_parameters: gl.constexpr = PLAN.num_parameters
    num_tiles = 0
    for index in range(gl.program_id(0), order.count(), gl.num_programs(0)):
        expert, first, end, column_block = order.locate(index)
        column = column_block * PLAN.part_n
        parameters = ()
        if num_parameters > 0:
            parameters = load_parameters(learned[0], expert, num_parameters)
        for half in range(2):
            row = first + half * half_m
            is_whole = row + half_m <= end
            mbarrier.wait(handoff.full.index(half), num_tiles & 1)
            if PLAN.store_h:
                if is_whole:
                    _store_h(handoff.tiles, half, h_desc, row, column, PLAN)
            num_strips = half_m // STRIP_ROWS
            if PLAN.activation == IDENTITY:
                # There is nothing but h, which TMA has written.
                num_strips = gl.where(is_whole, 0, num_strips)
            for strip in range(num_strips):
                strip_row = row + strip * STRIP_ROWS
                _finish_strip(handoff, half, strip, strip_row, end, column, is_whole, h_ptr, a_ptr, parameters, PLAN)
            tma_store_wait(0)
            mbarrier.arrive(handoff.empty.index(half))
        num_tiles += 1


@gluon.jit
def _expert_up_kernel(
    x_ptr, stride_x8,
    first_weight_desc, last_weight_desc, low_rows_desc, first_low_desc, last_low_desc, bias_ptrs,
    h_desc, h_ptr, a_ptr, params_ptr,
    slots_ptr, offsets_ptr, blocks_ptr,
    PLAN: gl.constexpr,
):  # fmt: skip
    copy_threads: gl.constexpr = 32 * PLAN.warps.gather
    ring = allocate_ring(h_desc.dtype, 1 + copy_threads, PLAN)
    handoff = allocate_handoff(h_desc.dtype, PLAN)
    begin(False)
    order = read_tile_order(blocks_ptr, offsets_ptr, PLAN.column_blocks, PLAN.tile.group)
    weight_descs = (first_weight_desc, last_weight_desc)
    if PLAN.low.rank == 0:
        low_rank = ()
    elif PLAN.parts == 1:
        low_rank = (low_rows_desc, first_low_desc)
    else:
        low_rank = (low_rows_desc, first_low_desc, last_low_desc)
    if PLAN.num_parameters > 0:
        learned = (params_ptr,)
    else:
        learned = ()
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), ring, order, bias_ptrs, handoff, PLAN)),
            (consume, (gl.constexpr(1), ring, order, bias_ptrs, handoff, PLAN)),
            (produce, (ring, order, x_ptr, stride_x8, slots_ptr, weight_descs, low_rank, PLAN)),
            (_finish, (handoff, order, h_desc, h_ptr, a_ptr, learned, PLAN)),
        ],
        [4, PLAN.warps.gather, PLAN.warps.finish],
        PLAN.warps.registers,
    )


_plan = cache(GatherPlan)


def hopper_expert_up(
    x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor] | None,
    slots_N: Tensor, offsets_E1: Tensor, blocks_B2: Tensor, top_k: int,
    activation: str, h_NGF: Tensor, a_NF: Tensor,
    u_NR: Tensor | None = None, lora_b_EGFR: Tensor | None = None,
    params_EP: Tensor | None = None, begins_E: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes ``h[r, g] = x[slots[r] // K] @ W[e, g]^T + b[e, g]`` and ``a = act(h)`` for every row r of every expert e.

    Args:
        h_NGF, a_NF: the outputs, contiguous; ``a`` is left alone when ``activation`` is ``"identity"``, and h is
            never written when it has no rows; in 8 bits where it is int8.
        begins_E: given with the ends and blocks of a ``RowPart``.
        Others: those of ``launch_expert_up``, such as ``select`` lets through.

    Accumulates in fp32 from the bias, rounds h, and computes ``a`` from the rounded h; two runs agree bit for bit.
    """
    if x_TD.shape[0] == 0:
        return
    weights, biases = part_views(w_up), part_views(b_up or [])
    num_columns = a_NF.shape[1]
    few_rows = has_few_rows(slots_N.shape[0], weights[0].shape[0])
    tile = up_tile(num_columns, len(weights), few_rows)
    part_n = tile.block_n // len(weights)
    described = [describe_weight(w_EFD, True, part_n, tile.block_k) for w_EFD in weights]
    factor = None if lora_b_EGFR is None else lora_b_EGFR.mT
    low, low_rank = describe_low_rank(u_NR, factor, tile.block_m, part_n)
    plan = _plan(
        tile=tile,
        contracted=x_TD.shape[1],
        columns=num_columns,
        parts=len(weights),
        b_k_inner=described[0][1],
        top_k=top_k,
        wide_offsets=needs_wide_offsets(x_TD),
        activation=value_program(activation, is_short=True),
        gated=len(weights) == 2,
        num_parameters=num_parameters(activation),
        bias_stride=bias_stride(biases),
        store_h=h_NGF.shape[0] > 0 and h_NGF.dtype == x_TD.dtype,
        store_h8=h_NGF.dtype == torch.int8,
        low=low,
        few_rows=few_rows and x_TD.shape[1] % tile.block_k == 0,
    )
    if reads_more_than_cached(tile, x_TD.nbytes):
        blocks_B2 = spread_blocks(blocks_B2, offsets_E1, begins_E)
    h_desc = describe(h_NGF.transpose(0, 1), 1, tile.half_m, part_n) if plan.store_h else described[0][0]
    launch_persistent(
        _expert_up_kernel,
        x_TD.device,
        x_TD, x_TD.stride(0) // 8,
        described[0][0], described[-1][0], *low_rank, biases,
        h_desc, h_NGF, a_NF, params_EP,
        slots_N, offsets_E1, blocks_B2,
        plan,
    )  # fmt: skip
