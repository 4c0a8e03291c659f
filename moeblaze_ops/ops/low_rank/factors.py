"""Experts whose weights have low-rank additions, ``W + scale * B @ A`` (LoRA): what the ops take of them, and their calls.

The addition is R more columns of the contraction with W, in the same sum: ``x @ W^T + (x @ A^T) @ (scale * B)^T``. Nothing of the
size of W is written, in forward or in backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.expert_down import expert_down
from moeblaze_ops.ops.expert_up import expert_up
from moeblaze_ops.ops.low_rank.expert_rows import expert_rows

Factors = tuple[Tensor, Tensor]
"""A [E, R, inputs], and B with the scale in it: [E, G, F, R] of an up projection, [E, R, D] of a down projection."""

_NO_FACTORS = (None, None, None)

RANK_UNIT = 8
"""Ranks are padded to a multiple of it: rows of 16 bytes, in which GPUs copy."""


def padded(a_ERI: Tensor, b: Tensor) -> Factors:
    """Both factors with zeros up to a multiple of RANK_UNIT ranks, as products read them: columns next to each other.

    The ranks of b are its last axis; in memory they come before all columns, those of gate and of up in a row.
    """
    missing = -a_ERI.shape[1] % RANK_UNIT
    if missing:
        a_ERI, b = F.pad(a_ERI, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return a_ERI.contiguous(), b.movedim(-1, 1).contiguous().movedim(1, -1)


def scaled(b_EOR: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """B times the scale, a number or one for each expert, rounded once to ``dtype``."""
    if isinstance(scale, Tensor):
        return (b_EOR * scale.view(-1, *[1] * (b_EOR.dim() - 1))).to(dtype)
    return b_EOR.to(dtype) if scale == 1 else (b_EOR * scale).to(dtype)


def joined(adapters: Sequence[tuple[Tensor, Tensor, float | Tensor]], dtype: torch.dtype) -> Factors:
    """A and B of all additions to one weight, with the scales in B: the sum of their products is the product of these."""
    pairs = [(a.to(dtype), scaled(b, scale, dtype)) for a, b, scale in adapters]
    return pairs[0] if len(pairs) == 1 else (torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 2))


def beside(gate: Factors | None, up: Factors | None) -> Factors:
    """One pair of factors for gate and up, [E, R, D] and [E, 2, F, R], of a pair for each of them with B [E, F, R]: the ranks of
    one stand beside those of the other, with zeros where they do not meet."""
    if gate is None or up is None:
        a, b = gate or up
        none = torch.zeros_like(b)
        return a, torch.stack((none, b) if gate is None else (b, none), 1)
    left, right = gate[0].shape[1], up[0].shape[1]
    b_EGFR = torch.stack((F.pad(gate[1], (0, right)), F.pad(up[1], (left, 0))), 1)
    return torch.cat((gate[0], up[0]), 1), b_EGFR


def up_operands(
    x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], weights_TK: Tensor | None, routing: tuple[Tensor, ...],
    activation: str, factors: Factors | None, params_EP: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What ``expert_up`` takes of weights with a low-rank addition, or of plain ones."""
    given = (x_TD, w_up, b_up, weights_TK, *routing, activation)
    if factors is None:
        return *given, *_NO_FACTORS, params_EP
    a_ERD, b_EGFR = factors
    u_N1R, _ = call(expert_up, x_TD.detach(), [a_ERD.detach().unsqueeze(1)], [], None, *routing, IDENTITY)
    return *given, u_N1R.squeeze(1), a_ERD, b_EGFR, params_EP


def down_with_factors(
    h_NGF: Tensor, a_NF: Tensor, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    routing: tuple[Tensor, ...], activation: str, factors: Factors | None, params_EP: Tensor | None = None,
    h8_NGB: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``expert_down`` of a weight with a low-rank addition, or of a plain one."""
    given = (h_NGF, a_NF, w_down, b_down, weights_TK, *routing, activation)
    if factors is None:
        return call(expert_down, *given, *_NO_FACTORS, params_EP, h8_NGB)
    a_ERF, b_ERD = factors
    _, offsets_E1, _, blocks_B2 = routing
    a_N1F, w_E1FR = a_NF.detach().unsqueeze(1), a_ERF.detach().transpose(1, 2).unsqueeze(1)
    v_NR = call(expert_rows, a_N1F, w_E1FR, offsets_E1, blocks_B2)
    return call(expert_down, *given, v_NR, a_ERF, b_ERD, params_EP, h8_NGB)
