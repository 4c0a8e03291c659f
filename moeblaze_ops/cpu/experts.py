"""CPU implementations of the ops through ATen: experts one after another, no buffer of shape [N, D].

Rows past the last used one (unused slots) are zero. Half-precision sums over a token's experts are taken in
fp32, in expert order; every result is the same bit for bit from run to run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.activations import IDENTITY, activate, activation_gradient
from moeblaze_ops.arguments.weight_storage import bias_halves, up_halves, up_shape
from moeblaze_ops.cpu.rows import row_weights, segments, sum_dtype


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
    up = _UpRows(x_TD, w_up, b_up, weights_TK, slots_N, positions_TK.shape[1])
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        up.write(h_NGF[rows], expert, rows)
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
    (w_EFD,) = w_down
    sums_TD = h_NGF.new_zeros(positions_TK.shape[0], w_EFD.shape[2], dtype=sum_dtype(h_NGF))
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        a_rows = activate(h_NGF[rows], activation) if a_NF is None else a_NF[rows]
        _add_outputs(sums_TD, a_rows, w_EFD, b_down, weights_TK, slots_N[rows], positions_TK.shape[1], expert)
    return sums_TD.to(h_NGF.dtype)


def expert_mlp(
    x_TD: Tensor,
    w_up: list[Tensor],
    b_up: list[Tensor],
    w_down: list[Tensor],
    b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    activation: str,
    weight_on_input: bool,
) -> Tensor:
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    (w_EFD,) = w_down
    sums_TD = x_TD.new_zeros(positions_TK.shape[0], w_EFD.shape[2], dtype=sum_dtype(x_TD))
    up = _UpRows(x_TD, w_up, b_up, on_input, slots_N, positions_TK.shape[1])
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        h_rows = up.write(up.empty_rows(rows), expert, rows)
        a_rows = activate(h_rows, activation)
        _add_outputs(sums_TD, a_rows, w_EFD, b_down, on_output, slots_N[rows], positions_TK.shape[1], expert)
    return sums_TD.to(x_TD.dtype)


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
    dh_NGF = torch.empty_like(h_NGF, memory_format=torch.contiguous_format)
    dweights_TK = _weight_gradient_buffer(weights_TK, positions_TK)
    wa_NF = h_NGF.new_empty(h_NGF.shape[0], h_NGF.shape[2])
    down = _DownGradients(dout_TD, wa_NF, w_down, b_down, weights_TK, slots_N, dweights_TK)
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        down.write(dh_NGF[rows], h_NGF[rows], expert, rows, activation)
    _zero_unused_rows(offsets_E1, dh_NGF, down.wa_NF)
    return dh_NGF, down.dweights_TK, down.wa_NF


def expert_mlp_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    w_up: list[Tensor],
    b_up: list[Tensor],
    w_down: list[Tensor],
    b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    activation: str,
    weight_on_input: bool,
    dweights_TK: Tensor | None = None,
    first_row: int = 0,
    dh_NGF: Tensor | None = None,
    wa_NF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``launch_expert_mlp_backward``: of all rows, or of those from ``first_row`` on that the slots are of."""
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    shape = up_shape(w_up)
    if dh_NGF is None:
        dh_NGF = x_TD.new_empty(slots_N.shape[0], shape.G, shape.F)
    if wa_NF is None:
        wa_NF = x_TD.new_empty(slots_N.shape[0], shape.F)
    up = _UpRows(x_TD, w_up, b_up, on_input, slots_N, positions_TK.shape[1])
    if dweights_TK is None:
        dweights_TK = _weight_gradient_buffer(on_output, positions_TK)
    elif first_row == 0:
        dweights_TK.zero_()
    down = _DownGradients(dout_TD, wa_NF, w_down, b_down, on_output, slots_N, dweights_TK)
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        h_rows = up.write(dh_NGF[rows], expert, rows)
        down.write(dh_NGF[rows], h_rows, expert, rows, activation)
    _zero_unused_rows(offsets_E1, dh_NGF, down.wa_NF)
    return dh_NGF, down.dweights_TK, down.wa_NF


