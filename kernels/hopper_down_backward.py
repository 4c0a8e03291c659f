"""Gradient of the down projection with respect to its input, through the activation, one pass over ``h``.

For row r of expert e, with token t(r) and routing weight s(r):

    dA'[r] = dout[t(r)] @ W[e]^T      a[r] = act(h[r])       partials[c, r] = sum over column block c of dA'[r] a[r]
    dh[r]  = act'(h[r]) s(r) dA'[r]   wa[r] = s(r) a[r]

The consumers hand dA', rounded, to two epilogue warps, which work in strips of 8 rows. What a strip needs from
memory is asked for two strips ahead, across tiles: h by cp.async into shared memory (TMA would need a fence, which
waits for the stores too), the weights by way of the slots. The partial sums are stored for each column block, so no
two programs add to the same number.
"""

from torch import Tensor

from moeblaze_ops.kernels.activations import ACTIVATION_IDS
from moeblaze_ops.kernels.gluon_api import (
    aggregate,
    copy_rows,
    copy_rows_commit,
    copy_rows_wait,
    gl,
    gluon,
    mbarrier,
    shared_memory_descriptor,
)
from moeblaze_ops.kernels.hopper_activations import activate_backward
from moeblaze_ops.kernels.hopper_configs import STRIP_ROWS, GatherPlan, down_backward_tile
from moeblaze_ops.kernels.hopper_gather import CHUNK, allocate_handoff, consume, produce, row_layout
from moeblaze_ops.kernels.hopper_launch import describe_weight, launch_persistent, needs_wide_offsets
from moeblaze_ops.kernels.hopper_tiles import (
    allocate_matrices,
    allocate_ring,
    read_tile_order,
)

ROWS = gl.constexpr(STRIP_ROWS)


@aggregate
class HStrips:
    """Slots for the strips of h on their way from memory; the parts of a strip follow one another."""

    matrices: shared_memory_descriptor
    h_ptr: gl.tensor
    num_rows: gl.tensor
    SLOTS: gl.constexpr
    PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, matrices, h_ptr, num_rows, SLOTS, PARTS):
        self.matrices = matrices
        self.h_ptr = h_ptr
        self.num_rows = num_rows
        self.SLOTS = gl.constexpr(SLOTS)
        self.PARTS = gl.constexpr(PARTS)

    @gluon.jit
    def start(self, strip, row, column, WIDTH: gl.constexpr):
        """Starts the copy of the strip whose first row is ``row``, the ``strip``-th of this program."""
        block: gl.constexpr = self.matrices.shape[2]
        layout: gl.constexpr = row_layout(gl.num_warps())
        rows = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), self.num_rows - 1)
        columns = gl.arange(0, block, gl.SliceLayout(0, layout))
        row_offsets = gl.expand_dims(rows.to(gl.int64) * (self.PARTS * WIDTH), 1)
        for part in gl.static_range(self.PARTS):
            h_ptrs = gl.expand_dims(self.h_ptr + column + columns, 0) + row_offsets + part * WIDTH
            matrix = self.matrices.index((strip % self.SLOTS) * self.PARTS + part)
            if WIDTH % block == 0:
                copy_rows(matrix, h_ptrs)
            else:
                inside, _ = gl.broadcast(gl.expand_dims(column + columns < WIDTH, 0), h_ptrs)
                copy_rows(matrix, h_ptrs, mask=inside)
        copy_rows_commit()

    @gluon.jit
    def wait(self):
        """Waits for the oldest strip on its way."""
        copy_rows_wait(self.SLOTS - 1)

    @gluon.jit
    def load(self, strip, part: gl.constexpr, chunk: gl.constexpr, layout: gl.constexpr):
        matrix = self.matrices.index((strip % self.SLOTS) * self.PARTS + part)
        return matrix.slice(chunk * CHUNK, CHUNK, 1).load(layout)


