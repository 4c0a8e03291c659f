"""Row GEMMs whose two operands both come by TMA: the down projection, and dX of the up projection.

    down:  y[r] = a[r] @ W_down[e] + b_down[e]
    dX:    dx_rows[r] = sum_g dh[r, g] @ W_up[e, g]

Both contract F and give D columns, for the rows r of each expert e. One producer warp fills the ring; each of two
consumers multiplies 64 rows by 256 columns, stages the result in shared memory and lets TMA write it. TMA
cannot stop at the end of an expert: a half tile with fewer rows is written by masked stores instead. Nor can it scatter: with
one expert a token, when a row is the token's result, consumers read their stage back in whole lines and store them.
"""

from functools import cache

from torch import Tensor

from moeblaze_ops.kernels.hopper.configs import RowsPlan, has_few_rows, rows_tile
from moeblaze_ops.kernels.hopper.gluon_api import fence_async_shared, gdc_wait, gl, gluon, mbarrier, tma_store, tma_store_wait
from moeblaze_ops.kernels.hopper.launch import (
    bias_stride,
    describe,
    describe_low_rank,
    describe_weight,
    launch_persistent,
    part_views,
)
from moeblaze_ops.kernels.hopper.tiles import (
    CHUNK,
    accumulator_layout,
    allocate_matrices,
    allocate_ring,
    begin,
    bias_accumulator,
    load_low_rank,
    load_matrix,
    load_weight,
    multiply,
    read_tile_order,
    row_layout,
    skip,
    strip_of,
)


@gluon.jit
def _produce(ring, order, rows_desc, weight_descs, low_rank, PLAN: gl.constexpr):
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
                load_matrix(rows_desc, part, first, k, ready, ring.a, stage)
                load_weight(ring, step, ring.b_stage(step), weight_descs[part], expert, k, column, PLAN)
                step += 1
        if PLAN.low.rank > 0:
            for k in range(0, PLAN.low.rank, PLAN.low.block_k):
                ring.wait_empty(step)
                load_low_rank(ring, step, low_rank, expert, first, k, column, PLAN)
                step += 1


@gluon.jit
def _store_rows(staged, y, row, end, column, y_desc, y_ptr, PLAN: gl.constexpr):
    """Stores a half tile in expert order."""
    half_m: gl.constexpr = PLAN.tile.half_m
    if row + half_m <= end:
        tma_store_wait(0)
        staged.store(y)
        fence_async_shared()
        tma_store(y_desc, [row, column], staged)
    else:
        layout: gl.constexpr = accumulator_layout(PLAN)
        rows = row + gl.arange(0, half_m, gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, PLAN.tile.block_n, gl.SliceLayout(0, layout))
        offsets = gl.expand_dims(rows.to(gl.int64) * PLAN.columns, 1) + gl.expand_dims(columns, 0)
        inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(columns < PLAN.columns, 0)
        gl.store(y_ptr + offsets, y, mask=inside)


@gluon.jit
def _look_up(row, end, routing, PLAN: gl.constexpr):
    """The tokens of a half tile's rows and their weights, token 0 where there is no row."""
    slots_ptr, weights_ptr, stride_weights_t = routing
    rows = row + gl.arange(0, PLAN.tile.half_m, gl.SliceLayout(1, row_layout(gl.num_warps())))
    tokens = gl.maximum(gl.load(slots_ptr + gl.maximum(gl.minimum(rows, end - 1), 0)), 0)
    weights = tokens
    if PLAN.has_weights:
        weights = gl.load(weights_ptr + tokens.to(gl.int64) * stride_weights_t).to(gl.float32)
    return tokens, weights


