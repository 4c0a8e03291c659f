"""The routing on a CPU through ATen: slots sorted by expert, and the schedule of row blocks."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import schedule_rows
from moeblaze_ops.kernels.configs import ROW_BLOCK


def dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_N = experts_TK.reshape(-1)
    num_slots = ids_N.shape[0]
    # Unused slots come last, as rows of one more expert.
    key_N = ids_N.clamp(-1, num_experts).remainder_(num_experts + 1)
    order_N = torch.argsort(key_N, stable=True)
    offsets = [0, *accumulate(torch.bincount(key_N, minlength=num_experts + 1).tolist()[:num_experts])]
    num_used = offsets[-1]
    positions_N = order_N.new_empty(num_slots, dtype=torch.int32)
    positions_N[order_N] = torch.arange(num_slots, dtype=torch.int32)
    slots_N = order_N.to(torch.int32)
    if num_used < num_slots:
        positions_N[order_N[num_used:]] = -1
        slots_N[num_used:] = -1
    blocks_B2 = _block_schedule(offsets, num_slots)
    return slots_N, torch.tensor(offsets, dtype=torch.int32), positions_N.view(experts_TK.shape), blocks_B2


def range_routing(offsets_E1: Tensor, rows: range, is_last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The routing of a range of rows, as ``launch_range_routing`` gives it."""
    inside_E1 = offsets_E1.clamp(rows.start, rows.stop) - rows.start
    begins_E = offsets_E1[:-1]
    # Experts without rows may begin behind the last row.
    fresh_E = (begins_E >= rows.start) & ((begins_E < rows.stop) | is_last)
    work_E = 2 * inside_E1.diff() + fresh_E
    order_E1 = torch.cat([work_E.argsort(descending=True, stable=True), (work_E > 0).sum().view(1)])
    return inside_E1, _block_schedule(inside_E1.tolist(), len(rows)), fresh_E.int(), order_E1.int()


def _block_schedule(offsets: list[int], num_slots: int) -> Tensor:
    blocks = [(expert, row) for expert, (start, end) in enumerate(pairwise(offsets)) for row in range(start, end, ROW_BLOCK)]
    unused = [(-1, 0)] * (schedule_rows(num_slots, len(offsets) - 1) - 1 - len(blocks))
    return torch.tensor([(len(blocks), 0), *blocks, *unused], dtype=torch.int32)
