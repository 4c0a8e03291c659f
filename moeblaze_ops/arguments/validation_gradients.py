"""Argument checks of the gradients of weights and biases, with the messages of ``validation``."""

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import check_device, check_like, require, require_dtype, shape_of


def check_weight_grad(
    op: str,
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    like: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
) -> None:
    require(gathered_TD.dim() == 2, op, "gathered_TD", "have 2 dimensions [T, D]", f"shape {shape_of(gathered_TD)}")
    require(grouped_NGF.dim() == 3, op, "grouped_NGF", "have 3 dimensions [N, G, F]", f"shape {shape_of(grouped_NGF)}")
    check_like(op, "grouped_NGF", grouped_NGF, gathered_TD)
    N, G, F = grouped_NGF.shape
    E, D = offsets_E1.shape[0] - 1, gathered_TD.shape[1]
    expected = {(1, 4): [E, G, F, D], (2, 4): [E, 1, F, D], (1, 3): [E, F, D]}.get((len(like), like[0].dim() if like else 0))
    require(expected is not None, op, "like", "hold one [E, G, F, D] or [E, F, D] tensor, or gate and up", len(like))
    for w in like:
        require(list(w.shape) == expected, op, "like", f"have shape {expected}", f"shape {shape_of(w)}")
    require(gathered_TD.shape[0] * top_k == N, op, "grouped_NGF", f"have T*K={gathered_TD.shape[0] * top_k} rows", N)
    require(list(slots_N.shape) == [N], op, "slots_N", f"have shape [{N}]", shape_of(slots_N))
    if weights_TK is not None:
        require(weights_TK.numel() == N, op, "weights_TK", f"have {N} elements", f"shape {shape_of(weights_TK)}")


def check_weight_grad_add(op: str, gathered_TD: Tensor, grouped_NGF: Tensor, dw: list[Tensor], *rest) -> None:
    """``rest``: the arguments of ``expert_weight_grad`` after ``like``."""
    check_weight_grad(op, gathered_TD, grouped_NGF, dw, *rest)
    for gradient in dw:
        _check_sums(op, "dw", gradient, gathered_TD)


def check_bias_grad(
    op: str,
    rows_NC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    gathered: bool,
) -> None:
    require(rows_NC.dim() == 2, op, "rows_NC", "have 2 dimensions", f"shape {shape_of(rows_NC)}")
    N = slots_N.shape[0]
    rows = rows_NC.shape[0] * (top_k if gathered else 1)
    require(rows == N, op, "rows_NC", f"have one row per {'token' if gathered else 'slot'} ({N} slots)", rows_NC.shape[0])
    if weights_TK is not None:
        require(weights_TK.numel() == N, op, "weights_TK", f"have {N} elements", f"shape {shape_of(weights_TK)}")


def check_bias_grad_add(op: str, rows_NC: Tensor, db_EC: Tensor, weights_TK: Tensor | None, slots_N, offsets_E1, *rest) -> None:
    """``rest``: the arguments of ``expert_bias_grad`` after ``offsets_E1``."""
    check_bias_grad(op, rows_NC, weights_TK, slots_N, offsets_E1, *rest)
    expected = [offsets_E1.shape[0] - 1, rows_NC.shape[1]]
    require(list(db_EC.shape) == expected, op, "db_EC", f"have shape {expected}", f"shape {shape_of(db_EC)}")
    _check_sums(op, "db_EC", db_EC, rows_NC)


def _check_sums(op: str, name: str, sums: Tensor, like: Tensor) -> None:
    """What gradients are added to: fp32, or the dtype of what is summed."""
    allowed = (torch.float32, like.dtype)
    require_dtype(sums.dtype in allowed, op, name, f"be float32 or {like.dtype}", sums.dtype)
    check_device(op, name, sums, like)