@gluon.jit
def _store_tokens(HALF: gl.constexpr, staging, row, end, column, tokens, weights, product, out_ptr, PLAN: gl.constexpr):
    """Stores the staged half tile, each row at its token, weighted and with the product added."""
    half_m: gl.constexpr = PLAN.tile.half_m
    num_chunks: gl.constexpr = PLAN.tile.block_n // CHUNK
    channels: gl.constexpr = PLAN.channels
    layout: gl.constexpr = row_layout(gl.num_warps())
    left_ptr, left_strides, right_ptr, right_strides = product
    rows = row + gl.arange(0, half_m, gl.SliceLayout(1, layout))
    wide_tokens = tokens.to(gl.int64)
    for chunk in gl.static_range(num_chunks):
        columns = column + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        y = strip_of(staging, HALF, 0, chunk, half_m, CHUNK, staging.dtype).load(layout).to(gl.float32)
        if PLAN.has_weights:
            y = y * gl.expand_dims(weights, 1)
        for c in gl.static_range(channels):
            left = gl.load(left_ptr + wide_tokens * left_strides[0] + c * left_strides[1]).to(gl.float32)
            right = gl.load(right_ptr + c * right_strides[0] + columns * right_strides[1], mask=columns < PLAN.columns, other=0.0)
            y += gl.expand_dims(left, 1) * gl.expand_dims(right.to(gl.float32), 0)
        inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(columns < PLAN.columns, 0)
        offsets = gl.expand_dims(wide_tokens * PLAN.columns, 1) + gl.expand_dims(columns, 0)
        gl.store(out_ptr + offsets, y.to(staging.dtype), mask=inside)


@gluon.jit
def _consume(
    HALF: gl.constexpr, ring, order, bias_ptrs, routing, product, y_desc, y_ptr, staging, PLAN: gl.constexpr
):
    tile: gl.constexpr = PLAN.tile
    half_m: gl.constexpr = tile.half_m
    layout: gl.constexpr = accumulator_layout(PLAN)
    staged = staging.index(HALF)
    step = 0
    next_expert, next_first, next_end, next_column_block = order.locate(gl.program_id(0))
    for index in range(gl.program_id(0), order.count(), gl.num_programs(0)):
        expert = next_expert
        row = next_first + HALF * half_m
        end = next_end
        column = next_column_block * tile.block_n
        next_expert, next_first, next_end, next_column_block = order.locate(index + gl.num_programs(0))
        multiplied = gl.where(row < end, PLAN.steps, 0)
        if PLAN.to_tokens:
            tokens, weights = _look_up(row, end, routing, PLAN)
        accumulator = bias_accumulator(bias_ptrs, expert, column, half_m, layout, PLAN)
        accumulator, step = multiply(ring, step, multiplied, accumulator, HALF, PLAN)
        step = skip(ring, step, gl.where(multiplied > 0, 0, PLAN.steps + PLAN.low.steps))
        y = accumulator.to(y_desc.dtype)
        if PLAN.early:
            gdc_wait()
        if PLAN.to_tokens:
            staged.store(y)
            _store_tokens(HALF, staging, row, end, column, tokens, weights, product, y_ptr, PLAN)
        else:
            _store_rows(staged, y, row, end, column, y_desc, y_ptr, PLAN)
    tma_store_wait(0)


@gluon.jit
def _rows_kernel(
    rows_desc,
    first_weight_desc, last_weight_desc, low_rows_desc, low_weight_desc, bias_ptrs,
    slots_ptr, weights_ptr, stride_weights_t,
    left_ptr, stride_left_t, stride_left_c, right_ptr, stride_right_c, stride_right_d,
    y_desc, y_ptr,
    offsets_ptr, blocks_ptr,
    PLAN: gl.constexpr,
):  # fmt: skip
    tile: gl.constexpr = PLAN.tile
    ring = allocate_ring(y_desc.dtype, 1, PLAN)
    staging = allocate_matrices(y_desc.dtype, 2, tile.half_m, tile.block_n)
    begin(PLAN.early)
    order = read_tile_order(blocks_ptr, offsets_ptr, PLAN.column_blocks, tile.group)
    weight_descs = (first_weight_desc, last_weight_desc)
    if PLAN.low.rank > 0:
        low_rank = (low_rows_desc, low_weight_desc)
    else:
        low_rank = ()
    routing = (slots_ptr, weights_ptr, gl.to_tensor(stride_weights_t))
    left_strides = (gl.to_tensor(stride_left_t), gl.to_tensor(stride_left_c))
    right_strides = (gl.to_tensor(stride_right_c), gl.to_tensor(stride_right_d))
    product = (left_ptr, left_strides, right_ptr, right_strides)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), ring, order, bias_ptrs, routing, product, y_desc, y_ptr, staging, PLAN)),
            (_consume, (gl.constexpr(1), ring, order, bias_ptrs, routing, product, y_desc, y_ptr, staging, PLAN)),
            (_produce, (ring, order, rows_desc, weight_descs, low_rank, PLAN)),
        ],
        [4, 1],
        [240, 24],
    )
    if PLAN.early:
        gdc_wait()