@gluon.jit
def _finish_strip(handoff, strips, strip, half, half_row, rows, end, column, weights, outputs, PLAN: gl.constexpr):
    """Stores dh and wa of one strip of rows, and its share of the gradient of the routing weights."""
    dh_ptr, wa_ptr, partials_ptr = outputs
    dtype: gl.constexpr = dh_ptr.dtype.element_ty
    num_chunks: gl.constexpr = PLAN.part_n // CHUNK
    layout: gl.constexpr = row_layout(gl.num_warps())
    wa_rows = gl.expand_dims(rows.to(gl.int64) * PLAN.columns, 1)
    scale = gl.expand_dims(weights, 1)
    products = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    for chunk in gl.static_range(num_chunks):
        columns = gl.expand_dims(column + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)
        inside = gl.expand_dims(rows < end, 1)
        if PLAN.columns % PLAN.part_n != 0:
            inside = inside & (columns < PLAN.columns)
        da = handoff.load(half, half_row, chunk, ROWS, layout).to(gl.float32)
        gate = strips.load(strip, 0, chunk, layout).to(gl.float32)
        up = gate
        if PLAN.gated:
            up = strips.load(strip, 1, chunk, layout).to(gl.float32)
        a, dgate, dup = activate_backward(gate, up, da * scale, PLAN.activation, PLAN.gated)
        products += da * a
        dh_ptrs = dh_ptr + PLAN.h_parts * wa_rows + columns
        gl.store(wa_ptr + wa_rows + columns, (a * scale).to(dtype), mask=inside)
        gl.store(dh_ptrs, dgate.to(dtype), mask=inside)
        if PLAN.gated:
            gl.store(dh_ptrs + PLAN.columns, dup.to(dtype), mask=inside)
    gl.store(partials_ptr + rows, gl.sum(products, 1), mask=rows < end)


@gluon.jit
def _strip_start(strip, first, end, next_first, next_end, PLAN: gl.constexpr):
    """``(first row, end)`` of a strip of this tile or, counted on, of the next one."""
    num_strips: gl.constexpr = PLAN.tile.block_m // ROWS
    is_here = strip < num_strips
    row = gl.where(is_here, first + strip * ROWS, next_first + (strip - num_strips) * ROWS)
    return row, gl.where(is_here, end, next_end)


@gluon.jit
def _load_slots(slots_ptr, row, end):
    layout: gl.constexpr = gl.SliceLayout(1, row_layout(gl.num_warps()))
    return gl.load(slots_ptr + gl.maximum(gl.minimum(row + gl.arange(0, ROWS, layout), end - 1), 0))


@gluon.jit
def _load_weights(weights_ptr, slots, PLAN: gl.constexpr):
    if PLAN.has_weights:
        return gl.load(weights_ptr + gl.maximum(slots, 0)).to(gl.float32)
    else:
        return gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, row_layout(gl.num_warps())))


@gluon.jit
def _finish(handoff, strips, order, slots_ptr, weights_ptr, outputs, PLAN: gl.constexpr):
    num_strips: gl.constexpr = PLAN.tile.block_m // ROWS
    half_strips: gl.constexpr = num_strips // 2
    dh_ptr, wa_ptr, partials_ptr = outputs
    rows_of_strip = gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(gl.num_warps())))
    num_programs = gl.num_programs(0)
    _, next_first, next_end, next_column_block = order.locate(gl.program_id(0))
    for slot in gl.static_range(strips.SLOTS):
        strips.start(slot, next_first + slot * ROWS, next_column_block * PLAN.part_n, PLAN.columns)
    slots = _load_slots(slots_ptr, next_first, next_end)
    next_weights = _load_weights(weights_ptr, slots, PLAN)
    slots = _load_slots(slots_ptr, next_first + ROWS, next_end)
    num_tiles = 0
    for index in range(gl.program_id(0), order.count(), num_programs):
        first = next_first
        end = next_end
        column_block = next_column_block
        _, next_first, next_end, next_column_block = order.locate(index + num_programs)
        for strip in range(num_strips):
            weights = next_weights
            next_weights = _load_weights(weights_ptr, slots, PLAN)
            ahead_row, ahead_end = _strip_start(strip + 2, first, end, next_first, next_end, PLAN)
            slots = _load_slots(slots_ptr, ahead_row, ahead_end)
            count = num_tiles * num_strips + strip
            half = strip // half_strips
            strips.wait()
            mbarrier.wait(handoff.full.index(half), num_tiles & 1)
            half_row = (strip % half_strips) * ROWS
            rows = first + strip * ROWS + rows_of_strip
            column = column_block * PLAN.part_n
            stored = (dh_ptr, wa_ptr, partials_ptr + column_block.to(gl.int64) * strips.num_rows)
            _finish_strip(handoff, strips, count, half, half_row, rows, end, column, weights, stored, PLAN)
            mbarrier.arrive(handoff.empty.index(half), pred=strip % half_strips == half_strips - 1)
            ahead = strip + strips.SLOTS
            ahead_row, _ = _strip_start(ahead, first, end, next_first, next_end, PLAN)
            ahead_column = gl.where(ahead < num_strips, column_block, next_column_block) * PLAN.part_n
            strips.start(count + strips.SLOTS, ahead_row, ahead_column, PLAN.columns)
        num_tiles += 1
    copy_rows_wait(0)


