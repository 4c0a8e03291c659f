"""The routing on a CPU through ATen: slots sorted by expert, and the schedule of row blocks."""

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import schedule_rows
from moeblaze_ops.kernels.configs import ROW_BLOCK


def dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_N = experts_TK.reshape(-1).long()
    used_N = (ids_N >= 0) & (ids_N < num_experts)
    key_N = torch.where(used_N, ids_N, num_experts)
    order_N = torch.argsort(key_N, stable=True)
    counts_E = torch.bincount(key_N, minlength=num_experts + 1)[:num_experts]
    offsets_E1 = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    num_used = int(offsets_E1[-1])
    positions_N = torch.full_like(ids_N, -1)
    positions_N[order_N[:num_used]] = torch.arange(num_used)
    slots_N = order_N.to(torch.int32)
    slots_N[num_used:] = -1
    blocks_B2 = _block_schedule(offsets_E1, ids_N.numel(), num_experts)
    return slots_N, offsets_E1.int(), positions_N.view(experts_TK.shape).int(), blocks_B2


def range_routing(offsets_E1: Tensor, rows: range, is_last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The routing of a range of rows, as ``launch_range_routing`` gives it."""
    inside_E1 = offsets_E1.clamp(rows.start, rows.stop) - rows.start
    begins_E = offsets_E1[:-1]
    # Experts without rows may begin behind the last row.
    fresh_E = (begins_E >= rows.start) & ((begins_E < rows.stop) | is_last)
    work_E = 2 * inside_E1.diff() + fresh_E
    order_E1 = torch.cat([work_E.argsort(descending=True, stable=True), (work_E > 0).sum().view(1)])
    return inside_E1, _block_schedule(inside_E1, len(rows), begins_E.shape[0]), fresh_E.int(), order_E1.int()


def _block_schedule(offsets_E1: Tensor, num_slots: int, num_experts: int) -> Tensor:
    blocks_E = (offsets_E1.diff() + ROW_BLOCK - 1) // ROW_BLOCK
    experts = torch.repeat_interleave(torch.arange(num_experts), blocks_E)
    first_block_E = blocks_E.cumsum(0) - blocks_E
    within_expert = torch.arange(experts.numel()) - first_block_E[experts]
    schedule = torch.zeros(schedule_rows(num_slots, num_experts), 2, dtype=torch.int32)
    schedule[:, 0] = -1
    schedule[0, 0] = experts.numel()
    schedule[1 : 1 + experts.numel(), 0] = experts.int()
    schedule[1 : 1 + experts.numel(), 1] = (offsets_E1[experts] + ROW_BLOCK * within_expert).int()
    return schedule
