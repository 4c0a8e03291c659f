"""The rows of each expert whose tokens are of one part of all tokens: schedules for kernels that take part after part.

Rows of an expert are in the order of their slots, so those of a range of tokens follow each other. One program finds where they
begin and end for all experts, each by bisection, and writes their schedule.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.launch import launch
from moeblaze_ops.kernels.tiles import ROWS_PER_ENTRY


class RowPart(NamedTuple):
    """Some rows of each expert, those from ``begins_E[e]`` to ``ends_E1[e + 1]``, and their schedule."""

    begins_E: Tensor
    ends_E1: Tensor
    blocks_B2: Tensor


@triton.jit(do_not_specialize=["first_slot", "end_slot"])
def _row_part_kernel(slots_ptr, offsets_ptr, begins_ptr, ends_ptr, blocks_ptr, first_slot, end_slot, E, BINS: tl.constexpr):
    experts = tl.arange(0, BINS)
    exists = experts < E
    first = tl.load(offsets_ptr + experts, mask=exists, other=0)
    end = tl.load(offsets_ptr + experts + 1, mask=exists, other=0)
    # The first row whose slot is of this part or behind it, and the first one whose slot is behind it.
    begin, stop = first, first
    begin_limit, stop_limit = end, end
    left = tl.max(end - first, 0)
    while left > 0:
        middle = (begin + begin_limit) // 2
        inside = begin < begin_limit
        is_before = tl.load(slots_ptr + middle, mask=inside, other=0) < first_slot
        begin, begin_limit = tl.where(inside & is_before, middle + 1, begin), tl.where(is_before, begin_limit, middle)
        middle = (stop + stop_limit) // 2
        inside = stop < stop_limit
        is_before = tl.load(slots_ptr + middle, mask=inside, other=0) < end_slot
        stop, stop_limit = tl.where(inside & is_before, middle + 1, stop), tl.where(is_before, stop_limit, middle)
        left //= 2
    tl.store(begins_ptr + experts, begin, mask=exists)
    tl.store(ends_ptr + 1 + experts, stop, mask=exists)
    counts = tl.where(exists, tl.cdiv(stop - begin, ROWS_PER_ENTRY), 0)
    entries = 1 + tl.cumsum(counts, 0) - counts
    num_blocks = tl.sum(counts, 0)
    tl.store(blocks_ptr, num_blocks)
    tl.store(blocks_ptr + 1, 0)
    if num_blocks == 0:  # a kernel looks up its first tile before it knows that there is none
        tl.store(blocks_ptr + 2, -1)
        tl.store(blocks_ptr + 3, 0)
    for block in range(0, tl.max(counts, 0)):
        pair_ptrs = blocks_ptr + 2 * (entries + block)
        tl.store(pair_ptrs, experts, mask=block < counts)
        tl.store(pair_ptrs + 1, begin + block * ROWS_PER_ENTRY, mask=block < counts)


def launch_row_part(slots_N: Tensor, offsets_E1: Tensor, slots: range) -> RowPart:
    """The rows of the tokens whose slots are in a range; int32, contiguous.

    Args:
        slots_N, offsets_E1: from ``dispatch``, int32, contiguous; of the slots at least those that are used.

    Blocks are unwritten behind those that are used, ends before the first one.
    """
    num_experts = offsets_E1.shape[0] - 1
    part = RowPart(
        offsets_E1.new_empty(num_experts),
        offsets_E1.new_empty(num_experts + 1),
        offsets_E1.new_empty(slots_N.shape[0] // ROW_BLOCK + num_experts + 1, 2),
    )
    bins = triton.next_power_of_2(num_experts)
    given = (slots_N, offsets_E1, *part, slots.start, slots.stop, num_experts)
    launch(_row_part_kernel, 1, *given, BINS=bins, num_warps=4, num_stages=1)
    return part
