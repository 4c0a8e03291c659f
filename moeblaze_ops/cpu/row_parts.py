"""The ops of ``experts`` part by part, by the tokens that rows are of, as the launchers of a GPU take ``parts``."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ops.cpu import experts
from moeblaze_ops.kernels.formulas.named import IDENTITY

ColumnSums = Callable[[int, int], Iterator[tuple[int, Tensor]]]
"""Of the first column and their number, where sums of tokens are written: the first token, and its sums and those behind."""


class RowPart(NamedTuple):
    """Some rows of each expert, by their numbers, and the routing of these rows alone."""

    rows_R: Tensor
    slots_R: Tensor
    offsets_E1: Tensor


def row_part(slots_N: Tensor, offsets_E1: Tensor, slots: range) -> RowPart:
    """The rows of the tokens whose slots are in a range."""
    rows_R = ((slots_N >= slots.start) & (slots_N < slots.stop)).nonzero().squeeze(1)
    return RowPart(rows_R, slots_N[rows_R], torch.searchsorted(rows_R, offsets_E1.long()).int())


def expert_up(*operands: Any, store_h: bool, parts: Iterable[RowPart] | None) -> tuple[Tensor, Tensor]:
    """``operands``: those of ``expert_up`` up to the activation."""
    x_TD, w_up, b_up, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation = operands
    _, G, F, _ = w_up[0].shape
    N = slots_N.shape[0]
    h_NGF = x_TD.new_zeros(N if store_h else 0, G * len(w_up), F)
    a_NF = x_TD.new_zeros(0 if activation == IDENTITY else N, F)
    for rows_R, slots_R, bounds in _parts_of(slots_N, offsets_E1, parts):
        routing = (slots_R, bounds, positions_TK, blocks_B2)
        h_rows, a_rows = experts.expert_up(x_TD, w_up, b_up, weights_TK, *routing, activation)
        if store_h:
            h_NGF[rows_R] = h_rows
        if activation != IDENTITY:
            a_NF[rows_R] = a_rows
    return h_NGF, a_NF


def expert_down_backward(*operands: Any, parts: Iterable[RowPart] | None) -> tuple[Tensor, Tensor, Tensor]:
    """``operands``: those of ``expert_down_backward`` up to the activation."""
    dout_TD, h_NGF, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation = operands
    dh_NGF, wa_NF = torch.zeros_like(h_NGF), h_NGF.new_zeros(h_NGF.shape[0], h_NGF.shape[2])
    dweights_TK = torch.zeros_like(positions_TK if weights_TK is None else weights_TK, dtype=torch.float32)
    for rows_R, slots_R, bounds in _parts_of(slots_N, offsets_E1, parts):
        routing = (slots_R, bounds, positions_TK, blocks_B2)
        given = (dout_TD, h_NGF[rows_R], w_down, b_down, weights_TK, *routing, activation)
        dh_NGF[rows_R], of_weights, wa_NF[rows_R] = experts.expert_down_backward(*given)
        dweights_TK += 0 if weights_TK is None else of_weights
    if weights_TK is None:
        return dh_NGF, dweights_TK[:0], wa_NF
    return dh_NGF, dweights_TK.to(weights_TK.dtype), wa_NF


def _parts_of(slots_N: Tensor, offsets_E1: Tensor, parts: Iterable[RowPart] | None) -> Iterable[RowPart]:
    return [RowPart(torch.arange(slots_N.shape[0]), slots_N, offsets_E1)] if parts is None else parts


def expert_down(h_NGF: Tensor, a_NF: Tensor, *rest: Any, column_sums: ColumnSums) -> None:
    """``rest``: the arguments of ``expert_down`` after a. h may be without rows where it is not what is computed with."""
    a_NF = h_NGF[:, 0] if rest[-1] == IDENTITY else a_NF
    _write(experts.expert_down(a_NF.unsqueeze(1), a_NF, *rest), column_sums)


def expert_up_backward(dh_NGF: Tensor, w_up: list[Tensor], *routing_and_sums: Any) -> None:
    *routing, column_sums = routing_and_sums
    dx_TD, _ = experts.expert_up_backward(dh_NGF, None, w_up, None, *routing)
    _write(dx_TD, column_sums)


def _write(sums_TD: Tensor, column_sums: ColumnSums) -> None:
    """In two turns."""
    D = sums_TD.shape[1]
    for first, end in ((0, D // 2), (D // 2, D)):
        for token, out in column_sums(first, end - first):
            out.copy_(sums_TD[token : token + len(out), first:end])
