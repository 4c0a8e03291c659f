"""What the Hopper kernels share: the order of tiles, the ring of operand tiles, the inner loop of a consumer.

Every kernel is persistent (one program a multiprocessor) and specialised by warps: producers fill a ring of
shared-memory stages, two consumers of four warps multiply them into a 64-row half of the output tile each, and
epilogue warps, where a kernel has them, finish a tile while the next one is multiplied.
"""

import math

from moeblaze_ops.kernels.hopper.gluon_api import (
    aggregate,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    shared_memory_descriptor,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CHUNK = gl.constexpr(64)
"""Columns that an epilogue reads at a time: the width of a swizzled block of shared memory."""


@gluon.jit
def begin(EARLY: gl.constexpr):
    """Waits for the kernel launched before this one, then lets programs of the next one take idle multiprocessors.

    An EARLY kernel waits later: before it first touches what the other one touches, and at its own end, since what comes next
    takes both as ended. When it begins, all that came before the other one has ended.
    """
    if not EARLY:
        gdc_wait()
    gdc_launch_dependents()


@aggregate
class TileOrder:
    """Output tiles in the order of the block schedule, groups of GROUP row blocks sharing each column block."""

    blocks_ptr: gl.tensor
    offsets_ptr: gl.tensor
    num_blocks: gl.tensor
    COLUMN_BLOCKS: gl.constexpr
    GROUP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, blocks_ptr, offsets_ptr, num_blocks, COLUMN_BLOCKS, GROUP):
        self.blocks_ptr = blocks_ptr
        self.offsets_ptr = offsets_ptr
        self.num_blocks = num_blocks
        self.COLUMN_BLOCKS = gl.constexpr(COLUMN_BLOCKS)
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def count(self):
        return self.num_blocks * self.COLUMN_BLOCKS

    @gluon.jit
    def locate(self, index):
        """``(expert, first row, end of the expert's rows, column block)`` of a tile.

        An index past the last tile gives the last one, so that a tile can be looked up ahead of time.
        """
        index = gl.maximum(gl.minimum(index, self.count() - 1), 0)
        first_block = index // (self.GROUP * self.COLUMN_BLOCKS) * self.GROUP
        within = index % (self.GROUP * self.COLUMN_BLOCKS)
        size = gl.maximum(gl.minimum(self.num_blocks - first_block, self.GROUP), 1)
        entry_ptr = self.blocks_ptr + 2 * (1 + first_block + within % size)
        expert = gl.load(entry_ptr)
        return expert, gl.load(entry_ptr + 1), gl.load(self.offsets_ptr + expert + 1), within // size


