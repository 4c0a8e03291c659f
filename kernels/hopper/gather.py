"""Producer and consumer of the GEMMs that read token rows through the routing: the up projection and dA.

Both contract D and give columns of F, for rows in expert order whose left operand is a token's row. TMA on Hopper
cannot gather rows, so warps of their own copy them with cp.async, which arrives on the same barrier as the TMA of the
weight. Consumers only multiply and hand a rounded tile over; epilogue warps work on it meanwhile.
"""

from moeblaze_ops.kernels.hopper.gluon_api import (
    aggregate,
    copy_rows,
    copy_rows_arrive,
    copy_rows_commit,
    copy_rows_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    shared_memory_descriptor,
)
from moeblaze_ops.kernels.hopper.tiles import (
    CHUNK,
    accumulator_layout,
    allocate_barriers,
    allocate_matrices,
    bias_accumulator,
    load_low_rank,
    load_weight,
    multiply,
    row_layout,
    skip,
    strip_of,
)


@aggregate
class Handoff:
    """Finished half tiles on their way from the two consumers to the epilogue, one buffer for each consumer."""

    tiles: shared_memory_descriptor
    full: shared_memory_descriptor
    empty: shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def load(self, half, row, chunk: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
        """``ROWS`` rows, from ``row`` on, and CHUNK columns of a half tile. Shape [ROWS, CHUNK]."""
        return strip_of(self.tiles, half, row, chunk, ROWS, CHUNK, self.tiles.dtype).load(layout)

    @gluon.jit
    def load_pairs(self, half, row, chunk: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
        """The same as pairs of elements. Shape [ROWS, CHUNK // 2], int32."""
        return strip_of(self.tiles, half, row, chunk, ROWS, CHUNK // 2, gl.int32).load(layout)


@gluon.jit
def allocate_handoff(dtype: gl.constexpr, PLAN: gl.constexpr):
    tiles = allocate_matrices(dtype, 2, PLAN.tile.half_m, PLAN.tile.block_n)
    return Handoff(tiles, allocate_barriers(2, 1), allocate_barriers(2, 1))


@gluon.jit
def row_starts(slots, stride_x8, PLAN: gl.constexpr):
    """Where the token rows of ``slots`` begin, in elements; token 0 for an unused slot, which is read if no slot is used.

    ``stride_x8`` counts units of 8 elements: copies of 16 bytes need a stride that is known to be a multiple of 8.
    """
    rows = gl.maximum(slots, 0) // PLAN.top_k
    if PLAN.wide_offsets:
        rows = rows.to(gl.int64)
    return rows * (stride_x8 * 8)


@gluon.jit
def _load_step_weights(ring, step, weight_descs, expert, k, column, PLAN: gl.constexpr):
    parts: gl.constexpr = PLAN.parts
    mbarrier.expect(ring.ready.index(step % ring.STAGES), PLAN.tile.b_bytes)
    for part in gl.static_range(parts):
        load_weight(ring, step, ring.b_stage(step) * parts + part, weight_descs[part], expert, k, column, PLAN)


@gluon.jit
def _copy_step_rows(ring, step, x_ptr, row_offsets, k, PLAN: gl.constexpr):
    block_k: gl.constexpr = PLAN.tile.block_k
    ks = gl.arange(0, block_k, gl.SliceLayout(0, row_layout(gl.num_warps())))
    x_offsets = gl.expand_dims(row_offsets, 1) + gl.expand_dims(ks, 0)
    x_ptrs = x_ptr + k + x_offsets  # [block_m, block_k]
    stage = step % ring.STAGES
    if PLAN.contracted % block_k != 0:
        inside, _ = gl.broadcast(gl.expand_dims(k + ks < PLAN.contracted, 0), x_ptrs)
        copy_rows(ring.a.index(stage), x_ptrs, mask=inside)
    elif PLAN.few_rows:
        inside, _ = gl.broadcast(gl.expand_dims(row_offsets >= 0, 1), x_ptrs)
        copy_rows(ring.a.index(stage), x_ptrs, mask=inside)
    else:
        copy_rows(ring.a.index(stage), x_ptrs)
    copy_rows_arrive(ring.ready.index(stage), increment_count=False)


@gluon.jit
def load_slots(slots_ptr, first, end, ROWS: gl.constexpr):
    """The slots of ROWS rows from ``first`` on; rows past the last one before ``end`` repeat it."""
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(gl.num_warps())))
    return gl.load(slots_ptr + gl.maximum(gl.minimum(rows, end - 1), 0))


@gluon.jit
def _starts_of_tile(slots, first, end, stride_x8, PLAN: gl.constexpr):
    """Where the token rows of a tile begin; with few rows a number below zero, of 16 bytes, for those that it lacks."""
    starts = row_starts(slots, stride_x8, PLAN)
    if PLAN.few_rows:
        rows = first + gl.arange(0, PLAN.tile.block_m, gl.SliceLayout(1, row_layout(gl.num_warps())))
        starts = gl.where(rows < end, starts, -8)
    return starts


@gluon.jit
def produce(ring, order, x_ptr, stride_x8, slots_ptr, weight_descs, low_rank, PLAN: gl.constexpr):
    """Fills the ring with weights and, one step ahead of them, gathered token rows, which take longer to arrive.

    The rows of the next tile are looked up a tile ahead. After the last tile comes a step of rows that nobody reads. Low-rank
    rows come by TMA, beside their factor: a step ahead of them, those who gather arrive with nothing.
    """
    block_k: gl.constexpr = PLAN.tile.block_k
    last_k: gl.constexpr = (PLAN.contracted - 1) // block_k * block_k
    gl.static_assert(ring.LEAD == 1)
    num_programs = gl.num_programs(0)
    step = 0
    expert, first, end, column_block = order.locate(gl.program_id(0))
    row = first
    row_offsets = _starts_of_tile(load_slots(slots_ptr, first, end, PLAN.tile.block_m), first, end, stride_x8, PLAN)
    next_expert, first, end, next_column_block = order.locate(gl.program_id(0) + num_programs)
    next_slots = load_slots(slots_ptr, first, end, PLAN.tile.block_m)
    _copy_step_rows(ring, 0, x_ptr, row_offsets, 0, PLAN)
    for index in range(gl.program_id(0), order.count(), num_programs):
        column = column_block * PLAN.part_n
        for k in range(0, last_k, block_k):
            ring.wait_empty(step + 1)
            _load_step_weights(ring, step, weight_descs, expert, k, column, PLAN)
            _copy_step_rows(ring, step + 1, x_ptr, row_offsets, k + block_k, PLAN)
            step += 1
        row_offsets = _starts_of_tile(next_slots, first, end, stride_x8, PLAN)
        if PLAN.low.rank > 0:
            low_k: gl.constexpr = PLAN.low.block_k
            last_r: gl.constexpr = (PLAN.low.steps - 1) * low_k
            ring.wait_empty(step + 1)
            _load_step_weights(ring, step, weight_descs, expert, last_k, column, PLAN)
            copy_rows_arrive(ring.ready.index((step + 1) % ring.STAGES), increment_count=False)
            step += 1
            for r in range(0, last_r, low_k):
                ring.wait_empty(step + 1)
                load_low_rank(ring, step, low_rank, expert, row, r, column, PLAN)
                copy_rows_arrive(ring.ready.index((step + 1) % ring.STAGES), increment_count=False)
                step += 1
            ring.wait_empty(step + 1)
            load_low_rank(ring, step, low_rank, expert, row, last_r, column, PLAN)
            row = first
        else:
            ring.wait_empty(step + 1)
            _load_step_weights(ring, step, weight_descs, expert, last_k, column, PLAN)
        _copy_step_rows(ring, step + 1, x_ptr, row_offsets, 0, PLAN)
        step += 1
        expert = next_expert
        column_block = next_column_block
        next_expert, first, end, next_column_block = order.locate(index + 2 * num_programs)
        next_slots = load_slots(slots_ptr, first, end, PLAN.tile.block_m)
    copy_rows_commit()
    copy_rows_wait(0)


@gluon.jit
def consume(HALF: gl.constexpr, ring, order, bias_ptrs, handoff, PLAN: gl.constexpr):
    """Multiplies one half of every tile and hands it over in the element type of the operands."""
    tile: gl.constexpr = PLAN.tile
    half_m: gl.constexpr = tile.half_m
    layout: gl.constexpr = accumulator_layout(PLAN)
    step = 0
    num_tiles = 0
    next_expert, next_first, next_end, next_column_block = order.locate(gl.program_id(0))
    for index in range(gl.program_id(0), order.count(), gl.num_programs(0)):
        multiplied = gl.where(next_first + HALF * half_m < next_end, PLAN.steps, 0)
        accumulator = bias_accumulator(bias_ptrs, next_expert, next_column_block * PLAN.part_n, half_m, layout, PLAN)
        next_expert, next_first, next_end, next_column_block = order.locate(index + gl.num_programs(0))
        accumulator, step = multiply(ring, step, multiplied, accumulator, HALF, PLAN)
        step = skip(ring, step, gl.where(multiplied > 0, 0, PLAN.steps + PLAN.low.steps))
        mbarrier.wait(handoff.empty.index(HALF), (num_tiles & 1) ^ 1)
        handoff.tiles.index(HALF).store(accumulator.to(handoff.tiles.dtype))
        fence_async_shared()
        mbarrier.arrive(handoff.full.index(HALF))
        num_tiles += 1