@gluon.jit
def _down_backward_kernel(
    dout_ptr,
    stride_dout8,
    weight_desc,
    h_ptr,
    weights_ptr,
    outputs,
    slots_ptr,
    num_rows,
    offsets_ptr,
    blocks_ptr,
    PLAN: gl.constexpr,
):
    copy_threads: gl.constexpr = 32 * PLAN.gather_warps
    ring = allocate_ring(h_ptr.dtype.element_ty, 1 + copy_threads, PLAN)
    handoff = allocate_handoff(h_ptr.dtype.element_ty, PLAN)
    h_matrices = allocate_matrices(h_ptr.dtype.element_ty, PLAN.strip_slots * PLAN.h_parts, ROWS, PLAN.tile.block_n)
    strips = HStrips(h_matrices, h_ptr, gl.to_tensor(num_rows), PLAN.strip_slots, PLAN.h_parts)
    order = read_tile_order(blocks_ptr, offsets_ptr, PLAN.column_blocks, PLAN.tile.group)
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), ring, order, (), handoff, PLAN)),
            (consume, (gl.constexpr(1), ring, order, (), handoff, PLAN)),
            (produce, (ring, order, dout_ptr, stride_dout8, slots_ptr, (weight_desc,), PLAN)),
            (_finish, (handoff, strips, order, slots_ptr, weights_ptr, outputs, PLAN)),
        ],
        [4, PLAN.gather_warps, PLAN.epilogue_warps],
        [PLAN.registers, PLAN.registers, PLAN.registers],
    )


def hopper_down_backward(
    dout_TD: Tensor,
    h_NGF: Tensor,
    w_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    blocks_B2: Tensor,
    top_k: int,
    activation: str,
    dh_NGF: Tensor,
    partials_CN: Tensor,
    wa_NF: Tensor,
) -> None:
    """Writes dh, wa and the partial sums of ``<dA', a>`` for every row of every expert.

    Args:
        dout_TD: gradient of the layer's output. Shape [T, D], bf16 or fp16, stride 1 in D.
        h_NGF: saved pre-activations, contiguous.
        w_down: one tensor [E, F, D], stride 1 in F or D, other strides multiples of 8.
        weights_TK: contiguous routing weights, or None for 1.
        slots_N, offsets_E1, blocks_B2: as ``dispatch`` gives them.
        dh_NGF, wa_NF: outputs, contiguous, dtype of h.
        partials_CN: output, fp32, contiguous, ``num_partials(F)`` rows; dweights of a slot is the sum of its
            row's column, plus ``<dout, b>`` where the projection has a bias.

    ``dA'`` is accumulated in fp32 and rounded to the dtype of h; two runs agree bit for bit.
    """
    if h_NGF.shape[0] == 0:
        return
    num_columns = h_NGF.shape[2]
    tile = down_backward_tile(num_columns)
    weight_desc, b_k_inner = describe_weight(w_down[0], True, tile.block_n, tile.block_k)
    plan = GatherPlan(
        tile=tile,
        contracted=dout_TD.shape[1],
        columns=num_columns,
        parts=1,
        b_k_inner=b_k_inner,
        top_k=top_k,
        wide_offsets=needs_wide_offsets(dout_TD),
        activation=ACTIVATION_IDS[activation],
        gated=h_NGF.shape[1] == 2,
        has_weights=weights_TK is not None,
    )
    launch_persistent(
        _down_backward_kernel,
        dout_TD.device,
        dout_TD,
        dout_TD.stride(0) // 8,
        weight_desc,
        h_NGF,
        partials_CN if weights_TK is None else weights_TK,
        (dh_NGF, wa_NF, partials_CN),
        slots_N,
        h_NGF.shape[0],
        offsets_E1,
        blocks_B2,
        plan,
    )