@gluon.jit
def read_tile_order(blocks_ptr, offsets_ptr, COLUMN_BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    return TileOrder(blocks_ptr, offsets_ptr, gl.load(blocks_ptr), COLUMN_BLOCKS, GROUP)


@aggregate
class Ring:
    """Operand tiles in flight: STAGES of a, LEAD fewer of b. ``ready``: filled; ``empty``: read by both consumers.

    A producer with a LEAD starts the a tile of step ``s + LEAD`` beside the b tile of step ``s``: both take the place of
    tiles whose step was given back ``STAGES - LEAD`` steps ago.
    """

    a: shared_memory_descriptor
    b: shared_memory_descriptor
    ready: shared_memory_descriptor
    empty: shared_memory_descriptor
    STAGES: gl.constexpr
    LEAD: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, ready, empty, STAGES, LEAD):
        self.a = a
        self.b = b
        self.ready = ready
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)
        self.LEAD = gl.constexpr(LEAD)

    @gluon.jit
    def b_stage(self, step):
        return step % (self.STAGES - self.LEAD)

    @gluon.jit
    def b_tile(self, step):
        return self.b.index(self.b_stage(step))

    @gluon.jit
    def wait_empty(self, step):
        mbarrier.wait(self.empty.index(step % self.STAGES), ((step // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def wait_ready(self, step):
        mbarrier.wait(self.ready.index(step % self.STAGES), (step // self.STAGES) & 1)

    @gluon.jit
    def release(self, step):
        mbarrier.arrive(self.empty.index(step % self.STAGES))


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUM mbarriers that complete a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def allocate_matrices(dtype: gl.constexpr, NUM: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """NUM swizzled matrices in shared memory, as TMA writes and wgmma reads them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [NUM, ROWS, COLUMNS], layout)


@gluon.constexpr_function
def _num_pieces(buffer, size, dtype):
    """How many pieces of ``size`` elements of a type a buffer is."""
    num_bits = math.prod(buffer.shape) * buffer.dtype.primitive_bitwidth
    return num_bits // (size * dtype.primitive_bitwidth)


@gluon.jit
def matrix_of(buffer, index, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """One of the matrices of that shape and type that a buffer is, one behind the other, as TMA writes and wgmma reads it.

    The buffer is a whole allocation: Triton 3.8 sees no part of one in another shape.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    num: gl.constexpr = _num_pieces(buffer, ROWS * COLUMNS, DTYPE)
    return reinterpret(buffer, DTYPE, [num, ROWS, COLUMNS], layout).index(index)


@gluon.jit
def box_of(buffer, index, descriptor):
    """One of the boxes ``[1, rows, columns]`` that a buffer, a whole allocation, is to the descriptor that moves them."""
    rows: gl.constexpr = descriptor.block_type.shape[1]
    columns: gl.constexpr = descriptor.block_type.shape[2]
    num: gl.constexpr = _num_pieces(buffer, rows * columns, descriptor.dtype)
    return reinterpret(buffer, descriptor.dtype, [num, 1, rows, columns], descriptor.layout).index(index)


@gluon.jit
def strip_of(tiles, half, row, chunk: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """ROWS rows, from ``row`` on, of a block of CHUNK columns of one of two half tiles, seen as COLUMNS of another type.

    A half tile is a row of blocks of CHUNK columns, so any whole number of 8 rows of a block can be viewed alone.
    """
    half_m: gl.constexpr = tiles.shape[1]
    num_chunks: gl.constexpr = tiles.shape[2] // CHUNK
    return matrix_of(tiles, ((half * num_chunks + chunk) * half_m + row) // ROWS, ROWS, COLUMNS, DTYPE)


@gluon.constexpr_function
def row_layout(num_warps):
    """Each group of 8 lanes holds 64 columns of a row, 16 bytes a lane; further columns repeat over registers.

    Loads and copies touch whole lines of 128 bytes, and a thread meets few rows, so few row offsets.
    """
    return gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])


@gluon.jit
def allocate_ring(dtype: gl.constexpr, READY_ARRIVALS: gl.constexpr, PLAN: gl.constexpr):
    tile: gl.constexpr = PLAN.tile
    b_stages: gl.constexpr = tile.stages - tile.lead
    if PLAN.a_k_inner:
        a = allocate_matrices(dtype, tile.stages, tile.block_m, tile.block_k)
    else:
        a = allocate_matrices(dtype, tile.stages, tile.block_k, tile.block_m)
    if PLAN.b_k_inner:
        b = allocate_matrices(dtype, b_stages, tile.block_n, tile.block_k)
    else:
        b = allocate_matrices(dtype, b_stages, tile.block_k, tile.block_n)
    ready = allocate_barriers(tile.stages, READY_ARRIVALS)
    return Ring(a, b, ready, allocate_barriers(tile.stages, 2), tile.stages, tile.lead)


@gluon.jit
def load_matrix(descriptor, plane, row, column, barrier, buffer, index):
    """Starts the TMA load of a matrix of a 3-d tensor; what lies outside the tensor arrives as zeros."""
    tma_load(descriptor, [plane, row, column], barrier, box_of(buffer, index, descriptor))


@gluon.jit
def load_weight(ring, step, box, descriptor, expert, k, column, PLAN: gl.constexpr):
    """Starts the load of one part's block of columns into its place in the b tile, a ``box`` of all stages of b."""
    ready = ring.ready.index(step % ring.STAGES)
    if PLAN.b_k_inner:
        load_matrix(descriptor, expert, column, k, ready, ring.b, box)
    else:
        load_matrix(descriptor, expert, k, column, ready, ring.b, box)


@gluon.jit
def low_rank_views(ring, step, PLAN: gl.constexpr):
    """The beginning of a stage as low-rank rows ``[block_m, ranks]`` and as a block of their factor, ``[ranks, block_n]``."""
    tile: gl.constexpr = PLAN.tile
    low_k: gl.constexpr = PLAN.low.block_k
    shorter: gl.constexpr = tile.block_k // low_k
    rows = matrix_of(ring.a, step % ring.STAGES * shorter, tile.block_m, low_k, ring.a.dtype)
    return rows, matrix_of(ring.b, ring.b_stage(step) * shorter, low_k, tile.block_n, ring.b.dtype)


@gluon.jit
def load_low_rank(ring, step, low_rank, expert, row, k, column, PLAN: gl.constexpr):
    """Starts the loads of a stage of low-rank columns: rows in expert order, and each part's block of columns of the factor.

    Rows past the expert's are those of other experts: what comes of them is not stored.
    """
    tile: gl.constexpr = PLAN.tile
    parts: gl.constexpr = len(low_rank) - 1
    shorter: gl.constexpr = tile.block_k // PLAN.low.block_k
    stage = step % ring.STAGES
    ready = ring.ready.index(stage)
    mbarrier.expect(ready, (tile.a_bytes + tile.b_bytes) // shorter)
    load_matrix(low_rank[0], 0, row, k, ready, ring.a, stage * shorter)
    for part in gl.static_range(parts):
        load_matrix(low_rank[1 + part], expert, k, column, ready, ring.b, ring.b_stage(step) * shorter * parts + part)


@gluon.constexpr_function
def accumulator_layout(plan):
    """wgmma's layout of a half tile over the four warps of a consumer."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(plan.tile.block_n, plan.instruction_n), 16])


@gluon.jit
def multiply(ring, step, num_steps, accumulator, HALF: gl.constexpr, PLAN: gl.constexpr):
    """``accumulator`` plus the product of the next ``num_steps`` stages, with the low-rank ones behind them, and the step after.

    One product is always in flight: a stage is given back when the product after it has been issued. Without any step there are
    no low-rank stages either.
    """
    half_m: gl.constexpr = PLAN.tile.half_m
    for k in range(num_steps):
        ring.wait_ready(step)
        if PLAN.gathered:
            # cp.async writes through the generic proxy, wgmma reads through the async one.
            fence_async_shared()
        stage = step % ring.STAGES
        if PLAN.a_k_inner:
            a = ring.a.index(stage).slice(HALF * half_m, half_m, 0)
        else:
            a = ring.a.index(stage).slice(HALF * half_m, half_m, 1).permute((1, 0))
        if PLAN.b_k_inner:
            b = ring.b_tile(step).permute((1, 0))
        else:
            b = ring.b_tile(step)
        accumulator = warpgroup_mma(a, b, accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(1, deps=[accumulator])
        if k > 0:
            ring.release(step + ring.STAGES - 1)
        step += 1
    if PLAN.low.rank > 0:
        for _ in range(gl.where(num_steps > 0, PLAN.low.steps, 0)):
            ring.wait_ready(step)
            rows, factor = low_rank_views(ring, step, PLAN)
            accumulator = warpgroup_mma(rows.slice(HALF * half_m, half_m, 0), factor, accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(1, deps=[accumulator])
            ring.release(step + ring.STAGES - 1)
            step += 1
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    if num_steps > 0:
        ring.release(step + ring.STAGES - 1)
    return accumulator, step


@gluon.jit
def skip(ring, step, num_steps):
    """Gives back the next ``num_steps`` stages unread, for a half tile without rows; the step after them."""
    for _ in range(num_steps):
        ring.wait_ready(step)
        ring.release(step)
        step += 1
    return step


@gluon.jit
def bias_accumulator(bias_ptrs, expert, column, HALF_M: gl.constexpr, layout: gl.constexpr, PLAN: gl.constexpr):
    """An accumulator that starts from the bias of its columns, or from zero."""
    block_n: gl.constexpr = PLAN.tile.block_n
    if PLAN.bias_stride is not None:
        part_n: gl.constexpr = block_n // len(bias_ptrs)
        n = gl.arange(0, block_n, gl.SliceLayout(0, layout))
        columns = column + n % part_n
        offsets = expert.to(gl.int64) * PLAN.bias_stride + columns
        bias = gl.load(bias_ptrs[0] + offsets, mask=(n < part_n) & (columns < PLAN.columns), other=0.0).to(gl.float32)
        if len(bias_ptrs) == 2:
            inside = (n >= part_n) & (columns < PLAN.columns)
            bias += gl.load(bias_ptrs[1] + offsets, mask=inside, other=0.0).to(gl.float32)
        zeros = gl.zeros([HALF_M, block_n], gl.float32, layout)
        return zeros + gl.expand_dims(bias, 0)
    else:
        return gl.zeros([HALF_M, block_n], gl.float32, layout)
