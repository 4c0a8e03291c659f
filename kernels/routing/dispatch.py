"""Groups routed slots by expert: a stable counting sort of indices, without atomics or a host sync.

Slot ``s = t * K + k`` goes to bin ``experts[t, k]``, or to a last bin E when that is outside [0, E) (an unused slot). With
the slots cut into chunks:

1. count:  counts[c, e] = slots of chunk c in bin e, one program a chunk;
2. scan:   counts[c, e] <- slots of bin e before chunk c, and totals[e], one program for SCAN_BINS bins, a sector of memory;
3. place:  row of a slot = offsets[e] + counts[c, e] + slots of bin e before it in its chunk, one program a chunk.
           E + 1 more programs write the offsets and the block schedule, one program an expert.

The place within a chunk comes from sorting STEP slots at a time by bin and slot, in registers. Unused slots are placed like
any other, behind all used ones, where they are written as -1. A program keeps BINS - 1 bins, and the last of its BINS for
slots of no concern to it: with more experts than that, every chunk has a program for each *window* of BINS - 1 bins.

Where a token has many slots, as one that may go to any number of experts, most are unused, and are not sorted: the count writes
their positions, and a list of the used slots of each chunk, one after another, which is what is placed.

Where all are few, as in decoding, one program does it all (`few_slots.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK, choose_dispatch
from moeblaze_ops.kernels.launch import ceil_div, launch
from moeblaze_ops.kernels.routing.few_slots import has_few_slots, launch_few_slots
from moeblaze_ops.kernels.tiles import ROWS_PER_ENTRY

_COUNT_STEP = 1024
_SCAN_BLOCK = 512
_SCAN_BINS = 8
_FEW_SLOTS = 8
"""Slots of a token up to which all are taken for used."""
_LISTED_TOKENS = 64
"""Tokens of a chunk, about, whose used slots are listed."""


@triton.jit
def _slot_offsets(slots, stride_t, stride_k, TOP_K: tl.constexpr):
    """Where the expert of each slot stands in ``experts_TK``."""
    return (slots // TOP_K).to(tl.int64) * stride_t + slots % TOP_K * stride_k


@triton.jit
def _window_bins(experts, slot_in, window, E, BINS: tl.constexpr):
    """Bin of each slot in the window; BINS - 1 outside the window and where there is no slot."""
    used = (experts >= 0) & (experts < E)
    local = tl.where(used, experts, E).to(tl.int32) - window * (BINS - 1)
    in_window = slot_in & (local >= 0) & (local < BINS - 1)
    return tl.where(in_window, local, BINS - 1)


# Numbers of slots fit 32 bits; a compiler that does not know how many come passes 64, which a histogram does not take.
@triton.jit(do_not_specialize=["N", "num_chunks"])
def _count_kernel(
    experts_ptr, counts_ptr, listed_ptr, positions_ptr,
    N, num_chunks, E, row_bins,
    stride_t, stride_k,
    TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    chunk = (tl.program_id(0) % num_chunks).to(tl.int32)
    window = (tl.program_id(0) // num_chunks).to(tl.int32)
    counts = tl.zeros((BINS,), tl.int32)
    num_listed = 0
    for first in range(0, CHUNK, STEP):
        slots = chunk * CHUNK + first + tl.arange(0, STEP)
        offsets = _slot_offsets(slots, stride_t, stride_k, TOP_K)
        experts = tl.load(experts_ptr + offsets, mask=slots < N, other=-1)
        local = _window_bins(experts, slots < N, window, E, BINS)
        counts += tl.histogram(local, BINS)
        if listed_ptr is not None:
            used = (local < E).to(tl.int32)
            places = num_chunks + chunk.to(tl.int64) * CHUNK + num_listed + tl.cumsum(used, 0) - used
            tl.store(listed_ptr + places, local * CHUNK + slots - chunk * CHUNK, mask=used != 0)
            tl.store(positions_ptr + slots, -1, mask=(used == 0) & (slots < N))
            num_listed += tl.sum(used, 0)
    if listed_ptr is not None:
        tl.store(listed_ptr + chunk, num_listed)
    local_bins = tl.arange(0, BINS)
    bins = window * (BINS - 1) + local_bins
    kept = (local_bins < BINS - 1) & (bins <= E)
    tl.store(counts_ptr + chunk.to(tl.int64) * row_bins + bins, counts, mask=kept)


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(counts_ptr, totals_ptr, num_chunks, E, row_bins, BLOCK: tl.constexpr, BINS: tl.constexpr):
    bins = tl.program_id(0) * BINS + tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_chunks, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        count_ptrs = counts_ptr + chunks.to(tl.int64)[:, None] * row_bins + bins[None, :]  # [BLOCK, BINS]
        inside = (chunks < num_chunks)[:, None] & (bins <= E)[None, :]
        counts = tl.load(count_ptrs, mask=inside, other=0)
        tl.store(count_ptrs, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + bins, total, mask=bins <= E)


@triton.jit
def _place_chunk(
    chunk, window,
    experts_ptr, counts_ptr, totals_ptr, slots_ptr, positions_ptr,
    N, E, row_bins,
    stride_t, stride_k,
    TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the rows of one chunk's slots, those in one window of bins."""
    local_bins = tl.arange(0, BINS)
    kept = local_bins < BINS - 1
    next_row = tl.zeros((BINS,), tl.int32)
    for earlier in range(0, window):
        bins = earlier * (BINS - 1) + local_bins
        next_row += tl.sum(tl.load(totals_ptr + bins, mask=kept, other=0), 0)
    bins = window * (BINS - 1) + local_bins
    kept &= bins <= E
    totals = tl.load(totals_ptr + bins, mask=kept, other=0)
    before_chunk = tl.load(counts_ptr + chunk.to(tl.int64) * row_bins + bins, mask=kept, other=0)
    next_row += tl.cumsum(totals, 0) - totals + before_chunk
    steps = tl.arange(0, STEP)
    for first in range(0, CHUNK, STEP):
        slots = chunk * CHUNK + first + steps
        offsets = _slot_offsets(slots, stride_t, stride_k, TOP_K)
        experts = tl.load(experts_ptr + offsets, mask=slots < N, other=-1)
        local = _window_bins(experts, slots < N, window, E, BINS)
        counts = tl.histogram(local, BINS)
        ordered = tl.sort(local * STEP + steps)
        ordered_bins = ordered // STEP
        ordered_slots = chunk * CHUNK + first + ordered % STEP
        rows = tl.gather(next_row - (tl.cumsum(counts, 0) - counts), ordered_bins, 0) + steps
        placed = ordered_bins < BINS - 1
        used = window * (BINS - 1) + ordered_bins < E
        tl.store(positions_ptr + ordered_slots, tl.where(used, rows, -1), mask=placed)
        tl.store(slots_ptr + rows, tl.where(used, ordered_slots, -1), mask=placed)
        next_row += counts


