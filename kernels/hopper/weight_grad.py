"""Weight gradients: ``dW[e, g, f, :] = sum over rows r of e of grouped[r, g, f] gathered[t(r), :]``.

The rows of an expert are the contracted axis. Two warps copy the gathered tokens with cp.async, two have TMA bring
the other operand, two consumers multiply the transposed left operand. The operand that lies along the rows of the
output tile is the one whose axis is the outer one in the storage of dW, so that TMA can write it: d for weights
stored [E, D, F], f otherwise.

The last step of an expert has fewer rows than a stage. Both operands must be zero there, since zero times an
Inf or NaN of the next expert's rows would not be: that step copies both with masks. Tiles are visited from the
expert with the most rows to the one with the fewest, back and forth over the programs, so that all programs end
at about the same time however skewed the routing is.

How a tile of dW is written, or added to, is in ``weight_grad_tiles``.
"""

from functools import cache
from typing import Any

from torch import Tensor

from moeblaze_ops.kernels.hopper.configs import WeightGradPlan, weight_grad_tile
from moeblaze_ops.kernels.hopper.expert_order import ExpertTiles, order_experts
from moeblaze_ops.kernels.hopper.gather import row_layout, row_starts
from moeblaze_ops.kernels.hopper.gluon_api import copy_rows, copy_rows_arrive, gdc_wait, gl, gluon, mbarrier, tma_store_wait
from moeblaze_ops.kernels.hopper.launch import describe, launch_persistent, needs_wide_offsets, part_views
from moeblaze_ops.kernels.hopper.tiles import (
    accumulator_layout,
    allocate_barriers,
    allocate_matrices,
    allocate_ring,
    begin,
    load_matrix,
    multiply,
)
from moeblaze_ops.kernels.hopper.weight_grad_tiles import add_tile, fetch_tile, write_fetched_tile, write_tile


@gluon.jit
def _split_tile(tile, PLAN: gl.constexpr):
    """``(part, row block, column block)`` of an output tile; the blocks count within the part.

    Groups of row blocks share a column block before the next one starts: the programs that run at the same time then read
    a nearly square part of the output's rows and columns.
    """
    row_parts: gl.constexpr = 1 if PLAN.gathered_is_a else PLAN.parts
    rows: gl.constexpr = row_parts * PLAN.m_blocks
    columns: gl.constexpr = PLAN.blocks // rows
    group: gl.constexpr = PLAN.tile.group
    first = tile // (group * columns) * group
    size = gl.minimum(rows - first, group)
    within = tile % (group * columns)
    row = first + within % size
    column = within // size
    if PLAN.gathered_is_a:
        return column // PLAN.n_blocks, row, column % PLAN.n_blocks
    else:
        return row // PLAN.m_blocks, row % PLAN.m_blocks, column


