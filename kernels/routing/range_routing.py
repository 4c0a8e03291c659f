"""The routing of a range of rows: the same experts in fewer rows.

Of a range ``[start, stop)`` of the rows in expert order,

    offsets[e]   where its rows of expert e begin, counted from its first one
    blocks       their schedule, as ``dispatch`` writes that of all rows
    fresh[e]     1 if expert e begins in it, else 0; an expert without rows begins in one range too
    order[i]     the expert with the i-th most rows in it; of two with as many, the fresh one first, then the lower one
    order[E]     how many of them have rows in it or are fresh

One program for each expert, and one more.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK, choose_dispatch
from moeblaze_ops.kernels.launch import ceil_div, launch
from moeblaze_ops.kernels.routing.dispatch import write_entries
from moeblaze_ops.kernels.tiles import ROWS_PER_ENTRY

_ALIGNMENT = 4
"""int32 numbers in the 16 bytes at which a tensor begins: kernels are compiled for such ones."""


@triton.jit
def _clamp(row, start, stop):
    return tl.minimum(tl.maximum(row, start), stop)


@triton.jit
def _begins_in(begin, start, stop, is_last):
    """1 for an expert that begins in a range, else 0; one without rows that begins behind all rows begins in the last."""
    return ((begin >= start) & ((begin < stop) | (is_last != 0))).to(tl.int32)


@triton.jit(do_not_specialize=["start", "stop", "is_last", "num_entries", "blocks_at", "fresh_at", "order_at"])
def _range_routing_kernel(
    offsets_ptr, routing_ptr,
    start, stop, is_last, num_entries, E, blocks_at, fresh_at, order_at,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    begin = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < E, other=0)
    first_row = _clamp(begin, start, stop) - start
    num_rows = tl.where(expert < E, _clamp(end, start, stop) - start - first_row, 0)
    is_fresh = _begins_in(begin, start, stop, is_last)
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
        works = tl.where(exists, 2 * totals + _begins_in(begins, start, stop, is_last), 0)
        rank += tl.sum(((works > work) | (is_earlier & (works == work))).to(tl.int32), 0)
        num_visited += tl.sum((works > 0).to(tl.int32), 0)
    tl.store(routing_ptr + expert, first_row)
    write_entries(routing_ptr + blocks_at, expert, first_row, num_rows, first_entry, num_entries, E, BLOCK)
    tl.store(routing_ptr + fresh_at + expert, is_fresh, mask=expert < E)
    tl.store(routing_ptr + order_at + tl.where(expert < E, rank, E), tl.where(expert < E, expert, num_visited))


def launch_range_routing(offsets_E1: Tensor, rows: range, is_last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The routing of a range of rows.

    Args:
        offsets_E1: from ``dispatch``, int32, contiguous.
        rows: the range; what comes before it is covered by other ones.
        is_last: no range comes behind it.

    Returns:
        offsets_E1 and blocks_B2 as ``launch_dispatch`` gives them, fresh_E and order_E1, int32, contiguous.
    """
    num_experts = offsets_E1.shape[0] - 1
    num_entries = len(rows) // ROW_BLOCK + num_experts
    sizes = (num_experts + 1, 2 * (num_entries + 1), num_experts, num_experts + 1)
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + ceil_div(size, _ALIGNMENT) * _ALIGNMENT)
    routing_C = offsets_E1.new_empty((begins[-1],))
    config = choose_dispatch(num_experts)
    launch(
        _range_routing_kernel,
        num_experts + 1,
        offsets_E1, routing_C,
        rows.start, rows.stop, int(is_last), num_entries, num_experts,
        *begins[1:-1],
        BINS=config.bins, BLOCK=config.step,
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    offsets, blocks, fresh, order = (routing_C.narrow(0, *part) for part in zip(begins[:-1], sizes, strict=True))
    return offsets, blocks.view(-1, 2), fresh, order