_plan = cache(RowsPlan)


def _launch_rows(
    rows_NGF, weights, biases, offsets_E1, blocks_B2, y_ND, slots_N, weights_TK,
    left_TC=None, right_CD=None, early=False, low_NR=None, factor_ERD=None,
) -> None:  # fmt: skip
    if rows_NGF.shape[0] == 0:
        return
    num_columns = y_ND.shape[1]
    tile = rows_tile(num_columns, has_few_rows(rows_NGF.shape[0], weights[0].shape[0]))
    described = [describe_weight(w_EFD, False, tile.block_n, tile.block_k) for w_EFD in weights]
    channels = 0 if left_TC is None else left_TC.shape[1]
    form = (rows_NGF.shape[2], num_columns, len(weights), described[0][1], bias_stride(biases))
    factor = None if factor_ERD is None else factor_ERD.unsqueeze(1)
    low, (low_rows, low_weight, _) = describe_low_rank(low_NR, factor, tile.block_m, tile.block_n)
    plan = _plan(tile, *form, slots_N is not None, weights_TK is not None, channels, early, low)
    product = (y_ND, 0, 0, y_ND, 0, 0) if left_TC is None else (left_TC, *left_TC.stride(), right_CD, *right_CD.stride())
    launch_persistent(
        _rows_kernel,
        y_ND.device,
        describe(rows_NGF.transpose(0, 1), 1, tile.block_m, tile.block_k),
        described[0][0], described[-1][0], low_rows, low_weight, tuple(biases),
        offsets_E1 if slots_N is None else slots_N,
        offsets_E1 if weights_TK is None else weights_TK, 0 if weights_TK is None else weights_TK.stride(0),
        *product,
        describe(y_ND, tile.half_m, tile.block_n), y_ND,
        offsets_E1, blocks_B2,
        plan,
    )  # fmt: skip


def hopper_down_rows(
    a_NF: Tensor, w_down: list, b_down: list | None,
    offsets_E1: Tensor, blocks_B2: Tensor,
    y_ND: Tensor,
    slots_N: Tensor | None = None,
    weights_TK: Tensor | None = None,
    v_NR: Tensor | None = None, lora_b_ERD: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes ``y[r] = a[r] @ W[e] + b[e]`` for every row r of every expert e; rows past the last expert's are left alone.

    Args:
        y_ND: the output, contiguous.
        slots_N: with one expert a token, the slots: row r is written at ``y[slots[r]]``. None for ``y[r]``.
        weights_TK: with slots, what the rows are multiplied by once they are rounded. Shape [T, 1], or None.
        Others: those of ``launch_expert_down``, such as ``select`` lets through.

    Accumulates in fp32 from the bias; two runs agree bit for bit.
    """
    low_rank = {"low_NR": v_NR, "factor_ERD": lora_b_ERD}
    _launch_rows(a_NF.unsqueeze(1), w_down, b_down or [], offsets_E1, blocks_B2, y_ND, slots_N, weights_TK, **low_rank)


def hopper_up_backward_rows(
    dh_NGF: Tensor, w_up: list,
    offsets_E1: Tensor, blocks_B2: Tensor,
    dx_rows_ND: Tensor,
    slots_N: Tensor | None = None,
    left_TC: Tensor | None = None, right_CD: Tensor | None = None, early: bool = False,
    du_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes ``dx_rows[r] = sum over g, f of dh[r, g, f] W[e, g, f]``, one row for every routed row, in expert order.

    Args:
        dx_rows_ND: the output, contiguous.
        slots_N: with one expert a token, the slots: row r is written at ``dx_rows[slots[r]]``. None for ``dx_rows[r]``.
        left_TC, right_CD: with slots, a product of at most 8 channels that is added to the rounded rows; any strides, or None.
        early: begin before the kernel launched last has ended, if that does not write what is read here: only what this one
            writes waits for it.
        Others: those of ``launch_expert_up_backward``, such as ``select`` lets through.

    Accumulates in fp32; two runs agree bit for bit.
    """
    added = (left_TC, right_CD, early, du_NR, lora_a_ERD)
    _launch_rows(dh_NGF, part_views(w_up), [], offsets_E1, blocks_B2, dx_rows_ND, slots_N, None, *added)