@gluon.jit
def _copy_matrix(buffer, base_ptr, row_offsets, column, rows_inside, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Starts the copy of a matrix whose rows begin at ``row_offsets``; zeros outside ``rows_inside`` and WIDTH."""
    block: gl.constexpr = buffer.shape[1]
    columns = gl.arange(0, block, gl.SliceLayout(0, layout))
    ptrs = gl.expand_dims(base_ptr + column + columns, 0) + gl.expand_dims(row_offsets, 1)
    inside = gl.expand_dims(rows_inside, 1)
    if WIDTH % block != 0:
        inside = inside & gl.expand_dims(column + columns < WIDTH, 0)
    inside, _ = gl.broadcast(inside, ptrs)
    copy_rows(buffer, ptrs, mask=inside)


@gluon.jit
def _operand_columns(tile, PLAN: gl.constexpr):
    """First columns of the gathered and of the grouped operand of an output tile."""
    _, row_block, column_block = _split_tile(tile, PLAN)
    if PLAN.gathered_is_a:
        return row_block * PLAN.gathered_block, column_block * PLAN.grouped_block
    else:
        return column_block * PLAN.gathered_block, row_block * PLAN.grouped_block


@gluon.jit
def _gathered_buffer(ring, stage, PLAN: gl.constexpr):
    if PLAN.gathered_is_a:
        return ring.a.index(stage)
    else:
        return ring.b.index(stage)


@gluon.jit
def _grouped_ring(ring, PLAN: gl.constexpr):
    if PLAN.gathered_is_a:
        return ring.b
    else:
        return ring.a


@gluon.jit
def _produce_grouped(ring, tiles, grouped_desc, PLAN: gl.constexpr):
    """Brings the grouped operand of every whole step by TMA; the last, ragged one is left to the copying warps."""
    block_k: gl.constexpr = PLAN.tile.block_k
    step = 0
    _, next_tile, next_first, next_end, _ = tiles.locate(0)
    for turn in range(tiles.rounds()):
        part, _, _ = _split_tile(next_tile, PLAN)
        _, column = _operand_columns(next_tile, PLAN)
        first = next_first
        end = next_end
        _, next_tile, next_first, next_end, _ = tiles.locate(turn + 1)
        # Triton 3.6 miscompiles a loop whose lower bound is carried by the loop around it.
        for k in range(gl.cdiv(end - first, block_k)):
            row = first + k * block_k
            ring.wait_empty(step)
            stage = step % ring.STAGES
            ready = ring.ready.index(stage)
            if row + block_k <= end:
                mbarrier.expect(ready, PLAN.grouped_bytes)
                load_matrix(grouped_desc, part, row, column, ready, _grouped_ring(ring, PLAN), stage)
            else:
                mbarrier.arrive(ready)
            step += 1


@gluon.jit
def _produce_gathered(ring, tiles, x_ptr, stride_x8, slots_ptr, grouped_ptr, PLAN: gl.constexpr):
    """Copies the gathered operand, and both operands of a ragged step; slots are read a step ahead, across tiles."""
    block_k: gl.constexpr = PLAN.tile.block_k
    gathered_width: gl.constexpr = PLAN.gathered_width
    grouped_width: gl.constexpr = PLAN.grouped_width
    layout: gl.constexpr = row_layout(gl.num_warps())
    ks = gl.arange(0, block_k, gl.SliceLayout(1, layout))
    step = 0
    _, next_tile, next_first, next_end, _ = tiles.locate(0)
    next_slots = gl.load(slots_ptr + next_first + ks, mask=next_first + ks < next_end, other=0)
    for turn in range(tiles.rounds()):
        part, _, _ = _split_tile(next_tile, PLAN)
        x_column, grouped_column = _operand_columns(next_tile, PLAN)
        first = next_first
        end = next_end
        _, next_tile, next_first, next_end, _ = tiles.locate(turn + 1)
        for k in range(gl.cdiv(end - first, block_k)):
            row = first + k * block_k
            x_offsets = row_starts(next_slots, stride_x8, PLAN)
            rows_inside = row + ks < end
            # No tile with rows comes after one without: experts without rows are visited last.
            is_last = row + block_k >= end
            ahead = gl.where(is_last, next_first, row + block_k) + ks
            next_slots = gl.load(slots_ptr + ahead, mask=ahead < gl.where(is_last, next_end, end), other=0)
            ring.wait_empty(step)
            stage = step % ring.STAGES
            x_buffer = _gathered_buffer(ring, stage, PLAN)
            _copy_matrix(x_buffer, x_ptr, x_offsets, x_column, rows_inside, gathered_width, layout)
            if row + block_k > end:
                offsets = (row + ks).to(gl.int64) * (PLAN.parts * grouped_width) + part * grouped_width
                grouped_buffer = _grouped_ring(ring, PLAN).index(stage)
                _copy_matrix(grouped_buffer, grouped_ptr, offsets, grouped_column, rows_inside, grouped_width, layout)
            copy_rows_arrive(ring.ready.index(stage), increment_count=False)
            step += 1


@gluon.jit
def _consume(
    HALF: gl.constexpr, ring, tiles, dw_descs, dw_ptrs, stride_dw_e8, stride_dw_m8, fresh_ptr, stage, PLAN: gl.constexpr
):
    half_m: gl.constexpr = PLAN.tile.half_m
    block_n: gl.constexpr = PLAN.tile.block_n
    layout: gl.constexpr = accumulator_layout(PLAN)
    staging, fetched = stage
    arrived = fetched.index(HALF)
    step = 0
    num_fetched = 0
    next_expert, next_tile, next_first, next_end, next_exists = tiles.locate(0)
    for turn in range(tiles.rounds()):
        expert = next_expert
        exists = next_exists
        part, row_block, column_block = _split_tile(next_tile, PLAN)
        num_steps = gl.cdiv(next_end - next_first, PLAN.tile.block_k)
        next_expert, next_tile, next_first, next_end, next_exists = tiles.locate(turn + 1)
        row = row_block * PLAN.tile.block_m + HALF * half_m
        column = column_block * block_n
        is_added = exists
        if PLAN.has_fresh:
            is_added = exists & (gl.load(fresh_ptr + expert) == 0)
        if PLAN.fetches:
            if is_added:
                fetch_tile(staging, HALF, arrived, dw_descs, part, expert, row, column, PLAN)
        sums = gl.zeros([half_m, block_n], gl.float32, layout)
        sums, step = multiply(ring, step, num_steps, sums, HALF, PLAN)
        if exists:
            if PLAN.fetches:
                mbarrier.wait(arrived, num_fetched & 1, pred=is_added)
                num_fetched += is_added.to(gl.int32)
                write_fetched_tile(HALF, staging, sums, is_added, dw_descs, part, expert, row, column, PLAN)
            elif PLAN.accumulate:
                add_tile(sums, dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, column, PLAN)
            else:
                write_tile(staging, HALF, sums, dw_descs, part, expert, row, column, PLAN)
    if not PLAN.is_wider:
        tma_store_wait(0)


@gluon.jit
def _weight_grad_kernel(
    x_ptr, stride_x8, slots_ptr, grouped_desc, grouped_ptr,
    first_dw_desc, last_dw_desc, dw_ptrs, stride_dw_e8, stride_dw_m8,
    fresh_ptr, order_ptr, offsets_ptr, num_experts,
    PLAN: gl.constexpr,
):  # fmt: skip
    tile: gl.constexpr = PLAN.tile
    copy_threads: gl.constexpr = 32 * PLAN.copy_warps
    ring = allocate_ring(grouped_desc.dtype, 1 + copy_threads, PLAN)
    staging = allocate_matrices(grouped_desc.dtype, 2, tile.half_m, PLAN.store_n)
    stage = (staging, allocate_barriers(2, 1))
    begin(PLAN.early)
    num_busy = gl.load(order_ptr + num_experts)
    num_visited = gl.to_tensor(num_experts)
    if PLAN.accumulate:
        num_visited = num_busy
    tiles = ExpertTiles(order_ptr, offsets_ptr, num_visited, num_busy, PLAN.blocks, PLAN.by_columns)
    dw_descs = (first_dw_desc, last_dw_desc)
    stride_e8 = gl.to_tensor(stride_dw_e8)
    stride_m8 = gl.to_tensor(stride_dw_m8)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), ring, tiles, dw_descs, dw_ptrs, stride_e8, stride_m8, fresh_ptr, stage, PLAN)),
            (_consume, (gl.constexpr(1), ring, tiles, dw_descs, dw_ptrs, stride_e8, stride_m8, fresh_ptr, stage, PLAN)),
            (_produce_grouped, (ring, tiles, grouped_desc, PLAN)),
            (_produce_gathered, (ring, tiles, x_ptr, stride_x8, slots_ptr, grouped_ptr, PLAN)),
        ],
        [4, PLAN.load_warps, PLAN.copy_warps],
        [PLAN.registers, PLAN.registers, PLAN.registers],
    )
    if PLAN.early:
        gdc_wait()


_plan = cache(WeightGradPlan)


def hopper_weight_grad(
    gathered_TD: Tensor, grouped_NGF: Tensor, dw: list[Tensor],
    slots_N: Tensor, offsets_E1: Tensor, top_k: int,
    accumulate: bool = False, fresh_E: Tensor | None = None, order_E1: Tensor | None = None,
    early: bool = False,
) -> None:  # fmt: skip
    """Writes ``dW[e, g, f, :] = sum over rows r of e of grouped[r, g, f] gathered[slots[r] // K, :]``, or adds it to dW.

    Args:
        dw: the outputs, in a form of ``like``; of gathered's dtype, and to accumulate also fp32, and two with equal strides.
        accumulate: add to dW, where an expert without rows keeps what it has, instead of writing; it gets zeros then.
        fresh_E: as for ``launch_expert_weight_grad_add``.
        order_E1: what ``order_experts`` gives, where that is known.
        early: begin before the kernel launched last has ended, if that writes nothing of what is read here and reads nothing
            of what is written; with ``order_E1`` only.
        Others: those of ``launch_expert_weight_grad``, such as ``select`` lets through.

    Sums in fp32; two runs agree bit for bit.
    """
    parts = tuple(dw) if dw[0].ndim == 3 else part_views(dw)
    num_experts, num_f, num_d = parts[0].shape
    if gathered_TD.shape[0] == 0:
        if not accumulate or fresh_E is not None:
            for part in parts:
                part.zero_()
        return
    gathered_is_a = parts[0].stride(2) != 1
    is_wider = parts[0].dtype != gathered_TD.dtype
    tile = weight_grad_tile(accumulate and not is_wider)
    plan = _plan(
        tile=tile,
        m=num_d if gathered_is_a else num_f,
        n=num_f if gathered_is_a else num_d,
        parts=len(parts),
        top_k=top_k,
        wide_offsets=needs_wide_offsets(gathered_TD),
        gathered_is_a=gathered_is_a,
        store_n=tile.block_n if accumulate and not is_wider else tile.block_n // 2,
        accumulate=accumulate,
        is_wider=is_wider,
        has_fresh=fresh_E is not None,
        early=early,
    )
    stored = [part.transpose(1, 2) if gathered_is_a else part for part in parts]
    described = stored if plan.is_wider else [describe(view, 1, tile.half_m, plan.store_n) for view in stored]
    order_E1 = order_experts(offsets_E1, fresh_E) if order_E1 is None else order_E1
    launch_persistent(
        _weight_grad_kernel,
        gathered_TD.device,
        gathered_TD, gathered_TD.stride(0) // 8, slots_N,
        describe(grouped_NGF.transpose(0, 1), 1, tile.block_k, plan.grouped_block), grouped_NGF,
        described[0], described[-1], tuple(stored), stored[0].stride(0) // 8, stored[0].stride(1) // 8,
        offsets_E1 if fresh_E is None else fresh_E, order_E1, offsets_E1, num_experts,
        plan,
    )  # fmt: skip


def weight_grad_of_parts(*args: Any) -> None:
    """``hopper_weight_grad`` of the arguments of its op, which has a gate and an up apart: it says of each that it is written."""
    gathered_TD, grouped_NGF, slots_N, offsets_E1, top_k, accumulate, first, second, *rest = args
    dw = [first] if second is None else [first, second]
    hopper_weight_grad(gathered_TD, grouped_NGF, dw, slots_N, offsets_E1, top_k, accumulate, *rest)
