"""What ops do on a CPU between their products, as ATen functions that Inductor fuses to one pass over the rows.

In eager code each function of an activation and of its derivative is a pass of its own. Here the products alone are called;
they are those of ``expert_up`` without an activation, as the gradient of an activation is dout times a transposed weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.activations import activate, activation_gradient, with_numbers
from moeblaze_ops.kernels.eight_bits import unpacked
from moeblaze_ops.kernels.formulas.named import IDENTITY

_ops = torch.ops.moeblaze_cpu


def expert_up(*operands: Any) -> tuple[Tensor, Tensor]:
    x_TD, w_up, b_up, weights_TK, *routing, activation, u_NR, lora_a_ERD, lora_b_EGFR, params_EP = operands
    _, offsets_E1, _, _ = routing
    h_NGF, a_NF = _ops.expert_up(x_TD, w_up, b_up, weights_TK, *routing, IDENTITY, u_NR, lora_a_ERD, lora_b_EGFR)
    if activation == IDENTITY:
        return h_NGF, a_NF
    return h_NGF, activate(h_NGF, activation, _of_rows(params_EP, offsets_E1, h_NGF.shape[0]))


def _of_rows(params_EP: Tensor | None, offsets_E1: Tensor, N: int) -> Tensor | None:
    """The parameters of the expert of each row, and its number; those of the last one for a row of an unused slot."""
    if params_EP is None:
        return None
    rows_N = torch.arange(N, device=offsets_E1.device, dtype=offsets_E1.dtype)
    return with_numbers(params_EP[torch.searchsorted(offsets_E1[1:-1].contiguous(), rows_N, right=True)], 0)


def expert_down_backward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    dout_TD, h_NGF, w_down, b_down, weights_TK, *routing, activation, q_NR, lora_a_ERF = operands
    slots_N, offsets_E1, positions_TK, _ = routing
    if h_NGF.dtype == torch.int8:
        h_NGF = unpacked(h_NGF, w_down[0].shape[1], dout_TD.dtype)
    low_rank = () if q_NR is None else (q_NR, None, lora_a_ERF.transpose(1, 2).unsqueeze(1))
    da_N1F, _ = _ops.expert_up(dout_TD, [w.unsqueeze(1) for w in w_down], [], None, *routing, IDENTITY, *low_rank)
    wide = torch.promote_types(h_NGF.dtype, torch.float32)
    da_NF, a_NF = da_N1F[:, 0].to(wide), activate(h_NGF, activation)
    if weights_TK is None:
        dweights_TK = torch.empty(0, positions_TK.shape[1])
        return activation_gradient(da_NF, h_NGF, activation), dweights_TK, a_NF.contiguous()
    dscale_N = (da_NF * a_NF).sum(1)
    used_TK = positions_TK >= 0
    dscale_TK = dscale_N[positions_TK.clamp(min=0).long()]
    if b_down:
        dscale_TK = dscale_TK + _bias_shares(dout_TD.to(wide), b_down, offsets_E1, positions_TK)
    dweights_TK = torch.where(used_TK, dscale_TK, 0).to(weights_TK.dtype)
    weights_N = weights_TK.reshape(-1)[slots_N.clamp(min=0).long()].to(wide)
    scale_N1 = torch.where(slots_N >= 0, weights_N, 0).unsqueeze(1)
    dh_NGF = activation_gradient(da_NF * scale_N1, h_NGF, activation)
    return dh_NGF, dweights_TK, (a_NF * scale_N1).to(h_NGF.dtype)


def _bias_shares(dout_TD: Tensor, b_down: list[Tensor], offsets_E1: Tensor, positions_TK: Tensor) -> Tensor:
    """``<dout[t], b[e]>`` for each token t and each of its experts e."""
    experts_TK = torch.searchsorted(offsets_E1[1:], positions_TK.clamp(min=0), right=True)
    return (dout_TD @ torch.cat(b_down).to(dout_TD.dtype).t()).gather(1, experts_TK)


IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable] = {
    torch.ops.moeblaze.expert_up.default: expert_up,
    torch.ops.moeblaze.expert_down_backward.default: expert_down_backward,
}
"""By op: takes all of its arguments, experts stored apart as they are, and returns its results."""
