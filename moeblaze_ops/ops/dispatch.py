"""``moeblaze::dispatch``: which expert gets which token, as four small index tensors."""

import torch
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.arguments.validation import check_dispatch, require, schedule_rows
from moeblaze_ops.cpu import dispatch as cpu_routing
from moeblaze_ops.ops.register import number_of_data, register_op, register_plain_op


def _dispatch_fake(experts_TK: Tensor, num_experts: int, check_ids: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, K = experts_TK.shape
    slots_N = experts_TK.new_empty(T * K, dtype=torch.int32)
    offsets_E1 = experts_TK.new_empty(num_experts + 1, dtype=torch.int32)
    positions_TK = experts_TK.new_empty((T, K), dtype=torch.int32)
    blocks_B2 = experts_TK.new_empty((schedule_rows(T * K, num_experts), 2), dtype=torch.int32)
    return slots_N, offsets_E1, positions_TK, blocks_B2


def _dispatch_cpu(experts_TK: Tensor, num_experts: int, check_ids: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if check_ids or config.check_expert_ids:
        _check_ids(experts_TK, num_experts)
    return cpu_routing.dispatch(experts_TK, num_experts)


def _dispatch_launcher():
    from moeblaze_ops.kernels.routing.dispatch import launch_dispatch

    def launch(experts_TK: Tensor, num_experts: int, check_ids: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if config.check_expert_ids:
            _check_ids(experts_TK, num_experts)
        return launch_dispatch(experts_TK, num_experts)

    return launch


def _check_ids(experts_TK: Tensor, num_experts: int) -> None:
    if experts_TK.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(experts_TK))
    rule = f"hold expert ids below num_experts={num_experts}, or -1 for an unused slot"
    require(smallest >= -1, "dispatch", "experts_TK", rule, smallest)
    require(largest < num_experts, "dispatch", "experts_TK", rule, largest)


dispatch = register_op(
    "dispatch",
    "(Tensor experts_TK, SymInt num_experts, bool check_ids=False) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_dispatch_fake,
    cpu=_dispatch_cpu,
    launcher=_dispatch_launcher,
    check=lambda op, experts_TK, num_experts, check_ids=False: check_dispatch(op, experts_TK, num_experts),
    backward=lambda ctx, *gradients: (None, None, None),
)
"""Sort the routed slots by expert, stably, without a sort, an atomic or a host sync.

Args:
    experts_TK: expert id of each token's choices. Shape [T, K], int32 or int64, any strides, T may be 0.
        An id outside [0, E) marks an unused slot.
    num_experts: E, 1 to 4096.
    check_ids: on a CPU, raise for ids outside [0, E) other than -1. On CUDA that would make the host wait for the device, and
        ``config.check_expert_ids`` asks for it; the same on a CPU without ``check_ids``.

Returns:
    slots_N: slots ``t * K + k`` in expert order, in slot order inside an expert; -1 after the last used one.
    offsets_E1: expert e owns rows ``offsets_E1[e]`` to ``offsets_E1[e + 1]``.
    positions_TK: the row of each slot, -1 when unused.
    blocks_B2: the schedule of the GEMM kernels. Row 0 is (number of blocks, 0); the next rows are
        (expert, first row) of every 128-row block; the rest is (-1, 0).
    All int32. Two runs agree bit for bit.

Raises:
    ValueError: wrong shape, or an id that is to be checked and wrong. TypeError: ids are not int32 or int64.
"""


def _used_slots(slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
    return slots_N[: int(offsets_E1[-1])].clone()


def _used_slots_fake(slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
    if isinstance(slots_N.shape[0], int) and slots_N.shape[0] == 0:
        return torch.empty_like(slots_N)
    count = number_of_data()
    torch._check(count <= slots_N.shape[0])
    return slots_N.new_empty(count)


used_slots = register_plain_op("used_slots", "(Tensor slots_N, Tensor offsets_E1) -> Tensor", _used_slots, _used_slots_fake)
"""The slots of ``dispatch`` that are used: as many as ``offsets_E1`` ends with, which the host reads."""
