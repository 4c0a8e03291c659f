"""Groups the slots of few tokens, as in decoding: what ``dispatch`` does, by one program in place of three kernels.

The row of a slot is the number of slots that come before it: those of lower bins, and earlier ones of its own. An expert with
tokens has one entry of the block schedule, for all slots fit one.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.launch import launch, static_size

MOST_SLOTS = ROW_BLOCK
_MOST_EXPERTS = 1024


@triton.jit(do_not_specialize=["N", "num_entries"])
def _dispatch_few_kernel(
    experts_ptr,
    slots_ptr,
    offsets_ptr,
    positions_ptr,
    blocks_ptr,
    N,
    num_entries,
    E,
    stride_t,
    stride_k,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    slots = tl.arange(0, SLOTS)
    slot_in = slots < N
    experts = tl.load(experts_ptr + slots // TOP_K * stride_t + slots % TOP_K * stride_k, mask=slot_in, other=-1)
    used = (experts >= 0) & (experts < E)
    slot_bins = tl.where(used, experts, E).to(tl.int32)
    is_before = (slot_bins[None, :] < slot_bins[:, None]) | (
        (slot_bins[None, :] == slot_bins[:, None]) & (slots[None, :] < slots[:, None])
    )
    rows = tl.sum(is_before.to(tl.int32), 1)
    tl.store(slots_ptr + rows, tl.where(used, slots, -1), mask=slot_in)
    tl.store(positions_ptr + slots, tl.where(used, rows, -1), mask=slot_in)

    bins = tl.arange(0, BINS)
    counts = tl.histogram(slot_bins, BINS)
    offsets = tl.cumsum(counts, 0) - counts
    tl.store(offsets_ptr + bins, offsets, mask=bins <= E)
    has_rows = ((counts > 0) & (bins < E)).to(tl.int32)
    num_used = tl.sum(has_rows, 0)
    pairs = blocks_ptr + 2 * (1 + tl.cumsum(has_rows, 0) - has_rows)
    tl.store(pairs, bins, mask=has_rows > 0)
    tl.store(pairs + 1, offsets, mask=has_rows > 0)
    tl.store(blocks_ptr, num_used)
    tl.store(blocks_ptr + 1, 0)
    entries = tl.arange(0, ENTRIES)
    unused = (entries >= num_used) & (entries < num_entries)
    tl.store(blocks_ptr + 2 * (1 + entries), -1, mask=unused)
    tl.store(blocks_ptr + 2 * (1 + entries) + 1, 0, mask=unused)


def has_few_slots(experts_TK: Tensor, num_experts: int) -> bool:
    """Whether one program takes these slots; not where their number is a symbol."""
    num_slots = static_size(experts_TK.numel())
    return num_slots is not None and num_slots <= MOST_SLOTS and num_experts <= _MOST_EXPERTS


def launch_dispatch_few(
    experts_TK: Tensor, num_experts: int, slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor
) -> None:
    """Writes the results of ``launch_dispatch``, of which the other arguments are, where ``has_few_slots``."""
    num_entries = blocks_B2.shape[0] - 1
    launch(
        _dispatch_few_kernel,
        1,
        experts_TK,
        slots_N,
        offsets_E1,
        positions_TK,
        blocks_B2,
        slots_N.shape[0],
        num_entries,
        num_experts,
        *experts_TK.stride(),
        TOP_K=experts_TK.shape[1],
        SLOTS=MOST_SLOTS,
        BINS=triton.next_power_of_2(num_experts + 1),
        ENTRIES=triton.next_power_of_2(num_entries),
        num_warps=8,
        num_stages=1,
    )
