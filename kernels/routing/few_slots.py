"""Groups few routed slots by expert in one program, as in decoding: a launch costs more than what it does.

A slot's row is the number of slots whose expert is a lower one, or the same one and the slot an earlier one: all pairs are
compared. Each expert has one entry of the block schedule or none, since all slots together fill no more than one.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK, choose_dispatch
from moeblaze_ops.kernels.launch import launch, static_size

_MOST_SLOTS = ROW_BLOCK


@triton.jit(do_not_specialize=["N", "num_entries"])
def _few_slots_kernel(
    experts_ptr, slots_ptr, offsets_ptr, positions_ptr, blocks_ptr,
    N, num_entries, E,
    stride_t, stride_k,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    slots = tl.arange(0, SLOTS)
    slot_in = slots < N
    experts = tl.load(experts_ptr + (slots // TOP_K).to(tl.int64) * stride_t + slots % TOP_K * stride_k, mask=slot_in, other=-1)
    used = (experts >= 0) & (experts < E)
    slot_bins = tl.where(slot_in, tl.where(used, experts, E), BINS - 1).to(tl.int32)
    keys = slot_bins * SLOTS + slots
    rows = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), axis=1)
    tl.store(positions_ptr + slots, tl.where(used, rows, -1), mask=slot_in)
    tl.store(slots_ptr + rows, tl.where(used, slots, -1), mask=slot_in)

    bins = tl.arange(0, BINS)
    counts = tl.where(bins < E, tl.histogram(slot_bins, BINS), 0)
    offsets = tl.cumsum(counts, 0) - counts
    tl.store(offsets_ptr + bins, offsets, mask=bins <= E)
    is_hit = (counts > 0).to(tl.int32)
    entries = 1 + tl.cumsum(is_hit, 0) - is_hit
    tl.store(blocks_ptr + 2 * entries, bins, mask=is_hit != 0)
    tl.store(blocks_ptr + 2 * entries + 1, offsets, mask=is_hit != 0)
    num_hit = tl.sum(is_hit, 0)
    tl.store(blocks_ptr, num_hit)
    tl.store(blocks_ptr + 1, 0)
    is_left = (bins >= num_hit) & (bins < num_entries)
    tl.store(blocks_ptr + 2 * (1 + bins), -1, mask=is_left)
    tl.store(blocks_ptr + 2 * (1 + bins) + 1, 0, mask=is_left)


def has_few_slots(experts_TK: Tensor, num_experts: int) -> bool:
    """True if one program groups the slots; never where their number is only known when the code runs."""
    slots = static_size(experts_TK.shape[0] * experts_TK.shape[1])
    return slots is not None and slots <= _MOST_SLOTS and num_experts + 2 <= choose_dispatch(num_experts).bins


def launch_few_slots(
    experts_TK: Tensor, num_experts: int, slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor
) -> None:
    """Writes what ``launch_dispatch`` returns; arguments as there, of as few slots as ``has_few_slots`` says."""
    launch(
        _few_slots_kernel,
        1,
        experts_TK, slots_N, offsets_E1, positions_TK, blocks_B2,
        slots_N.shape[0], blocks_B2.shape[0] - 1, num_experts,
        *experts_TK.stride(),
        TOP_K=experts_TK.shape[1], SLOTS=_MOST_SLOTS, BINS=choose_dispatch(num_experts).bins,
        num_warps=4, num_stages=1,
    )  # fmt: skip
