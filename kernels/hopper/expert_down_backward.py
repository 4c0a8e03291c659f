"""Gradient of the down projection with respect to its input, through the activation, one pass over ``h``.

For row r of expert e, with token t(r) and routing weight s(r):

    dA'[r] = dout[t(r)] @ W[e]^T      a[r] = act(h[r])       partials[c, r] = sum over column block c of dA'[r] a[r]
    dh[r]  = act'(h[r]) s(r) dA'[r]   wa[r] = s(r) a[r]

The consumers hand dA', rounded, to two, four or eight epilogue warps, which work in strips of 4 rows a warp. What a strip
needs from memory is asked for ahead of it, across tiles: h a strip ahead, into registers (shared memory is the ring's), the
weights two, by way of the slots. The partial sums are stored for each column block, so no two programs add to the
same number; and so are, for each parameter of the activation, the sums of what it gets from a row.
"""

from functools import cache

from torch import Tensor

from moeblaze_ops.kernels.formulas.named import num_parameters
from moeblaze_ops.kernels.formulas.program import gradient_program
from moeblaze_ops.kernels.hopper.activations import activate_backward, load_parameters
from moeblaze_ops.kernels.hopper.configs import GatherPlan, down_backward_tile, down_backward_warps
from moeblaze_ops.kernels.hopper.gather import CHUNK, allocate_handoff, consume, load_slots, produce, row_layout
from moeblaze_ops.kernels.hopper.gluon_api import aggregate, gdc_wait, gl, gluon, mbarrier
from moeblaze_ops.kernels.hopper.kept_h import load_h, pair_layout, strip_rows, unpack, values_of
from moeblaze_ops.kernels.hopper.launch import (
    describe_low_rank,
    describe_weight,
    launch_persistent,
    needs_wide_offsets,
)
from moeblaze_ops.kernels.hopper.tiles import allocate_ring, begin, read_tile_order


