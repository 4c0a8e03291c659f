"""Row GEMMs whose two operands both come by TMA: the down projection, and dX of the up projection.

    down:  y[r] = a[r] @ W_down[e] + b_down[e]
    dX:    dx_rows[r] = sum_g dh[r, g] @ W_up[e, g]

Both contract F and give D columns, for the rows r of each expert e. One producer warp fills the ring; each of two
consumers multiplies 64 rows by 256 columns, stages the result in shared memory and lets TMA write it. TMA
cannot stop at the end of an expert: a half tile with fewer rows is written by masked stores instead.
"""

from functools import cache

from torch import Tensor

from moeblaze_ops.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
)
from moeblaze_ops.kernels.hopper_configs import RowsPlan, rows_tile
from moeblaze_ops.kernels.hopper_launch import bias_stride, describe, describe_weight, launch_persistent, part_views
from moeblaze_ops.kernels.hopper_tiles import (
    accumulator_layout,
    allocate_matrices,
    allocate_ring,
    bias_accumulator,
    load_matrix,
    load_weight,
    multiply,
    read_tile_order,
    skip,
)


@gluon.jit
def _produce(ring, order, rows_desc, weight_descs, PLAN: gl.constexpr):
    tile: gl.constexpr = PLAN.tile
    parts: gl.constexpr = PLAN.parts
    step = 0
    next_expert, next_first, _, next_column_block = order.locate(gl.program_id(0))
    for index in range(gl.program_id(0), order.count(), gl.num_programs(0)):
        expert = next_expert
        first = next_first
        column = next_column_block * tile.block_n
        next_expert, next_first, _, next_column_block = order.locate(index + gl.num_programs(0))
        for part in gl.static_range(parts):
            for k in range(0, PLAN.contracted, tile.block_k):
                ring.wait_empty(step)
                stage = step % ring.STAGES
                ready = ring.ready.index(stage)
                mbarrier.expect(ready, tile.a_bytes + tile.b_bytes)
                load_matrix(rows_desc, part, first, k, ready, ring.a.index(stage))
                load_weight(ring, step, 0, weight_descs[part], expert, k, column, PLAN)
                step += 1


@gluon.jit
def _consume(HALF: gl.constexpr, ring, order, bias_ptrs, y_desc, y_ptr, staging, PLAN: gl.constexpr):
    tile: gl.constexpr = PLAN.tile
    half_m: gl.constexpr = tile.half_m
    layout: gl.constexpr = accumulator_layout(PLAN)
    num_steps: gl.constexpr = PLAN.parts * ((PLAN.contracted + tile.block_k - 1) // tile.block_k)
    staged = staging.index(HALF)
    step = 0
    next_expert, next_first, next_end, next_column_block = order.locate(gl.program_id(0))
    for index in range(gl.program_id(0), order.count(), gl.num_programs(0)):
        expert = next_expert
        row = next_first + HALF * half_m
        end = next_end
        column = next_column_block * tile.block_n
        next_expert, next_first, next_end, next_column_block = order.locate(index + gl.num_programs(0))
        multiplied = gl.where(row < end, num_steps, 0)
        accumulator = bias_accumulator(bias_ptrs, expert, column, half_m, layout, PLAN)
        accumulator, step = multiply(ring, step, multiplied, accumulator, HALF, PLAN)
        step = skip(ring, step, num_steps - multiplied)
        y = accumulator.to(y_desc.dtype)
        if row + half_m <= end:
            tma_store_wait(0)
            staged.store(y)
            fence_async_shared()
            tma_store(y_desc, [row, column], staged)
        else:
            rows = row + gl.arange(0, half_m, gl.SliceLayout(1, layout))
            columns = column + gl.arange(0, tile.block_n, gl.SliceLayout(0, layout))
            offsets = gl.expand_dims(rows.to(gl.int64) * PLAN.columns, 1) + gl.expand_dims(columns, 0)
            inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(columns < PLAN.columns, 0)
            gl.store(y_ptr + offsets, y, mask=inside)
    tma_store_wait(0)


@gluon.jit
def _rows_kernel(
    rows_desc,
    first_weight_desc,
    last_weight_desc,
    bias_ptrs,
    y_desc,
    y_ptr,
    offsets_ptr,
    blocks_ptr,
    PLAN: gl.constexpr,
):
    tile: gl.constexpr = PLAN.tile
    ring = allocate_ring(y_desc.dtype, 1, PLAN)
    staging = allocate_matrices(y_desc.dtype, 2, tile.half_m, tile.block_n)
    order = read_tile_order(blocks_ptr, offsets_ptr, PLAN.column_blocks, tile.group)
    weight_descs = (first_weight_desc, last_weight_desc)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), ring, order, bias_ptrs, y_desc, y_ptr, staging, PLAN)),
            (_consume, (gl.constexpr(1), ring, order, bias_ptrs, y_desc, y_ptr, staging, PLAN)),
            (_produce, (ring, order, rows_desc, weight_descs, PLAN)),
        ],
        [4, 1],
        [240, 24],
    )


