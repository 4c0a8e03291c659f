"""Gradients of weights and biases on a CPU through ATen: sums over the rows of one expert after another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moeblaze_ops.arguments.weight_storage import up_halves
from moeblaze_ops.cpu.rows import RowBlock, of_each, row_blocks, row_tokens, row_weights, sum_dtype


def expert_weight_grad(
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    like: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
) -> list[Tensor]:
    gradients = [_empty_like(w) for w in like]
    halves = [half.unbind(0) for half in _halves(gradients)]
    sides = _Sides(gathered_TD, grouped_NGF, weights_TK, slots_N, top_k)
    for block in row_blocks(offsets_E1, slots_N.shape[0], gathered_TD.shape[1]):
        gathered = sides.gathered(block)
        for g, half in enumerate(halves):
            parts = zip(half[block.experts], sides.grouped(g, block), gathered, strict=True)
            for gradient, grouped_rows, gathered_rows in parts:
                _mm_into(gradient, grouped_rows.t(), gathered_rows)
    return gradients


def expert_weight_grad_add(
    gathered_TD: Tensor, grouped_NGF: Tensor, dw: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, top_k: int,
    fresh_E: Tensor | None = None, order_E1: Tensor | None = None, early: bool = False,
) -> None:  # fmt: skip
    """What is added up comes expert by expert: ``order_E1`` and ``early`` are for programs that share the work."""
    halves = [half.unbind(0) for half in _halves(dw)]
    for expert in [] if fresh_E is None else fresh_E.nonzero().view(-1).tolist():
        for half in halves:
            half[expert].zero_()
    sides = _Sides(gathered_TD, grouped_NGF, weights_TK, slots_N, top_k)
    wide = sum_dtype(gathered_TD)
    for block in row_blocks(offsets_E1, slots_N.shape[0], gathered_TD.shape[1]):
        gathered = sides.gathered(block)
        for g, half in enumerate(halves):
            parts = zip(half[block.experts], sides.grouped(g, block), gathered, block.sizes, strict=True)
            for gradient, grouped_rows, gathered_rows, size in parts:
                if size == 0:
                    continue
                if gradient.dtype == wide == gathered_rows.dtype:
                    gradient.addmm_(grouped_rows.t(), gathered_rows)
                else:
                    gradient += grouped_rows.t().to(wide) @ gathered_rows.to(wide)


class _Sides:
    """The two sides of a weight gradient, the rows of a block at a time: one tensor for each of its experts."""

    def __init__(self, gathered_TD: Tensor, grouped_NGF: Tensor, weights_TK: Tensor | None, slots_N: Tensor, top_k: int) -> None:
        self.gathered_TD, self.grouped_NGF, self.weights_TK = gathered_TD, grouped_NGF, weights_TK
        self.slots_N, self.tokens_N = slots_N, row_tokens(slots_N, top_k)

    def gathered(self, block: RowBlock) -> Sequence[Tensor]:
        return of_each(self.gathered_TD.index_select(0, self.tokens_N[block.rows]), block)

    def grouped(self, g: int, block: RowBlock) -> Sequence[Tensor]:
        grouped_rows = self.grouped_NGF[block.rows, g]
        scale = row_weights(self.weights_TK, self.slots_N[block.rows])
        if scale is not None:
            grouped_rows = (grouped_rows * scale).to(self.grouped_NGF.dtype)
        return of_each(grouped_rows, block)


def expert_bias_grad(
    rows_NC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> Tensor:
    return _bias_sums(rows_NC, weights_TK, slots_N, offsets_E1, top_k, gathered).to(rows_NC.dtype)


def expert_bias_grad_add(
    rows_NC: Tensor,
    db_EC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> None:
    db_EC += _bias_sums(rows_NC, weights_TK, slots_N, offsets_E1, top_k, gathered)


def _bias_sums(
    rows_NC: Tensor, weights_TK: Tensor | None, slots_N: Tensor, offsets_E1: Tensor, top_k: int, gathered: bool
) -> Tensor:
    """The weighted sums of the rows of each expert, in the dtype of sums. Shape [E, C]."""
    sums_EC = rows_NC.new_empty(offsets_E1.shape[0] - 1, rows_NC.shape[1], dtype=sum_dtype(rows_NC))
    for block in row_blocks(offsets_E1, slots_N.shape[0], rows_NC.shape[1]):
        slots = slots_N[block.rows]
        values = rows_NC.index_select(0, row_tokens(slots, top_k)) if gathered else rows_NC[block.rows]
        scale = row_weights(weights_TK, slots)
        values = values.to(sums_EC.dtype) if scale is None else values * scale
        for rows, total in zip(of_each(values, block), sums_EC[block.experts].unbind(0), strict=True):
            torch.sum(rows, 0, out=total)
    return sums_EC


def _empty_like(w: Tensor) -> Tensor:
    # empty_like of the shape of experts stored apart, a dense tensor without memory, would go through Python.
    return torch.empty_strided(w.shape, w.stride(), dtype=w.dtype) if w.is_meta else torch.empty_like(w)


def _halves(gradients: list[Tensor]) -> list[Tensor]:
    return gradients if gradients[0].dim() == 3 else up_halves(gradients)


def _mm_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, written in place whichever of out's axes is contiguous."""
    if out.stride(0) == 1 and out.stride(1) != 1:
        torch.mm(right.t(), left.t(), out=out.t())
    else:
        torch.mm(left, right, out=out)
