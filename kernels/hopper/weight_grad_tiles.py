"""How a half tile of a weight gradient is written, and added to.

Written by TMA through shared memory. To accumulate, TMA brings what dW holds there while the product is taken, but for experts
that are marked as fresh. A dW of fp32, for which there is no such room, is added to behind the last step: a consumer reads,
adds and writes its half tile in whole lines of memory, one of each row at a time, and reads one ahead. Either rounds once.
"""

from moeblaze_ops.kernels.hopper.gluon_api import fence_async_shared, gl, gluon, mbarrier, tma_store, tma_store_wait
from moeblaze_ops.kernels.hopper.tiles import CHUNK, box_of, load_matrix, strip_of

_LINE = gl.constexpr(32)
"""Numbers of fp32 in a line of memory."""


@gluon.jit
def _halves(matrix):
    """The left and the right columns of a matrix."""
    rows: gl.constexpr = matrix.shape[0]
    width: gl.constexpr = matrix.shape[1]
    return gl.split(gl.permute(gl.reshape(matrix, [rows, 2, width // 2]), (0, 2, 1)))


@gluon.jit
def _send(staging, half, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Has TMA write the staged matrix of a half tile; what lies outside dW is not written."""
    desc = dw_descs[0]
    fence_async_shared()
    source = box_of(staging, half, desc)
    if PLAN.parts == 2:
        if part == 0:
            tma_store(desc, [expert, row, column], source)
        else:
            tma_store(dw_descs[1], [expert, row, column], source)
    else:
        tma_store(desc, [expert, row, column], source)


@gluon.jit
def _store(staging, half, values, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Hands a matrix to TMA once the buffer's last one has been read."""
    tma_store_wait(0)
    staging.index(half).store(values.to(dw_descs[0].dtype))
    _send(staging, half, dw_descs, part, expert, row, column, PLAN)


@gluon.jit
def write_tile(staging, half, sums, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Hands a half tile to TMA, in one piece or two."""
    store_n: gl.constexpr = PLAN.store_n
    if store_n == PLAN.tile.block_n:
        _store(staging, half, sums, dw_descs, part, expert, row, column, PLAN)
    else:
        left, right = _halves(sums)
        _store(staging, half, left, dw_descs, part, expert, row, column, PLAN)
        _store(staging, half, right, dw_descs, part, expert, row, column + store_n, PLAN)


@gluon.jit
def fetch_tile(staging, half, arrived, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Has TMA bring what dW holds of a half tile once the buffer's last one has been read; zeros outside of dW."""
    tma_store_wait(0)
    mbarrier.expect(arrived, PLAN.store_bytes)
    if PLAN.parts == 2:
        if part == 0:
            load_matrix(dw_descs[0], expert, row, column, arrived, staging, half)
        else:
            load_matrix(dw_descs[1], expert, row, column, arrived, staging, half)
    else:
        load_matrix(dw_descs[0], expert, row, column, arrived, staging, half)


@gluon.jit
def _stage(staging, HALF: gl.constexpr, sums, FIRST_CHUNK: gl.constexpr, is_added):
    """Stages a half tile, a block of CHUNK columns at a time so that what is added fits beside it in registers."""
    half_m: gl.constexpr = sums.shape[0]
    width: gl.constexpr = sums.shape[1]
    if width > CHUNK:
        left, right = _halves(sums)
        _stage(staging, HALF, left, FIRST_CHUNK, is_added)
        _stage(staging, HALF, right, FIRST_CHUNK + width // 2 // CHUNK, is_added)
    else:
        staged = strip_of(staging, HALF, 0, FIRST_CHUNK, half_m, CHUNK, staging.dtype)
        if is_added:
            sums += staged.load(sums.type.layout).to(gl.float32)
        staged.store(sums.to(staging.dtype))


@gluon.jit
def write_fetched_tile(HALF: gl.constexpr, staging, sums, is_added, dw_descs, part, expert, row, column, PLAN: gl.constexpr):
    """Hands a half tile to TMA, with ``is_added`` on top of what has been fetched."""
    if is_added == 0:
        tma_store_wait(0)
    _stage(staging, HALF, sums, 0, is_added)
    _send(staging, HALF, dw_descs, part, expert, row, column, PLAN)


@gluon.jit
def _rows_of_tile(dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, layout: gl.constexpr, PLAN: gl.constexpr):
    """``(dw_ptr, row offsets, whether a row is inside)`` of a half tile, in a layout of its rows."""
    rows = row + gl.arange(0, PLAN.tile.half_m, layout)
    dw_ptr = dw_ptrs[0]
    if PLAN.parts == 2:
        dw_ptr = gl.where(part == 0, dw_ptrs[0], dw_ptrs[1])
    return dw_ptr, expert.to(gl.int64) * stride_dw_e8 * 8 + rows.to(gl.int64) * stride_dw_m8 * 8, rows < PLAN.m


@gluon.jit
def _lines(dw_ptr, row_offsets, rows_inside, column, layout: gl.constexpr, PLAN: gl.constexpr):
    """Where a line of each row is in dW, and which of it is inside."""
    columns = column + gl.arange(0, _LINE, gl.SliceLayout(0, layout))
    ptrs = gl.expand_dims(dw_ptr + columns, 0) + gl.expand_dims(row_offsets, 1)
    return ptrs, gl.expand_dims(rows_inside, 1) & gl.expand_dims(columns < PLAN.n, 0)


@gluon.jit
def _add(values, held, rows, column, IS_LAST: gl.constexpr, layout: gl.constexpr, PLAN: gl.constexpr):
    """Adds a matrix to dW, a line of each row at a time; returns what dW holds of the next one.

    ``held``, what dW holds of the first, is read a line ahead. More would not fit beside the accumulator in registers.
    """
    width: gl.constexpr = values.shape[1]
    if width > _LINE:
        left, right = _halves(values)
        held = _add(left, held, rows, column, False, layout, PLAN)
        held = _add(right, held, rows, column + width // 2, IS_LAST, layout, PLAN)
    else:
        ptrs, inside = _lines(*rows, column, layout, PLAN)
        sums = gl.convert_layout(values, layout) + held
        if not IS_LAST:
            next_ptrs, next_inside = _lines(*rows, column + width, layout, PLAN)
            held = gl.load(next_ptrs, mask=next_inside, other=0.0)
        gl.store(ptrs, sums, mask=inside)
    return held


@gluon.jit
def add_tile(sums, dw_ptrs, stride_dw_e8, stride_dw_m8, part, expert, row, column, PLAN: gl.constexpr):
    """Adds a half tile to dW, where it is fp32."""
    # Eight threads read a line; a warp has the rows that it has of the accumulator.
    layout: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    place = (stride_dw_e8, stride_dw_m8, part, expert, row)
    rows = _rows_of_tile(dw_ptrs, *place, gl.SliceLayout(1, layout), PLAN)
    ptrs, inside = _lines(*rows, column, layout, PLAN)
    _add(sums, gl.load(ptrs, mask=inside, other=0.0), rows, column, True, layout, PLAN)
