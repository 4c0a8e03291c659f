"""h as the forward epilogue leaves it for backward, and as the backward epilogue reads it: as it is, or in 8 bits.

What a strip of rows has of h stays in registers from one step of a loop to the next, in words of 32 bits: narrower values take
a register each there, and are waited for. In 8 bits (``kernels/eight_bits.py``) a thread has the 8 columns of a row that
``row_layout`` gives it as two words, and the scale of their block.
"""

from moeblaze_ops.kernels import eight_bits
from moeblaze_ops.kernels.hopper.gather import CHUNK
from moeblaze_ops.kernels.hopper.gluon_api import gl, gluon
from moeblaze_ops.kernels.hopper.tiles import row_layout

_SCALE_SHIFT = gl.constexpr(eight_bits.SCALE_SHIFT)
_SCALE_BIAS = gl.constexpr(eight_bits.SCALE_BIAS)
_ROUND_UP = gl.constexpr((1 << eight_bits.SCALE_SHIFT) - 1)
_LANES = gl.constexpr(8)
"""Threads that share a row of a chunk."""
_BLOCK = gl.constexpr(eight_bits.BLOCK)
_BLOCK_LANES = gl.constexpr(eight_bits.BLOCK // 8)
"""Threads that share a block of it."""


@gluon.constexpr_function
def strip_rows(num_warps):
    """Rows of a strip: one for each 8 lanes; a multiple of the 8 that a swizzle atom of the hand-over holds."""
    return 4 * num_warps


@gluon.constexpr_function
def pair_layout(num_warps):
    """``row_layout`` with two neighbours as one element."""
    return gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _lane_layout(num_warps, elements):
    """Rows by lanes by what a lane has of a row."""
    return gl.BlockedLayout([1, 1, elements], [4, 8, 1], [num_warps, 1, 1], [2, 1, 0])


_UNPACK_BF16 = gl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")
_UNPACK_FP16 = gl.constexpr(
    """{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.f32.f16 $0, first;
    cvt.f32.f16 $1, second;
    }"""
)
_UNPACK_INT8 = gl.constexpr(
    """{
    .reg .b32 biased;
    xor.b32 biased, $4, 0x80808080;
    prmt.b32 $0, biased, 0x4b000000, 0x7440;
    prmt.b32 $1, biased, 0x4b000000, 0x7441;
    prmt.b32 $2, biased, 0x4b000000, 0x7442;
    prmt.b32 $3, biased, 0x4b000000, 0x7443;
    }"""
)
"""Each byte b as the fp32 number 2 ** 23 + 128 + b."""


@gluon.jit
def unpack(pairs, dtype: gl.constexpr):
    """The fp32 values of pairs of 16-bit elements. Shape [rows, 2 * pairs], in ``row_layout``."""
    asm: gl.constexpr = _UNPACK_BF16 if dtype == gl.bfloat16 else _UNPACK_FP16
    first, second = gl.inline_asm_elementwise(asm, "=f,=f,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    values = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(values, row_layout(gl.num_warps()))


@gluon.jit
def _scales(codes):
    return ((codes.to(gl.int32) + _SCALE_BIAS) << _SCALE_SHIFT).to(gl.float32, bitcast=True)


@gluon.jit
def _unpack_eight_bits(words, codes):
    """The fp32 values of words of four integers, [rows, lanes, 2], with the scale of each lane. Shape [rows, CHUNK]."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        _UNPACK_INT8,
        "=f,=f,=f,=f,r",
        [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    values = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape([words.shape[0], _LANES, 8])
    values = gl.convert_layout(values, _lane_layout(gl.num_warps(), 8))
    scales = _scales(gl.convert_layout(codes, gl.SliceLayout(2, _lane_layout(gl.num_warps(), 8))))
    # One rounding, of a number that has no more than eight bits times three of the scale.
    zero, _ = gl.broadcast(gl.expand_dims(scales * -8388736.0, 2), values)
    scales, _ = gl.broadcast(gl.expand_dims(scales, 2), values)
    values = gl.fma(values, scales, zero)
    return gl.convert_layout(values.reshape([words.shape[0], CHUNK]), row_layout(gl.num_warps()))


@gluon.jit
def values_of(kept, dtype: gl.constexpr):
    """A chunk of gate or of up, as ``load_h`` gives it: fp32 values of ``dtype``'s pairs, or of 8 bits, in ``row_layout``."""
    if len(kept) == 2:
        return _unpack_eight_bits(kept[0], kept[1])
    else:
        return unpack(kept[0], dtype)


@gluon.jit
def load_h(h_ptr, row, end, column, PLAN: gl.constexpr):
    """The chunks of a strip, each its gate and up (twice the same when ungated), for ``values_of``."""
    if h_ptr.dtype.element_ty == gl.int8:
        return _load_eight_bits(h_ptr, row, end, column, PLAN)
    else:
        return _load_pairs(h_ptr, row, end, column, PLAN)


@gluon.jit
def _load_pairs(h_ptr, row, end, column, PLAN: gl.constexpr):
    ROWS: gl.constexpr = strip_rows(gl.num_warps())
    layout: gl.constexpr = pair_layout(gl.num_warps())
    num_chunks: gl.constexpr = PLAN.part_n // CHUNK
    row_pairs: gl.constexpr = PLAN.columns // 2
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    pairs_ptr = h_ptr.cast(gl.pointer_type(gl.int32), bitcast=True)
    row_ptrs = gl.expand_dims(pairs_ptr + rows.to(gl.int64) * (PLAN.h_parts * row_pairs), 1)
    chunks = ()
    for chunk in gl.static_range(num_chunks):
        pairs = (column + chunk * CHUNK) // 2 + gl.arange(0, CHUNK // 2, gl.SliceLayout(0, layout))
        pairs = gl.expand_dims(pairs, 0)
        mask = gl.expand_dims(rows < end, 1)
        if PLAN.columns % PLAN.part_n != 0:
            mask = mask & (pairs < row_pairs)
        gate = gl.load(row_ptrs + pairs, mask=mask, other=0)
        up = gate
        if PLAN.gated:
            up = gl.load(row_ptrs + row_pairs + pairs, mask=mask, other=0)
        chunks += (((gate,), (up,)),)
    return chunks


@gluon.jit
def _load_eight_bits(h_ptr, row, end, column, PLAN: gl.constexpr):
    ROWS: gl.constexpr = strip_rows(gl.num_warps())
    layout: gl.constexpr = _lane_layout(gl.num_warps(), 2)
    lane_layout: gl.constexpr = gl.SliceLayout(2, layout)
    num_chunks: gl.constexpr = PLAN.part_n // CHUNK
    row_bytes: gl.constexpr = PLAN.h8_row_bytes
    words_ptr = h_ptr.cast(gl.pointer_type(gl.int32), bitcast=True)
    codes_ptr = h_ptr + PLAN.h8_integers_bytes
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
    lanes = gl.expand_dims(gl.arange(0, _LANES, gl.SliceLayout(0, lane_layout)), 0)  # [1, lanes]
    parts = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    row_words = gl.expand_dims(rows.to(gl.int64) * (PLAN.h_parts * row_bytes // 4), 1)
    chunks = ()
    for chunk in gl.static_range(num_chunks):
        mask = gl.expand_dims(rows < end, 1)
        if PLAN.columns % PLAN.part_n != 0:
            mask = mask & (column + chunk * CHUNK + 8 * lanes < PLAN.columns)
        words = row_words + ((column + chunk * CHUNK) // 4 + 2 * lanes)  # [rows, lanes]
        word_ptrs = words_ptr + (gl.expand_dims(words, 2) + gl.expand_dims(gl.expand_dims(parts, 0), 0))
        code_ptrs = codes_ptr + (4 * row_words + ((column + chunk * CHUNK) // _BLOCK + lanes // _BLOCK_LANES))
        word_mask, _ = gl.broadcast(gl.expand_dims(mask, 2), word_ptrs)
        gate = (gl.load(word_ptrs, mask=word_mask, other=0), gl.load(code_ptrs, mask=mask, other=0))
        up = gate
        if PLAN.gated:
            words = gl.load(word_ptrs + row_bytes // 4, mask=word_mask, other=0)
            up = (words, gl.load(code_ptrs + row_bytes, mask=mask, other=0))
        chunks += ((gate, up),)
    return chunks


@gluon.jit
def store_eight_bits(h, h_ptr, part: gl.constexpr, row, end, column, PLAN: gl.constexpr):
    """Stores a chunk of gate (``part`` 0) or of up, [rows, CHUNK] in ``row_layout``, in 8 bits."""
    ROWS: gl.constexpr = h.shape[0]
    layout: gl.constexpr = _lane_layout(gl.num_warps(), 8)
    lane_layout: gl.constexpr = gl.SliceLayout(2, layout)
    row_bytes: gl.constexpr = PLAN.h8_row_bytes
    values = gl.convert_layout(h.to(gl.float32).reshape([ROWS, _LANES, 8]), layout)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
    lanes = gl.expand_dims(gl.arange(0, _LANES, gl.SliceLayout(0, lane_layout)), 0)
    mask = gl.expand_dims(rows < end, 1)
    if PLAN.columns % PLAN.part_n != 0:
        mask = mask & (column + 8 * lanes < PLAN.columns)
        inside, _ = gl.broadcast(gl.expand_dims(column + 8 * lanes < PLAN.columns, 2), values)
        values = gl.where(inside, values, 0.0)
    of_lanes = gl.max(gl.abs(values), 2).reshape([ROWS, _LANES // _BLOCK_LANES, _BLOCK_LANES])
    of_blocks, _ = gl.broadcast(gl.expand_dims(gl.max(of_lanes, 2), 2), of_lanes)
    largest = gl.convert_layout(of_blocks.reshape([ROWS, _LANES]), lane_layout)
    bits = (largest * (1 / 127)).to(gl.int32, bitcast=True)
    codes = ((bits + _ROUND_UP) >> _SCALE_SHIFT) - _SCALE_BIAS
    codes = gl.minimum(gl.maximum(codes, -128), 127).to(gl.int8)
    # 1.5 * 2 ** 23 has what is added to it in its last bits, rounded to an integer.
    rounded = values * gl.expand_dims(1.0 / _scales(codes), 2) + 12582912.0
    integers = rounded.to(gl.int32, bitcast=True).to(gl.int8)
    row_ptrs = h_ptr + (gl.expand_dims(rows.to(gl.int64) * (PLAN.h_parts * row_bytes), 1) + part * row_bytes)
    bytes_of_lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    ptrs = gl.expand_dims(row_ptrs + (column + 8 * lanes), 2) + gl.expand_dims(gl.expand_dims(bytes_of_lane, 0), 0)
    inside, _ = gl.broadcast(gl.expand_dims(mask, 2), values)
    gl.store(ptrs, integers, mask=inside)
    code_ptrs = row_ptrs + (PLAN.h8_integers_bytes + column // _BLOCK + lanes // _BLOCK_LANES)
    gl.store(code_ptrs, codes, mask=mask & (lanes % _BLOCK_LANES == 0))