def expert_up_backward(
    dh_NGF: Tensor,
    x_TD: Tensor | None,
    w_up: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    dlogits_TE: Tensor | None = None,
    w_router_ED: Tensor | None = None,
    max_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    dweights_TK = _weight_gradient_buffer(weights_TK, positions_TK)
    dx_TD = _up_backward_sums(dh_NGF, x_TD, w_up, weights_TK, slots_N, offsets_E1, positions_TK, dweights_TK)
    if dlogits_TE is not None:
        dx_TD += dlogits_TE.to(dx_TD.dtype) @ w_router_ED.to(dx_TD.dtype)
    return dx_TD.to(dh_NGF.dtype), dweights_TK


def expert_up_backward_part(
    dh_NGF: Tensor,
    x_TD: Tensor | None,
    w_up: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    blocks_B2: Tensor,
    dx_TD: Tensor,
    dweights_TK: Tensor,
    rows: range,
    max_bytes: int,
    early: bool,
) -> Callable[[], None]:
    """``expert_up_backward`` of some of the rows: dx is written by the first ones, else added to; nothing is left to do."""
    sums_TD = _up_backward_sums(dh_NGF, x_TD, w_up, weights_TK, slots_N, offsets_E1, positions_TK, dweights_TK)
    dx_TD.copy_(sums_TD.add_(dx_TD) if rows.start > 0 else sums_TD)
    return lambda: None


def _up_backward_sums(
    dh_NGF: Tensor,
    x_TD: Tensor | None,
    w_up: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    dweights_TK: Tensor,
) -> Tensor:
    """The gradient of the tokens in the dtype of sums; fills what the rows give of dweights."""
    T, K = positions_TK.shape
    dx_TD = dh_NGF.new_zeros(T, up_shape(w_up).D, dtype=sum_dtype(dh_NGF))
    halves = up_halves(w_up)
    for expert, rows in segments(offsets_E1, slots_N.shape[0]):
        dx_rows: Any = sum((dh_NGF[rows, g] @ half[expert]).to(dx_TD.dtype) for g, half in enumerate(halves))
        tokens = slots_N[rows] // K
        if weights_TK is not None:
            dscale = (dx_rows * x_TD.index_select(0, tokens)).sum(1)
            dweights_TK.view(-1)[slots_N[rows].long()] = dscale.to(dweights_TK.dtype)
            dx_rows = dx_rows * row_weights(weights_TK, slots_N[rows])
        dx_TD.index_add_(0, tokens, dx_rows)
    return dx_TD


class _UpRows:
    """The up projection, one expert's rows at a time."""

    def __init__(
        self,
        x_TD: Tensor,
        w_up: list[Tensor],
        b_up: list[Tensor],
        weights_TK: Tensor | None,
        slots_N: Tensor,
        top_k: int,
    ) -> None:
        self.x_TD, self.weights_TK, self.slots_N, self.top_k = x_TD, weights_TK, slots_N, top_k
        self.shape, self.halves, self.biases = up_shape(w_up), up_halves(w_up), bias_halves(b_up)

    def empty_rows(self, rows: slice) -> Tensor:
        return self.x_TD.new_empty(rows.stop - rows.start, self.shape.G, self.shape.F)

    def write(self, h_rows: Tensor, expert: int, rows: slice) -> Tensor:
        """Fill h_rows, [rows, G, F], with the pre-activation of ``expert``'s rows, and return it."""
        slots = self.slots_N[rows]
        x_rows = self.x_TD.index_select(0, slots // self.top_k)
        scale = row_weights(self.weights_TK, slots)
        for g, half in enumerate(self.halves):
            half_rows = torch.mm(x_rows, half[expert].t(), out=h_rows[:, g])
            if scale is not None:
                half_rows.mul_(scale)
            if self.biases:
                half_rows.add_(self.biases[g][expert])
        return h_rows


def _add_outputs(
    sums_TD: Tensor,
    a_rows: Tensor,
    w_EFD: Tensor,
    b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots: Tensor,
    top_k: int,
    expert: int,
) -> None:
    """Add the weighted outputs of one expert's rows to their tokens."""
    y_rows = (a_rows @ w_EFD[expert]).to(sums_TD.dtype)
    if b_down:
        y_rows += b_down[0][expert]
    scale = row_weights(weights_TK, slots)
    if scale is not None:
        y_rows *= scale
    sums_TD.index_add_(0, slots // top_k, y_rows)


class _DownGradients:
    """The gradients of the down projection, one expert's rows at a time."""

    def __init__(
        self,
        dout_TD: Tensor,
        wa_NF: Tensor,
        w_down: list[Tensor],
        b_down: list[Tensor],
        weights_TK: Tensor | None,
        slots_N: Tensor,
        dweights_TK: Tensor,
    ) -> None:
        self.dout_TD, self.w_EFD, self.b_down, self.weights_TK = dout_TD, w_down[0], b_down, weights_TK
        self.slots_N, self.top_k, self.dweights_TK = slots_N, dweights_TK.shape[1], dweights_TK
        self.wa_NF = wa_NF

    def write(self, dh_rows: Tensor, h_rows: Tensor, expert: int, rows: slice, activation: str) -> None:
        """Fill the rows of dh (which may be h's own memory), wa and dweights that belong to ``expert``."""
        slots = self.slots_N[rows]
        dout_rows = self.dout_TD.index_select(0, slots // self.top_k)
        da_rows = (dout_rows @ self.w_EFD[expert].t()).to(sum_dtype(h_rows))
        a_rows = activate(h_rows, activation)
        if self.weights_TK is not None:
            scale = row_weights(self.weights_TK, slots)
            dscale = (da_rows * a_rows).sum(1)
            if self.b_down:
                dscale += (dout_rows.to(dscale.dtype) * self.b_down[0][expert]).sum(1)
            self.dweights_TK.view(-1)[slots.long()] = dscale.to(self.dweights_TK.dtype)
            da_rows, a_rows = da_rows * scale, a_rows * scale
        self.wa_NF[rows] = a_rows.to(self.wa_NF.dtype)
        dh_rows.copy_(activation_gradient(da_rows, h_rows, activation))


def _weight_gradient_buffer(weights_TK: Tensor | None, positions_TK: Tensor) -> Tensor:
    if weights_TK is None:
        return torch.empty(0, positions_TK.shape[1])
    return torch.zeros(positions_TK.shape, dtype=weights_TK.dtype)


def _zero_unused_rows(offsets_E1: Tensor, *buffers: Tensor) -> None:
    for buffer in buffers:
        buffer[int(offsets_E1[-1]) :].zero_()


