"""How a half tile of a weight gradient is written, and added to.

Written by TMA through shared memory. To accumulate, the sums start from what dW holds, but for experts that are marked as
fresh. A dW of fp32 is added to behind the last step instead, rounding once: a consumer reads, adds and writes its half tile
straight from the layout of its accumulator, eight bytes a thread and row, a whole sector for four threads.
"""

from moeblaze_ops.kernels.gluon_api import fence_async_shared, gl, gluon, reinterpret, tma_store, tma_store_wait
from moeblaze_ops.kernels.hopper_tiles import accumulator_layout

ADD_COLUMNS = gl.constexpr(32)
"""Columns of dW that a consumer reads at a time when it adds to them: 16 numbers a thread."""


@gluon.jit
def _store(staged, values, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Hands a matrix to TMA once the buffer's last one has been read; what lies outside dW is not written."""
    desc = dw_descs[0]
    tma_store_wait(0)
    staged.store(values.to(desc.dtype))
    fence_async_shared()
    source = reinterpret(staged, desc.dtype, desc.block_type.shape, desc.layout)
    if PLAN.parts == 2:
        if part == 0:
            tma_store(desc, [expert, row, column], source)
        else:
            tma_store(dw_descs[1], [expert, row, column], source)
    else:
        tma_store(desc, [expert, row, column], source)


@gluon.jit
def write_tile(staged, sums, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Hands a half tile to TMA, in one piece or two."""
    half_m: gl.constexpr = PLAN.tile.half_m
    store_n: gl.constexpr = PLAN.store_n
    if store_n == PLAN.tile.block_n:
        _store(staged, sums, dw_descs, part, expert, row, column, PLAN)
    else:
        pairs = gl.permute(gl.reshape(sums, [half_m, 2, store_n]), (0, 2, 1))
        left, right = gl.split(pairs)
        _store(staged, left, dw_descs, part, expert, row, column, PLAN)
        _store(staged, right, dw_descs, part, expert, row, column + store_n, PLAN)


@gluon.jit
def _rows_of_tile(dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, PLAN: gl.constexpr):
    """``(dw_ptr, row offsets, whether a row is inside)`` of a half tile, a row of the accumulator's layout each."""
    rows = row + gl.arange(0, PLAN.tile.half_m, gl.SliceLayout(1, accumulator_layout(PLAN)))
    dw_ptr = dw_ptrs[0]
    if PLAN.parts == 2:
        dw_ptr = gl.where(part == 0, dw_ptrs[0], dw_ptrs[1])
    return dw_ptr, expert.to(gl.int64) * stride_dw_e8 * 8 + rows.to(gl.int64) * stride_dw_m8 * 8, rows < PLAN.m


@gluon.jit
def _pointers(dw_ptr, row_offsets, rows_inside, column, WIDTH: gl.constexpr, layout: gl.constexpr, PLAN: gl.constexpr):
    """Where WIDTH columns of some rows are in dW, and whether they are inside of it."""
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    offsets = gl.convert_layout(row_offsets, gl.SliceLayout(1, layout), assert_trivial=True)
    inside = gl.convert_layout(rows_inside, gl.SliceLayout(1, layout), assert_trivial=True)
    ptrs = gl.expand_dims(dw_ptr + columns, 0) + gl.expand_dims(offsets, 1)
    return ptrs, gl.expand_dims(inside, 1) & gl.expand_dims(columns < PLAN.n, 0)


@gluon.jit
def first_sums(is_added, dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, column, PLAN: gl.constexpr):
    """An accumulator that starts from what dW holds, or from zero."""
    layout: gl.constexpr = accumulator_layout(PLAN)
    half_m: gl.constexpr = PLAN.tile.half_m
    block_n: gl.constexpr = PLAN.tile.block_n
    sums = gl.zeros([half_m, block_n], gl.float32, layout)
    if PLAN.adds_first:
        if is_added:
            dw_ptr, offsets, inside = _rows_of_tile(dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, PLAN)
            ptrs, inside = _pointers(dw_ptr, offsets, inside, column, block_n, layout, PLAN)
            sums = gl.load(ptrs, mask=inside, other=0.0).to(gl.float32)
    return sums


@gluon.jit
def _add(values, dw_ptr, row_offsets, rows_inside, column, PLAN: gl.constexpr):
    """Adds a matrix to dW, ADD_COLUMNS at a time so that what is read fits beside the accumulator in registers."""
    rows: gl.constexpr = values.shape[0]
    width: gl.constexpr = values.shape[1]
    if width > ADD_COLUMNS:
        left, right = gl.split(gl.permute(gl.reshape(values, [rows, 2, width // 2]), (0, 2, 1)))
        _add(left, dw_ptr, row_offsets, rows_inside, column, PLAN)
        _add(right, dw_ptr, row_offsets, rows_inside, column + width // 2, PLAN)
    else:
        layout: gl.constexpr = values.type.layout
        ptrs, inside = _pointers(dw_ptr, row_offsets, rows_inside, column, width, layout, PLAN)
        gl.store(ptrs, gl.load(ptrs, mask=inside, other=0.0) + values, mask=inside)


@gluon.jit
def add_tile(sums, dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, column, PLAN: gl.constexpr):
    """Adds a half tile to dW."""
    dw_ptr, offsets, inside = _rows_of_tile(dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, PLAN)
    _add(sums, dw_ptr, offsets, inside, column, PLAN)
