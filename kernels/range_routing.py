"""The routing of ranges of rows, each with the same experts in fewer rows, all in one launch.

Of a range ``[start, stop)`` of the rows in expert order,

    offsets[e]   where its rows of expert e begin, counted from its first one
    blocks       their schedule, as ``dispatch`` writes that of all rows
    fresh[e]     1 if expert e begins in it, else 0; an expert without rows begins in one range too
    order[i]     the expert with the i-th most rows in it; of two with as many, the fresh one first, then the lower one
    order[E]     how many of them have rows in it or are fresh

Ranges after the first one are equally long, but for the last one's end. One program for each expert, and one more, of each range.
"""

import triton
import triton.language as tl

from moeblaze_ops.kernels.configs import ROW_BLOCK, choose_dispatch
from moeblaze_ops.kernels.dispatch import write_entries
from moeblaze_ops.kernels.launch import ceil_div, launch
from moeblaze_ops.kernels.tiles import ROWS_PER_ENTRY

_ALIGNMENT = 4
"""int32 numbers in the 16 bytes at which a tensor begins: kernels are compiled for such ones."""


@triton.jit
def _clamp(row, start, stop):
    return tl.minimum(tl.maximum(row, start), stop)


@triton.jit
def _begins_in(begin, start, stop, N):
    """1 for an expert that begins in a range, else 0; one without rows that begins behind all rows begins in the last."""
    return ((begin >= start) & ((begin < stop) | (stop == N))).to(tl.int32)


@triton.jit(do_not_specialize=["N", "first_size", "size", "num_entries", "width", "blocks_at", "fresh_at", "order_at"])
def _range_routing_kernel(
    offsets_ptr,
    routing_ptr,
    N,
    first_size,
    size,
    num_entries,
    E,
    width,
    blocks_at,
    fresh_at,
    order_at,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0) % (E + 1)
    index = tl.program_id(0) // (E + 1)
    stop = tl.minimum(first_size + index * size, N)
    start = tl.where(index == 0, 0, first_size + (index - 1) * size)
    routing_ptr += index.to(tl.int64) * width
    begin = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < E, other=0)
    first_row = _clamp(begin, start, stop) - start
    num_rows = tl.where(expert < E, _clamp(end, start, stop) - start - first_row, 0)
    is_fresh = _begins_in(begin, start, stop, N)
    work = 2 * num_rows + is_fresh
    first_entry = 0
    rank = 0
    num_visited = 0
    for first_bin in range(0, E, BINS):
        bins = first_bin + tl.arange(0, BINS)
        exists = bins < E
        begins = tl.load(offsets_ptr + bins, mask=exists, other=0)
        ends = tl.load(offsets_ptr + bins + 1, mask=exists, other=0)
        totals = _clamp(ends, start, stop) - _clamp(begins, start, stop)
        is_earlier = exists & (bins < expert)
        first_entry += tl.sum(tl.where(is_earlier, tl.cdiv(totals, ROWS_PER_ENTRY), 0), 0)
        works = tl.where(exists, 2 * totals + _begins_in(begins, start, stop, N), 0)
        rank += tl.sum(((works > work) | (is_earlier & (works == work))).to(tl.int32), 0)
        num_visited += tl.sum((works > 0).to(tl.int32), 0)
    tl.store(routing_ptr + expert, first_row)
    write_entries(routing_ptr + blocks_at, expert, first_row, num_rows, first_entry, num_entries, E, BLOCK)
    tl.store(routing_ptr + fresh_at + expert, is_fresh, mask=expert < E)
    tl.store(routing_ptr + order_at + tl.where(expert < E, rank, E), tl.where(expert < E, expert, num_visited))


def launch_range_routing(offsets_E1, ranges):
    """The routing of each of some ranges of rows.

    Args:
        offsets_E1: from ``dispatch``, int32, contiguous.
        ranges: what covers all rows in order, two or more; those after the first one equally long, but for the last one.

    Returns:
        For each range offsets_E1 and blocks_B2 as ``launch_dispatch`` gives them, fresh_E and order_E1, int32, contiguous.
    """
    num_experts = offsets_E1.shape[0] - 1
    num_entries = [len(rows) // ROW_BLOCK + num_experts for rows in ranges]
    sizes = (num_experts + 1, 2 * (max(num_entries) + 1), num_experts, num_experts + 1)
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + ceil_div(size, _ALIGNMENT) * _ALIGNMENT)
    _, blocks_at, fresh_at, order_at, width = begins
    routing_RC = offsets_E1.new_empty((len(ranges), width))
    config = choose_dispatch(num_experts)
    launch(
        _range_routing_kernel,
        len(ranges) * (num_experts + 1),
        offsets_E1,
        routing_RC,
        ranges[-1].stop,
        len(ranges[0]),
        len(ranges[1]),
        max(num_entries),
        num_experts,
        width,
        blocks_at,
        fresh_at,
        order_at,
        BINS=config.bins,
        BLOCK=config.step,
        num_warps=config.num_warps,
        num_stages=1,
    )

    def routing_of(routing_C, entries):
        offsets, fresh, order = (routing_C.narrow(0, begins[i], sizes[i]) for i in (0, 2, 3))
        return offsets, routing_C.narrow(0, blocks_at, 2 * (entries + 1)).view(-1, 2), fresh, order

    return [routing_of(*given) for given in zip(routing_RC.unbind(), num_entries, strict=True)]
