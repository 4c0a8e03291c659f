"""Gradients of weights and biases on a CPU through ATen: sums over the rows of one expert after another."""

import torch
from torch import Tensor

from moeblaze_ops.arguments.weight_storage import up_halves
from moeblaze_ops.cpu.rows import row_weights, segments, sum_dtype


def expert_weight_grad(
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    like: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
) -> list[Tensor]:
    gradients = [torch.empty_like(w, device=gathered_TD.device) for w in like]
    halves = gradients if gradients[0].dim() == 3 else up_halves(gradients)
    tokens_N = slots_N // top_k
    for expert, rows in segments(offsets_E1, slots_N.shape[0], with_empty=True):
        gathered_rows = gathered_TD.index_select(0, tokens_N[rows])
        scale = row_weights(weights_TK, slots_N[rows])
        for g, half in enumerate(halves):
            grouped_rows = grouped_NGF[rows, g]
            if scale is not None:
                grouped_rows = (grouped_rows * scale).to(grouped_NGF.dtype)
            _mm_into(half[expert], grouped_rows.t(), gathered_rows)
    return gradients


def expert_weight_grad_add(
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    dw: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    fresh_E: Tensor | None = None,
    order_E1: Tensor | None = None,
    early: bool = False,
) -> None:
    """What is added up comes expert by expert: ``order_E1`` and ``early`` are for programs that share the work."""
    halves = dw if dw[0].dim() == 3 else up_halves(dw)
    tokens_N = slots_N // top_k
    for expert in [] if fresh_E is None else fresh_E.nonzero().view(-1).tolist():
        for half in halves:
            half[expert].zero_()
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        gathered_rows = gathered_TD.index_select(0, tokens_N[rows]).to(sum_dtype(gathered_TD))
        scale = row_weights(weights_TK, slots_N[rows])
        for g, half in enumerate(halves):
            grouped_rows = grouped_NGF[rows, g]
            if scale is not None:
                grouped_rows = (grouped_rows * scale).to(grouped_NGF.dtype)
            half[expert] += grouped_rows.t().to(gathered_rows.dtype) @ gathered_rows


def expert_bias_grad(
    rows_NC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> Tensor:
    gradient_EC = rows_NC.new_empty(offsets_E1.shape[0] - 1, rows_NC.shape[1])
    for expert, rows in segments(offsets_E1, slots_N.shape[0], with_empty=True):
        gradient_EC[expert] = _bias_sum(rows_NC, weights_TK, slots_N[rows], rows, top_k, gathered)
    return gradient_EC


def expert_bias_grad_add(
    rows_NC: Tensor,
    db_EC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> None:
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        db_EC[expert] += _bias_sum(rows_NC, weights_TK, slots_N[rows], rows, top_k, gathered)


def _bias_sum(rows_NC: Tensor, weights_TK: Tensor | None, slots: Tensor, rows: slice, top_k: int, gathered: bool) -> Tensor:
    """The weighted sum of one expert's rows, in the dtype of sums. Shape [C]."""
    values = rows_NC.index_select(0, slots // top_k) if gathered else rows_NC[rows]
    values = values.to(sum_dtype(rows_NC))
    scale = row_weights(weights_TK, slots)
    return (values if scale is None else values * scale).sum(0)


def _mm_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, written in place whichever of out's axes is contiguous."""
    if out.stride(0) == 1 and out.stride(1) != 1:
        torch.mm(right.t(), left.t(), out=out.t())
    else:
        torch.mm(left, right, out=out)