@gluon.jit
def _added(sums, terms):
    """Sums over what a thread has of a row, a register each, with a chunk's terms added. Shape [rows, 8], or no sums yet."""
    added = ()
    for i in gl.static_range(len(terms)):
        own = gl.sum(terms[i].reshape([terms[i].shape[0], terms[i].shape[1] // 8, 8]), 2)
        if len(sums) > 0:
            own = sums[i] + own
        added = added + (own,)
    return added


@gluon.jit
def _sum_of_row(sums, layout: gl.constexpr):
    return gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _finish_strip(handoff, h, half, half_row, rows, end, column, weights, parameters, outputs, PLAN: gl.constexpr):
    """Stores dh and wa of one strip of rows, and its share of the gradients of the routing weights and of parameters."""
    dh_ptr, wa_ptr, partials_ptr, shares_ptrs = outputs
    dtype: gl.constexpr = dh_ptr.dtype.element_ty
    ROWS: gl.constexpr = strip_rows(gl.num_warps())
    num_chunks: gl.constexpr = PLAN.part_n // CHUNK
    program: gl.constexpr = PLAN.activation
    num_parameters: gl.constexpr = PLAN.num_parameters
    layout: gl.constexpr = row_layout(gl.num_warps())
    wa_rows = gl.expand_dims(rows.to(gl.int64) * PLAN.columns, 1)
    scale = gl.expand_dims(weights, 1)
    sums = ()
    for chunk in gl.static_range(num_chunks):
        columns = gl.expand_dims(column + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)
        mask = gl.expand_dims(rows < end, 1)
        if PLAN.columns % PLAN.part_n != 0:
            mask = mask & (columns < PLAN.columns)
        da = unpack(handoff.load_pairs(half, half_row, chunk, ROWS, pair_layout(gl.num_warps())), dtype)
        gate, up = values_of(h[chunk][0], dtype), values_of(h[chunk][1], dtype)
        place = (gl.expand_dims(rows, 1), columns)
        a, dgate, dup, dparameters = activate_backward(gate, up, da * scale, parameters, place, program)
        sums = _added(sums, (da * a,) + dparameters)
        dh_ptrs = dh_ptr + PLAN.h_parts * wa_rows + columns
        gl.store(wa_ptr + wa_rows + columns, (a * scale).to(dtype), mask=mask)
        gl.store(dh_ptrs, dgate.to(dtype), mask=mask)
        if PLAN.gated:
            gl.store(dh_ptrs + PLAN.columns, dup.to(dtype), mask=mask)
    gl.store(partials_ptr + rows, _sum_of_row(sums[0], layout), mask=rows < end)
    for i in gl.static_range(num_parameters):
        gl.store(shares_ptrs[i] + rows, _sum_of_row(sums[1 + i], layout), mask=rows < end)


@aggregate
class Tile:
    """Rows ``first`` to ``end`` of an expert, at most block_m of them, and a block of columns."""

    expert: gl.tensor
    first: gl.tensor
    end: gl.tensor
    column_block: gl.tensor

    @gluon.constexpr_function
    def __init__(self, expert, first, end, column_block):
        self.expert = expert
        self.first = first
        self.end = end
        self.column_block = column_block


@gluon.jit
def _locate(order, index):
    expert, first, end, column_block = order.locate(index)
    return Tile(expert, first, end, column_block)


@gluon.jit
def _strip(strip, tile, next_tile, PLAN: gl.constexpr):
    """``(first row, end, first column)`` of a strip of this tile or, counted on, of the next one."""
    ROWS: gl.constexpr = strip_rows(gl.num_warps())
    num_strips: gl.constexpr = PLAN.tile.block_m // ROWS
    is_here = strip < num_strips
    row = gl.where(is_here, tile.first + strip * ROWS, next_tile.first + (strip - num_strips) * ROWS)
    column_block = gl.where(is_here, tile.column_block, next_tile.column_block)
    return row, gl.where(is_here, tile.end, next_tile.end), column_block * PLAN.part_n


@gluon.jit
def _load_weights(weights_ptr, slots, PLAN: gl.constexpr):
    if PLAN.has_weights:
        return gl.load(weights_ptr + gl.maximum(slots, 0)).to(gl.float32)
    else:
        return gl.full([strip_rows(gl.num_warps())], 1.0, gl.float32, gl.SliceLayout(1, row_layout(gl.num_warps())))


@gluon.jit
def _finish(handoff, order, h_ptr, slots_ptr, num_rows, weights_ptr, learned, outputs, PLAN: gl.constexpr):
    """Two strips a step, so that what is loaded for either stays in its registers."""
    if PLAN.early:
        gdc_wait()
    ROWS: gl.constexpr = strip_rows(gl.num_warps())
    half_strips: gl.constexpr = PLAN.tile.half_m // ROWS
    num_parameters: gl.constexpr = PLAN.num_parameters
    dh_ptr, wa_ptr, partials_ptr = outputs
    rows_of_strip = gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(gl.num_warps())))
    num_programs = gl.num_programs(0)
    next_tile = _locate(order, gl.program_id(0))
    even_h = load_h(h_ptr, next_tile.first, next_tile.end, next_tile.column_block * PLAN.part_n, PLAN)
    even_weights = _load_weights(weights_ptr, load_slots(slots_ptr, next_tile.first, next_tile.end, ROWS), PLAN)
    odd_slots = load_slots(slots_ptr, next_tile.first + ROWS, next_tile.end, ROWS)
    num_tiles = 0
    for index in range(gl.program_id(0), order.count(), num_programs):
        tile = next_tile
        next_tile = _locate(order, index + num_programs)
        column = tile.column_block * PLAN.part_n
        parameters = ()
        shares_ptrs = ()
        if num_parameters > 0:
            parameters = load_parameters(learned[0], tile.expert, num_parameters)
            for i in gl.static_range(num_parameters):
                place = (i * PLAN.column_blocks + tile.column_block).to(gl.int64) * num_rows
                shares_ptrs = shares_ptrs + (learned[1] + place,)
        stored = (dh_ptr, wa_ptr, partials_ptr + tile.column_block.to(gl.int64) * num_rows, shares_ptrs)
        for pair in range(half_strips):
            strip = 2 * pair
            half = strip // half_strips
            half_row = (strip % half_strips) * ROWS
            rows = tile.first + strip * ROWS + rows_of_strip

            row, end, ahead_column = _strip(strip + 1, tile, next_tile, PLAN)
            odd_h = load_h(h_ptr, row, end, ahead_column, PLAN)
            odd_weights = _load_weights(weights_ptr, odd_slots, PLAN)
            row, end, ahead_column = _strip(strip + 2, tile, next_tile, PLAN)
            even_slots = load_slots(slots_ptr, row, end, ROWS)
            mbarrier.wait(handoff.full.index(half), num_tiles & 1)
            _finish_strip(handoff, even_h, half, half_row, rows, tile.end, column, even_weights, parameters, stored, PLAN)

            even_h = load_h(h_ptr, row, end, ahead_column, PLAN)
            even_weights = _load_weights(weights_ptr, even_slots, PLAN)
            row, end, _ = _strip(strip + 3, tile, next_tile, PLAN)
            odd_slots = load_slots(slots_ptr, row, end, ROWS)
            if PLAN.warps.finish < 8:
                # It has been waited for; the loads above stay above, which pays where few warps hide their latency.
                mbarrier.wait(handoff.full.index(half), num_tiles & 1)
            odd_rows = rows + ROWS
            odd = (handoff, odd_h, half, half_row + ROWS, odd_rows, tile.end, column, odd_weights)
            _finish_strip(*odd, parameters, stored, PLAN)
            mbarrier.arrive(handoff.empty.index(half), pred=strip % half_strips == half_strips - 2)
        num_tiles += 1


@gluon.jit
def _down_backward_kernel(
    dout_ptr, stride_dout8,
    weight_desc, low_rows_desc, low_weight_desc,
    h_ptr, weights_ptr, params_ptr, shares_ptr, outputs,
    slots_ptr, num_rows, offsets_ptr, blocks_ptr,
    PLAN: gl.constexpr,
):  # fmt: skip
    copy_threads: gl.constexpr = 32 * PLAN.warps.gather
    dtype: gl.constexpr = outputs[0].dtype.element_ty
    ring = allocate_ring(dtype, 1 + copy_threads, PLAN)
    handoff = allocate_handoff(dtype, PLAN)
    begin(PLAN.early)
    order = read_tile_order(blocks_ptr, offsets_ptr, PLAN.column_blocks, PLAN.tile.group)
    if PLAN.low.rank > 0:
        low_rank = (low_rows_desc, low_weight_desc)
    else:
        low_rank = ()
    if PLAN.num_parameters > 0:
        learned = (params_ptr, shares_ptr)
    else:
        learned = ()
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), ring, order, (), handoff, PLAN)),
            (consume, (gl.constexpr(1), ring, order, (), handoff, PLAN)),
            (produce, (ring, order, dout_ptr, stride_dout8, slots_ptr, (weight_desc,), low_rank, PLAN)),
            (_finish, (handoff, order, h_ptr, slots_ptr, gl.to_tensor(num_rows), weights_ptr, learned, outputs, PLAN)),
        ],
        [4, PLAN.warps.gather, PLAN.warps.finish],
        PLAN.warps.registers,
    )
    if PLAN.early:
        gdc_wait()


