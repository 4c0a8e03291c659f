"""CPU implementations of the ops through ATen: experts in blocks, one product for each of them, no buffer of shape [N, D].

Rows past the last used one (unused slots) are zero. Half-precision sums over a token's experts are taken in
fp32, in expert order; every result is the same bit for bit from run to run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.weight_storage import up_halves, up_shape
from moeblaze_ops.cpu.activations import activate_into, backward_into
from moeblaze_ops.cpu.row_pieces import add_product_of_rows, product_of_rows
from moeblaze_ops.cpu.rows import (
    RowBlock,
    add_biases,
    dots_of_rows,
    matrices,
    multiply,
    of_each,
    row_blocks,
    row_parameters,
    row_tokens,
    row_weights,
    sum_dtype,
    transposed,
)
from moeblaze_ops.cpu.weight_grad import expert_weight_grad
from moeblaze_ops.kernels.eight_bits import packed, unpacked, without_memory
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.kernels.settings import settings


def expert_up(
    x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    u_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None, lora_b_EGFR: Tensor | None = None,
    params_EP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = up_shape(w_up)
    h_NGF = x_TD.new_empty(slots_N.shape[0], shape.G, shape.F)
    a_NF = x_TD.new_empty(0 if activation == IDENTITY else slots_N.shape[0], shape.F)
    up = _UpRows(x_TD, w_up, b_up, weights_TK, slots_N, positions_TK.shape[1], u_NR, lora_b_EGFR)
    blocks = row_blocks(offsets_E1, slots_N.shape[0], shape.F)
    for block in blocks:
        h_rows = up.write(h_NGF[block.rows], block)
        if activation != IDENTITY:
            activate_into(a_NF[block.rows], h_rows, activation, row_parameters(params_EP, block))
    _zero_unused_rows(blocks, h_NGF, a_NF)
    return h_NGF, a_NF


def expert_up_h8(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    h_NGF, a_NF = expert_up(*args)
    return without_memory(h_NGF, h_NGF.shape).zero_(), a_NF, packed(h_NGF)


def expert_down(
    h_NGF: Tensor, a_NF: Tensor | None, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    v_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None, lora_b_ERD: Tensor | None = None,
    params_EP: Tensor | None = None, h8_NGB: Tensor | None = None,
) -> Tensor:  # fmt: skip
    down = _DownRows(h_NGF, w_down, b_down, weights_TK, slots_N, positions_TK, v_NR, lora_b_ERD)
    for block in row_blocks(offsets_E1, slots_N.shape[0], h_NGF.shape[2]):
        params_NP = row_parameters(params_EP, block)
        a_rows = None if a_NF is None else a_NF[block.rows]
        if a_rows is None:
            a_rows = h_NGF.new_empty(block.rows.stop - block.rows.start, h_NGF.shape[2])
            activate_into(a_rows, h_NGF[block.rows], activation, params_NP)
        down.add(a_rows, block)
    return down.sums_TD.to(h_NGF.dtype)


def expert_mlp(
    x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], w_down: list[Tensor], b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str, weight_on_input: bool,
) -> Tensor:  # fmt: skip
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    shape = up_shape(w_up)
    up = _UpRows(x_TD, w_up, b_up, on_input, slots_N, positions_TK.shape[1])
    down = _DownRows(x_TD, w_down, b_down, on_output, slots_N, positions_TK)
    for block in row_blocks(offsets_E1, slots_N.shape[0], shape.F):
        num_rows = block.rows.stop - block.rows.start
        h_rows = up.write(x_TD.new_empty(num_rows, shape.G, shape.F), block)
        a_rows = h_rows[:, 0]
        if activation != IDENTITY:
            a_rows = x_TD.new_empty(num_rows, shape.F)
            activate_into(a_rows, h_rows, activation)
        down.add(a_rows, block)
    return down.sums_TD.to(x_TD.dtype)


def expert_down_backward(
    dout_TD: Tensor, h_NGF: Tensor, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    q_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None,
    params_EP: Tensor | None = None, dparams_EP: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``dparams_EP``, zeros where it is given, gets the gradient of the activation's parameters."""
    if h_NGF.dtype == torch.int8:
        h_NGF = unpacked(h_NGF, w_down[0].shape[1], dout_TD.dtype)
    dh_NGF = torch.empty_like(h_NGF, memory_format=torch.contiguous_format)
    dweights_TK = _weight_gradient_buffer(weights_TK, positions_TK)
    wa_NF = h_NGF.new_empty(h_NGF.shape[0], h_NGF.shape[2])
    down = _DownGradients(dout_TD, wa_NF, w_down, b_down, weights_TK, slots_N, dweights_TK, q_NR, lora_a_ERF)
    blocks = row_blocks(offsets_E1, slots_N.shape[0], h_NGF.shape[2])
    for block in blocks:
        params_NP = row_parameters(params_EP, block)
        dparams_NP = None if params_EP is None else params_EP.new_empty(len(params_NP), params_EP.shape[1])
        down.write(dh_NGF[block.rows], h_NGF[block.rows], block, activation, params_NP, dparams_NP)
        if dparams_NP is not None and dparams_EP is not None:
            dparams_EP[block.experts] = torch.stack([rows.sum(0) for rows in of_each(dparams_NP, block)])
    _zero_unused_rows(blocks, dh_NGF, down.wa_NF)
    return dh_NGF, down.dweights_TK, down.wa_NF


