"""CPU implementations of the ops through ATen: experts one after another, no buffer of shape [N, D].

Rows past the last used one (unused slots) are zero. Half-precision sums over a token's experts are taken in
fp32, in expert order; every result is the same bit for bit from run to run.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from moeblaze_ops.activations import IDENTITY, activate, activation_gradient
from moeblaze_ops.validation import ROW_BLOCK, schedule_rows
from moeblaze_ops.weights import bias_halves, up_halves, up_shape


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


def expert_up(
    x_TD: Tensor,
    w_up: list[Tensor],
    b_up: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    shape = up_shape(w_up)
    h_NGF = x_TD.new_empty(slots_N.shape[0], shape.G, shape.F)
    a_NF = x_TD.new_empty(0 if activation == IDENTITY else slots_N.shape[0], shape.F)
    tokens_N = slots_N // positions_TK.shape[1]
    halves, biases = up_halves(w_up), bias_halves(b_up)
    for expert, rows in _segments(offsets_E1):
        x_rows = x_TD.index_select(0, tokens_N[rows])
        scale = _row_weights(weights_TK, slots_N[rows])
        for g, half in enumerate(halves):
            h_rows = torch.mm(x_rows, half[expert].t(), out=h_NGF[rows, g])
            if scale is not None:
                h_rows.mul_(scale)
            if biases:
                h_rows.add_(biases[g][expert])
        if activation != IDENTITY:
            a_NF[rows] = activate(h_NGF[rows], activation)
    _zero_unused_rows(offsets_E1, h_NGF, a_NF)
    return h_NGF, a_NF


def expert_down(
    h_NGF: Tensor,
    a_NF: Tensor | None,
    w_down: list[Tensor],
    b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    activation: str,
) -> Tensor:
    T, K = positions_TK.shape
    (w_EFD,) = w_down
    sums_TD = h_NGF.new_zeros(T, w_EFD.shape[2], dtype=_sum_dtype(h_NGF))
    for expert, rows in _segments(offsets_E1):
        a_rows = activate(h_NGF[rows], activation) if a_NF is None else a_NF[rows]
        y_rows = (a_rows @ w_EFD[expert]).to(sums_TD.dtype)
        if b_down:
            y_rows += b_down[0][expert]
        scale = _row_weights(weights_TK, slots_N[rows])
        if scale is not None:
            y_rows *= scale
        sums_TD.index_add_(0, slots_N[rows] // K, y_rows)
    return sums_TD.to(h_NGF.dtype)


def expert_down_backward(
    dout_TD: Tensor,
    h_NGF: Tensor,
    w_down: list[Tensor],
    b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    (w_EFD,) = w_down
    dh_NGF = torch.empty_like(h_NGF, memory_format=torch.contiguous_format)
    wa_NF = h_NGF.new_empty(h_NGF.shape[0], h_NGF.shape[2])
    dweights_TK = _weight_gradient_buffer(weights_TK, positions_TK)
    tokens_N = slots_N // positions_TK.shape[1]
    for expert, rows in _segments(offsets_E1):
        dout_rows = dout_TD.index_select(0, tokens_N[rows])
        da_rows = (dout_rows @ w_EFD[expert].t()).to(_sum_dtype(h_NGF))
        a_rows = activate(h_NGF[rows], activation)
        if weights_TK is not None:
            scale = _row_weights(weights_TK, slots_N[rows])
            dscale = (da_rows * a_rows).sum(1)
            if b_down:
                dscale += (dout_rows.to(dscale.dtype) * b_down[0][expert]).sum(1)
            dweights_TK.view(-1)[slots_N[rows].long()] = dscale.to(dweights_TK.dtype)
            da_rows, a_rows = da_rows * scale, a_rows * scale
        wa_NF[rows] = a_rows.to(wa_NF.dtype)
        dh_NGF[rows] = activation_gradient(da_rows, h_NGF[rows], activation)
    _zero_unused_rows(offsets_E1, dh_NGF, wa_NF)
    return dh_NGF, dweights_TK, wa_NF


def expert_up_backward(
    dh_NGF: Tensor,
    x_TD: Tensor | None,
    w_up: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
) -> tuple[Tensor, Tensor]:
    T, K = positions_TK.shape
    dweights_TK = _weight_gradient_buffer(weights_TK, positions_TK)
    dx_TD = dh_NGF.new_zeros(T, up_shape(w_up).D, dtype=_sum_dtype(dh_NGF))
    halves = up_halves(w_up)
    for expert, rows in _segments(offsets_E1):
        dx_rows = sum((dh_NGF[rows, g] @ half[expert]).to(dx_TD.dtype) for g, half in enumerate(halves))
        tokens = slots_N[rows] // K
        if weights_TK is not None:
            dscale = (dx_rows * x_TD.index_select(0, tokens)).sum(1)
            dweights_TK.view(-1)[slots_N[rows].long()] = dscale.to(dweights_TK.dtype)
            dx_rows = dx_rows * _row_weights(weights_TK, slots_N[rows])
        dx_TD.index_add_(0, tokens, dx_rows)
    return dx_TD.to(dh_NGF.dtype), dweights_TK


def expert_weight_grad(
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    like: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
) -> list[Tensor]:
    gradients = [torch.empty_like(w) for w in like]
    halves = gradients if gradients[0].dim() == 3 else up_halves(gradients)
    tokens_N = slots_N // top_k
    for expert, rows in _segments(offsets_E1, with_empty=True):
        gathered_rows = gathered_TD.index_select(0, tokens_N[rows])
        scale = _row_weights(weights_TK, slots_N[rows])
        for g, half in enumerate(halves):
            grouped_rows = grouped_NGF[rows, g]
            if scale is not None:
                grouped_rows = (grouped_rows * scale).to(grouped_NGF.dtype)
            _mm_into(half[expert], grouped_rows.t(), gathered_rows)
    return gradients


def expert_bias_grad(
    rows_NC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> Tensor:
    gradient_EC = rows_NC.new_empty(offsets_E1.shape[0] - 1, rows_NC.shape[1])
    for expert, rows in _segments(offsets_E1, with_empty=True):
        values = rows_NC.index_select(0, slots_N[rows] // top_k) if gathered else rows_NC[rows]
        values = values.to(_sum_dtype(rows_NC))
        scale = _row_weights(weights_TK, slots_N[rows])
        gradient_EC[expert] = (values if scale is None else values * scale).sum(0)
    return gradient_EC


def _segments(offsets_E1: Tensor, with_empty: bool = False) -> Iterator[tuple[int, slice]]:
    """Each expert and the slice of rows it owns."""
    offsets = offsets_E1.tolist()
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if with_empty or end > start:
            yield expert, slice(start, end)


def _row_weights(weights_TK: Tensor | None, slots: Tensor) -> Tensor | None:
    """The routing weight of each row as a column, in the dtype of the sums."""
    if weights_TK is None:
        return None
    return weights_TK.reshape(-1)[slots.long()].unsqueeze(1).to(_sum_dtype(weights_TK))


def _weight_gradient_buffer(weights_TK: Tensor | None, positions_TK: Tensor) -> Tensor:
    if weights_TK is None:
        return torch.empty(0, positions_TK.shape[1])
    return torch.zeros(positions_TK.shape, dtype=weights_TK.dtype)


def _zero_unused_rows(offsets_E1: Tensor, *buffers: Tensor) -> None:
    for buffer in buffers:
        buffer[int(offsets_E1[-1]) :].zero_()


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _mm_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, written in place whichever of out's axes is contiguous."""
    if out.stride(0) == 1 and out.stride(1) != 1:
        torch.mm(right.t(), left.t(), out=out.t())
    else:
        torch.mm(left, right, out=out)