_plan = cache(GatherPlan)


def hopper_down_backward(
    dout_TD: Tensor, h_NGF: Tensor, w_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, blocks_B2: Tensor, top_k: int,
    activation: str, dh_NGF: Tensor, partials_CN: Tensor, wa_NF: Tensor, early: bool = False,
    q_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None,
    params_EP: Tensor | None = None, shares_PCN: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes dh, wa and the partial sums of ``<dA', a>`` for every row of every expert.

    Args:
        dh_NGF, wa_NF: outputs, contiguous, dtype of dout.
        partials_CN: output, fp32, contiguous, ``num_partials(F, D)`` rows; dweights of a slot is the sum of its
            row's column, plus ``<dout, b>`` where the projection has a bias.
        early: begin before the kernel launched last has ended, if that writes nothing that is read here but h.
        shares_PCN: output, fp32, contiguous, beside params: what each row's features in a column block add to the gradient of
            each parameter.
        Others: those of ``launch_expert_down_backward``, such as ``select`` lets through.

    ``dA'`` is accumulated in fp32 and rounded to the dtype of dout; two runs agree bit for bit.
    """
    if h_NGF.shape[0] == 0:
        return
    num_columns = wa_NF.shape[1]
    tile = down_backward_tile(num_columns, dout_TD.shape[1])
    weight_desc, b_k_inner = describe_weight(w_down[0], True, tile.block_n, tile.block_k)
    factor = None if lora_a_ERF is None else lora_a_ERF.unsqueeze(1)
    low, (low_rows, low_weight, _) = describe_low_rank(q_NR, factor, tile.block_m, tile.block_n)
    plan = _plan(
        tile=tile,
        contracted=dout_TD.shape[1],
        columns=num_columns,
        parts=1,
        b_k_inner=b_k_inner,
        top_k=top_k,
        wide_offsets=needs_wide_offsets(dout_TD),
        activation=gradient_program(activation, is_short=True),
        gated=h_NGF.shape[1] == 2,
        num_parameters=num_parameters(activation),
        has_weights=weights_TK is not None,
        warps=down_backward_warps(dout_TD.shape[1], activation),
        early=early,
        low=low,
    )
    launch_persistent(
        _down_backward_kernel,
        dout_TD.device,
        dout_TD, dout_TD.stride(0) // 8,
        weight_desc, low_rows, low_weight,
        h_NGF, partials_CN if weights_TK is None else weights_TK, params_EP, shares_PCN, (dh_NGF, wa_NF, partials_CN),
        slots_N, h_NGF.shape[0], offsets_E1, blocks_B2,
        plan,
        registers=plan.warps.at_launch,
    )  # fmt: skip