@cache
def _plan(contracted: int, columns: int, parts: int, b_k_inner: bool, bias_stride: int | None) -> RowsPlan:
    return RowsPlan(rows_tile(columns), contracted, columns, parts, b_k_inner, bias_stride)


def _launch_rows(rows_NGF, weights, biases, offsets_E1, blocks_B2, y_ND) -> None:
    if rows_NGF.shape[0] == 0:
        return
    num_columns = y_ND.shape[1]
    tile = rows_tile(num_columns)
    described = [describe_weight(w_EFD, False, tile.block_n, tile.block_k) for w_EFD in weights]
    plan = _plan(rows_NGF.shape[2], num_columns, len(weights), described[0][1], bias_stride(biases))
    launch_persistent(
        _rows_kernel,
        y_ND.device,
        describe(rows_NGF.transpose(0, 1), 1, tile.block_m, tile.block_k),
        described[0][0],
        described[-1][0],
        tuple(biases),
        describe(y_ND, tile.half_m, tile.block_n),
        y_ND,
        offsets_E1,
        blocks_B2,
        plan,
    )


def hopper_down_rows(a_NF: Tensor, w_down: list, b_down: list, offsets_E1: Tensor, blocks_B2: Tensor, y_ND: Tensor) -> None:
    """Writes ``y[r] = a[r] @ W[e] + b[e]`` for every row r of every expert e; rows past the last expert's are left alone.

    Args:
        a_NF: activations in expert order. Shape [N, F], bf16 or fp16, contiguous.
        w_down: one tensor [E, F, D], stride 1 in F or D, other strides multiples of 8.
        b_down: one contiguous tensor [E, D], or empty.
        offsets_E1, blocks_B2: as ``dispatch`` gives them.
        y_ND: the output, contiguous.

    Accumulates in fp32 from the bias; two runs agree bit for bit.
    """
    _launch_rows(a_NF.unsqueeze(1), w_down, b_down, offsets_E1, blocks_B2, y_ND)


def hopper_up_backward_rows(dh_NGF: Tensor, w_up: list, offsets_E1: Tensor, blocks_B2: Tensor, dx_rows_ND: Tensor) -> None:
    """Writes ``dx_rows[r] = sum over g, f of dh[r, g, f] W[e, g, f]``, one row for every routed row, in expert order.

    Args:
        dh_NGF: Shape [N, G, F], bf16 or fp16, contiguous.
        w_up: [E, 2, F, D] or two or one of [E, 1, F, D], stride 1 in F or D, other strides multiples of 8.
        offsets_E1, blocks_B2: as ``dispatch`` gives them.
        dx_rows_ND: the output, contiguous.

    Accumulates in fp32; two runs agree bit for bit.
    """
    _launch_rows(dh_NGF, part_views(w_up), [], offsets_E1, blocks_B2, dx_rows_ND)