def expert_down_backward_learned(dout_TD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dparams_EP = torch.zeros_like(rest[-1])
    given = (*rest, dparams_EP)
    return *expert_down_backward(dout_TD, *given), dparams_EP


def expert_mlp_backward(
    dout_TD: Tensor, x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], w_down: list[Tensor], b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str, weight_on_input: bool, dweights_TK: Tensor | None = None, first_row: int = 0,
    dh_NGF: Tensor | None = None, wa_NF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
    blocks = row_blocks(offsets_E1, slots_N.shape[0], shape.F)
    for block in blocks:
        h_rows = up.write(dh_NGF[block.rows], block)
        down.write(dh_NGF[block.rows], h_rows, block, activation)
    _zero_unused_rows(blocks, dh_NGF, down.wa_NF)
    return dh_NGF, down.dweights_TK, down.wa_NF


def expert_up_backward(
    dh_NGF: Tensor, x_TD: Tensor | None, w_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    dlogits_TE: Tensor | None = None, w_router_ED: Tensor | None = None, max_bytes: int | None = None,
    du_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dweights_TK = _weight_gradient_buffer(weights_TK, positions_TK)
    routing = (slots_N, offsets_E1, positions_TK)
    dx_TD = _up_backward_sums(dh_NGF, x_TD, w_up, weights_TK, *routing, dweights_TK, du_NR, lora_a_ERD)
    if dlogits_TE is not None:
        parts = dlogits_TE.shape[1] // w_router_ED.shape[0] if w_router_ED.shape[0] else 1
        factors = dlogits_TE.to(dx_TD.dtype), w_router_ED.to(dx_TD.dtype).repeat(parts, 1)
        dx_TD += product_of_rows(*factors)
    return dx_TD.to(dh_NGF.dtype), dweights_TK


def expert_rows(rows_NGF: Tensor, w_EGFC: Tensor, offsets_E1: Tensor, blocks_B2: Tensor) -> Tensor:
    y_NC = rows_NGF.new_zeros(rows_NGF.shape[0], w_EGFC.shape[3])
    parts = list(zip(rows_NGF.unbind(1), map(matrices, w_EGFC.unbind(1)), strict=True))
    for block in row_blocks(offsets_E1, rows_NGF.shape[0], max(w_EGFC.shape[2:])):
        y_NC[block.rows] = _sum_of_products(parts, block, w_EGFC.shape[3])
    return y_NC


def low_rank_backward(
    dy: Tensor, u_NR: Tensor, b: Tensor, weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    like = b.new_empty(b.shape)
    if dy.dim() == 2:
        du_N1R, _ = expert_up(dy, [b.mT.unsqueeze(1)], [], None, slots_N, offsets_E1, positions_TK, blocks_B2, IDENTITY)
        given = (dy, u_NR.unsqueeze(1), [like.mT], weights_TK, slots_N, offsets_E1, positions_TK.shape[1])
        return du_N1R.squeeze(1), expert_weight_grad(*given)[0].mT
    weights_N1 = None if weights_TK is None else weights_TK.reshape(-1, 1).index_select(0, slots_N.clamp(min=0))
    rows_N = torch.arange(slots_N.shape[0], dtype=torch.int32)
    db = expert_weight_grad(u_NR, dy, [like], weights_N1, rows_N, offsets_E1, 1)[0]
    return expert_rows(dy, b, offsets_E1, blocks_B2), db


def expert_up_backward_part(*args: Any, early: bool) -> Callable[[], None]:
    """``expert_up_backward`` of some of the rows: dx is written by the first ones, else added to; nothing is left to do.

    Arguments are those of ``launch_expert_up_backward_part``.
    """
    dh_NGF, x_TD, w_up, weights_TK, slots_N, offsets_E1, positions_TK, _, dx_TD, dweights_TK, rows, _ = args
    sums_TD = _up_backward_sums(dh_NGF, x_TD, w_up, weights_TK, slots_N, offsets_E1, positions_TK, dweights_TK)
    dx_TD.copy_(sums_TD.add_(dx_TD) if rows.start > 0 else sums_TD)
    return lambda: None


def _up_backward_sums(
    dh_NGF, x_TD, w_up, weights_TK, slots_N, offsets_E1, positions_TK, dweights_TK, du_NR=None, lora_a_ERD=None
) -> Tensor:
    """The gradient of the tokens in the dtype of sums; fills what the rows give of dweights."""
    T, K = positions_TK.shape
    D = up_shape(w_up).D
    dx_TD = dh_NGF.new_zeros(T, D, dtype=sum_dtype(dh_NGF))
    parts = [(dh_NGF[:, g], matrices(half)) for g, half in enumerate(up_halves(w_up))]
    if du_NR is not None:
        parts.append((du_NR, matrices(lora_a_ERD)))
    tokens_N = row_tokens(slots_N, K)
    for block in row_blocks(offsets_E1, slots_N.shape[0], D):
        dx_rows = _sum_of_products(parts, block, D)
        tokens = tokens_N[block.rows]
        if weights_TK is not None:
            slots = slots_N[block.rows]
            dscale = dots_of_rows(dx_rows, x_TD.index_select(0, tokens).to(dx_rows.dtype))
            dweights_TK.view(-1).index_copy_(0, slots.long(), dscale.to(dweights_TK.dtype))
            dx_rows *= row_weights(weights_TK, slots)
        dx_TD.index_add_(0, tokens, dx_rows)
    return dx_TD


def _sum_of_products(parts: Sequence[tuple[Tensor, Sequence[Tensor]]], block: RowBlock, width: int) -> Tensor:
    """The products of a block's rows with the matrices of their experts, one for each part, summed in the dtype of sums."""
    lead = parts[0][0][block.rows]
    wide = sum_dtype(lead)
    product = lead.new_empty(lead.shape[0], width)
    sums = product if wide == product.dtype else product.new_zeros(product.shape, dtype=wide)
    for i, (rows, of_experts) in enumerate(parts):
        multiply(rows[block.rows], of_experts, product, block, add=i > 0 and sums is product)
        if sums is not product:
            sums += product
    return sums


class _UpRows:
    """The up projection, the rows of a block at a time."""

    def __init__(self, x_TD, w_up, b_up, weights_TK, slots_N, top_k, u_NR=None, lora_b_EGFR=None) -> None:
        self.x_TD, self.weights_TK, self.slots_N, self.u_NR = x_TD, weights_TK, slots_N, u_NR
        self.tokens_N = row_tokens(slots_N, top_k)
        self.low_rank = [] if lora_b_EGFR is None else [transposed(half) for half in lora_b_EGFR.unbind(1)]
        self.halves, self.biases = [transposed(half) for half in up_halves(w_up)], up_halves(b_up)

    def write(self, h_rows: Tensor, block: RowBlock) -> Tensor:
        """Fill h_rows, [rows, G, F], with the pre-activation of a block, and return it."""
        x_rows = self.x_TD.index_select(0, self.tokens_N[block.rows])
        scale = row_weights(self.weights_TK, self.slots_N[block.rows])
        for g, of_experts in enumerate(self.halves):
            half_rows = h_rows[:, g]
            multiply(x_rows, of_experts, half_rows, block)
            if self.u_NR is not None:
                multiply(self.u_NR[block.rows], self.low_rank[g], half_rows, block, add=True)
            if scale is not None:
                half_rows *= scale
            if self.biases:
                add_biases(half_rows, self.biases[g], block)
        return h_rows


class _DownRows:
    """The weighted sums of the outputs of each token's experts, to which the rows of a block are added at a time."""

    def __init__(self, like, w_down, b_down, weights_TK, slots_N, positions_TK, v_NR=None, lora_b_ERD=None) -> None:
        (w_EFD,) = w_down
        self.v_NR, self.low_rank = v_NR, None if lora_b_ERD is None else matrices(lora_b_ERD)
        self.of_experts, self.b_down, self.weights_TK, self.slots_N = matrices(w_EFD), b_down, weights_TK, slots_N
        self.tokens_N = row_tokens(slots_N, positions_TK.shape[1])
        self.sums_TD = like.new_zeros(positions_TK.shape[0], w_EFD.shape[2], dtype=sum_dtype(like))

    def add(self, a_rows: Tensor, block: RowBlock) -> None:
        y_rows = a_rows.new_empty(a_rows.shape[0], self.sums_TD.shape[1])
        multiply(a_rows, self.of_experts, y_rows, block)
        if self.v_NR is not None:
            multiply(self.v_NR[block.rows], self.low_rank, y_rows, block, add=True)
        y_rows = y_rows.to(self.sums_TD.dtype)
        if self.b_down:
            add_biases(y_rows, self.b_down[0], block)
        scale = row_weights(self.weights_TK, self.slots_N[block.rows])
        if scale is not None:
            y_rows *= scale
        self.sums_TD.index_add_(0, self.tokens_N[block.rows], y_rows)


class _DownGradients:
    """The gradients of the down projection, the rows of a block at a time."""

    def __init__(
        self, dout_TD, wa_NF, w_down, b_down, weights_TK, slots_N, dweights_TK, q_NR=None, lora_a_ERF=None
    ) -> None:
        self.q_NR, self.low_rank = q_NR, None if lora_a_ERF is None else matrices(lora_a_ERF)
        self.dout_TD, self.b_down, self.weights_TK = dout_TD, b_down, weights_TK
        self.slots_N, self.dweights_TK, self.wa_NF = slots_N, dweights_TK, wa_NF
        self.of_experts, self.tokens_N = transposed(w_down[0]), row_tokens(slots_N, dweights_TK.shape[1])

    def write(self, dh_rows, h_rows, block: RowBlock, activation: str, params_NP=None, dparams_NP=None) -> None:
        """Fill the rows of dh (which may be h's own memory), wa, dweights and ``dparams_NP`` that belong to a block."""
        slots = self.slots_N[block.rows]
        dout_rows = self.dout_TD.index_select(0, self.tokens_N[block.rows])
        da_rows = h_rows.new_empty(h_rows.shape[0], h_rows.shape[2])
        multiply(dout_rows, self.of_experts, da_rows, block)
        if self.q_NR is not None:
            multiply(self.q_NR[block.rows], self.low_rank, da_rows, block, add=True)
        scale = row_weights(self.weights_TK, slots)
        wa_rows = self.wa_NF[block.rows]
        dscale = backward_into(dh_rows, wa_rows, da_rows, h_rows, scale, activation, params_NP, dparams_NP)
        if dscale is None:
            return
        if self.b_down:
            self._add_bias_shares(dscale, dout_rows, block)
        self.dweights_TK.view(-1).index_copy_(0, slots.long(), dscale.to(self.dweights_TK.dtype))

    def _add_bias_shares(self, dscale: Tensor, dout_rows: Tensor, block: RowBlock) -> None:
        biases = self.b_down[0].unbind(0)[block.experts]
        for share, rows, bias in zip(of_each(dscale, block), of_each(dout_rows, block), biases, strict=True):
            rows, bias = rows.to(dscale.dtype), bias.to(dscale.dtype)
            if settings().batch_invariant:
                add_product_of_rows(share.unsqueeze(1), rows, bias.unsqueeze(1))
            else:
                share.addmv_(rows, bias)


def _weight_gradient_buffer(weights_TK: Tensor | None, positions_TK: Tensor) -> Tensor:
    if weights_TK is None:
        return torch.empty(0, positions_TK.shape[1])
    return torch.zeros(positions_TK.shape, dtype=weights_TK.dtype)


def _zero_unused_rows(blocks: list[RowBlock], *buffers: Tensor) -> None:
    num_used = blocks[-1].rows.stop
    for buffer in buffers:
        if num_used < buffer.shape[0]:
            buffer[num_used:].zero_()