@triton.jit
def _place_listed(
    chunk,
    counts_ptr, totals_ptr, listed_ptr, slots_ptr, positions_ptr,
    N, num_chunks, E, row_bins,
    BINS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the rows of one chunk's listed slots, and -1 to those of its rows that are behind all used ones."""
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < E, other=0)
    before_chunk = tl.load(counts_ptr + chunk.to(tl.int64) * row_bins + bins, mask=bins < E, other=0)
    next_row = tl.cumsum(totals, 0) - totals + before_chunk
    steps = tl.arange(0, STEP)
    num_listed = tl.load(listed_ptr + chunk)
    list_ptr = listed_ptr + num_chunks + chunk.to(tl.int64) * CHUNK
    for first in range(0, num_listed, STEP):
        listed_in = first + steps < num_listed
        listed = tl.load(list_ptr + first + steps, mask=listed_in, other=0)
        local = tl.where(listed_in, listed // CHUNK, BINS - 1)
        counts = tl.histogram(local, BINS)
        ordered = tl.sort(local * STEP + steps)
        ordered_bins = ordered // STEP
        ordered_slots = chunk * CHUNK + tl.gather(listed % CHUNK, ordered % STEP, 0)
        rows = tl.gather(next_row - (tl.cumsum(counts, 0) - counts), ordered_bins, 0) + steps
        placed = ordered_bins < BINS - 1
        tl.store(positions_ptr + ordered_slots, rows, mask=placed)
        tl.store(slots_ptr + rows, ordered_slots, mask=placed)
        next_row += counts
    num_used = tl.sum(totals, 0)
    for first in range(0, CHUNK, STEP):
        rows = chunk * CHUNK + first + steps
        tl.store(slots_ptr + rows, -1, mask=(rows >= num_used) & (rows < N))


@triton.jit
def _write_schedule(expert, totals_ptr, offsets_ptr, blocks_ptr, num_entries, E, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes one expert's offset and entries; as expert E, the last offset, row 0 and the entries left over."""
    first_row = 0
    first = 0
    for first_bin in range(0, expert, BINS):
        bins = first_bin + tl.arange(0, BINS)
        totals = tl.load(totals_ptr + bins, mask=bins < expert, other=0)
        first_row += tl.sum(totals, 0)
        first += tl.sum(tl.cdiv(totals, ROWS_PER_ENTRY), 0)
    tl.store(offsets_ptr + expert, first_row)
    num_rows = tl.load(totals_ptr + expert, mask=expert < E, other=0)
    write_entries(blocks_ptr, expert, first_row, num_rows, first, num_entries, E, BLOCK)


@triton.jit
def write_entries(blocks_ptr, expert, first_row, num_rows, first, num_entries, E, BLOCK: tl.constexpr):
    """Writes the entries of one expert's rows, from entry ``first`` on; as expert E, row 0 and the entries left over."""
    is_last = expert == E
    count = tl.cdiv(num_rows, ROWS_PER_ENTRY)
    if is_last:
        tl.store(blocks_ptr, first)
        tl.store(blocks_ptr + 1, 0)
        count = (num_entries - first).to(tl.int32)
    for block in range(0, count, BLOCK):
        index = block + tl.arange(0, BLOCK)
        pair_ptrs = blocks_ptr + 2 * (1 + first + index)
        tl.store(pair_ptrs, tl.where(is_last, -1, expert), mask=index < count)
        tl.store(pair_ptrs + 1, tl.where(is_last, 0, first_row + index * ROWS_PER_ENTRY), mask=index < count)


@triton.jit(do_not_specialize=["N", "num_chunks", "num_entries"])
def _place_kernel(
    experts_ptr, counts_ptr, totals_ptr, listed_ptr, slots_ptr, offsets_ptr, positions_ptr, blocks_ptr,
    N, num_chunks, num_entries, E, row_bins,
    stride_t, stride_k,
    TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program <= E:
        _write_schedule(program, totals_ptr, offsets_ptr, blocks_ptr, num_entries, E, BINS, STEP)
    elif listed_ptr is not None:
        _place_listed(
            (program - E - 1).to(tl.int32),
            counts_ptr, totals_ptr, listed_ptr, slots_ptr, positions_ptr,
            N, num_chunks, E, row_bins, BINS, CHUNK, STEP,
        )  # fmt: skip
    else:
        _place_chunk(
            ((program - E - 1) % num_chunks).to(tl.int32), ((program - E - 1) // num_chunks).to(tl.int32),
            experts_ptr, counts_ptr, totals_ptr, slots_ptr, positions_ptr,
            N, E, row_bins, stride_t, stride_k, TOP_K, BINS, CHUNK, STEP,
        )  # fmt: skip


def _chunk_size(num_experts: int, top_k: int) -> tuple[int, bool]:
    """The slots of a chunk, and whether its used ones are listed."""
    config = choose_dispatch(num_experts)
    lists = top_k > _FEW_SLOTS and num_experts + 1 <= config.bins - 1
    return max(config.chunk, _LISTED_TOKENS * triton.next_power_of_2(top_k)) if lists else config.chunk, lists


def _launch_counts(
    experts_TK: Tensor, num_experts: int, listed: Tensor | None = None, positions_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The slots of each bin before each chunk, row after row, and the slots of each bin.

    Args:
        listed: written if given: how many used slots each chunk has, and behind these numbers the slots of each.
        positions_TK: given with it: -1 is written to unused slots.
    """
    T, top_k = experts_TK.shape
    N = T * top_k
    config = choose_dispatch(num_experts)
    chunk, _ = _chunk_size(num_experts, top_k)
    num_chunks = N // chunk + 1
    # One-dimensional: whether a symbolic axis is 1 would be asked, and guarded on, for any second one.
    row_bins = ceil_div(num_experts + 1, _SCAN_BINS) * _SCAN_BINS
    counts = experts_TK.new_empty(num_chunks * row_bins, dtype=torch.int32)
    totals = experts_TK.new_empty(num_experts + 1, dtype=torch.int32)
    launch(
        _count_kernel,
        num_chunks * ceil_div(num_experts + 1, config.bins - 1),
        experts_TK, counts, listed, positions_TK,
        N, num_chunks, num_experts, row_bins,
        *experts_TK.stride(),
        TOP_K=top_k, BINS=config.bins, CHUNK=chunk, STEP=min(chunk, _COUNT_STEP),
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    launch(
        _scan_kernel,
        row_bins // _SCAN_BINS,
        counts, totals,
        num_chunks, num_experts, row_bins,
        BLOCK=_SCAN_BLOCK, BINS=_SCAN_BINS,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return counts, totals


def launch_expert_counts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """The slots of each expert, int32, ``[E]``; arguments as for ``launch_dispatch``."""
    _, totals = _launch_counts(experts_TK, num_experts)
    return totals.narrow(0, 0, num_experts)


def launch_dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dispatch`` on CUDA: slots grouped by expert, and the schedule of row blocks; contiguous."""
    T, top_k = experts_TK.shape
    N = T * top_k
    num_entries = N // ROW_BLOCK + num_experts

    def new_ints(*shape):
        return experts_TK.new_empty(shape, dtype=torch.int32)

    outputs = slots_N, offsets_E1, positions_TK, blocks_B2 = (
        new_ints(N),
        new_ints(num_experts + 1),
        new_ints(T, top_k),
        new_ints(num_entries + 1, 2),
    )
    if has_few_slots(experts_TK, num_experts):
        launch_few_slots(experts_TK, num_experts, *outputs)
        return outputs
    config = choose_dispatch(num_experts)
    chunk, lists = _chunk_size(num_experts, top_k)
    num_chunks = N // chunk + 1
    num_windows = ceil_div(num_experts + 1, config.bins - 1)
    listed = new_ints(num_chunks * (chunk + 1)) if lists else None
    counts, totals = _launch_counts(experts_TK, num_experts, listed, positions_TK if lists else None)
    launch(
        _place_kernel,
        num_experts + 1 + num_chunks * num_windows,
        experts_TK, counts, totals, listed, slots_N, offsets_E1, positions_TK, blocks_B2,
        N, num_chunks, num_entries, num_experts,
        ceil_div(num_experts + 1, _SCAN_BINS) * _SCAN_BINS,
        *experts_TK.stride(),
        TOP_K=top_k, BINS=config.bins, CHUNK=chunk, STEP=config.step,
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return outputs
