"""Argument checks of the gradients of weights and biases, with the messages of ``validation``."""

from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import (
    check_device,
    check_float32_or_like,
    check_like,
    check_routing,
    check_routing_weights,
    check_shape,
    may_be,
    require,
    require_dtype,
    shape_of,
)
from moeblaze_ops.arguments.validation_values import check_float_dtype


def check_weight_grad(
    op: str, gathered_TD: Tensor, grouped_NGF: Tensor, like: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, top_k: int,
) -> None:  # fmt: skip
    require(gathered_TD.dim() == 2, op, "gathered_TD", "have 2 dimensions [T, D]", f"shape {shape_of(gathered_TD)}")
    require(grouped_NGF.dim() == 3, op, "grouped_NGF", "have 3 dimensions [N, G, F]", f"shape {shape_of(grouped_NGF)}")
    check_like(op, "grouped_NGF", grouped_NGF, gathered_TD)
    check_float_dtype(op, "gathered_TD", gathered_TD)
    _check_slots(op, slots_N, offsets_E1, top_k, gathered_TD)
    N, G, F = grouped_NGF.shape
    E, D = offsets_E1.shape[0] - 1, gathered_TD.shape[1]
    expected = {(1, 4): [E, G, F, D], (2, 4): [E, 1, F, D], (1, 3): [E, F, D]}.get((len(like), like[0].dim() if like else 0))
    require(expected is not None, op, "like", "hold one [E, G, F, D] or [E, F, D] tensor, or gate and up", len(like))
    for w in like:
        check_shape(op, "like", w, expected)
    most = gathered_TD.shape[0] * top_k
    require(may_be(most >= N), op, "grouped_NGF", f"have T*K={most} rows, or as many as slots are used", N)
    require(list(slots_N.shape) == [N], op, "slots_N", f"have shape [{N}]", shape_of(slots_N))
    _check_weights(op, weights_TK, most, gathered_TD)


def check_weight_grad_like(op: str, gathered_TD: Tensor, grouped_NGF: Tensor, like: list[Tensor], *rest: Any) -> None:
    """The arguments of ``expert_weight_grad``, which has results of the dtype of ``like``; its device is that of the results."""
    check_weight_grad(op, gathered_TD, grouped_NGF, like, *rest)
    for w in like:
        require_dtype(w.dtype == gathered_TD.dtype, op, "like", f"have the dtype {gathered_TD.dtype} of gathered_TD", w.dtype)


def check_weight_grad_add(op: str, gathered_TD: Tensor, grouped_NGF: Tensor, dw: list[Tensor], *rest: Any) -> None:
    """``rest``: the arguments of ``expert_weight_grad`` after ``like``."""
    check_weight_grad(op, gathered_TD, grouped_NGF, dw, *rest)
    for gradient in dw:
        check_float32_or_like(op, "dw", gradient, gathered_TD)


def check_low_rank_backward(
    op: str, dy: Tensor, u_NR: Tensor, b: Tensor, weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
) -> None:  # fmt: skip
    check_float_dtype(op, "dy", dy)
    require(dy.dim() in (2, 3), op, "dy", "have dimensions [N, G, F] or [T, D]", f"shape {shape_of(dy)}")
    require(u_NR.dim() == 2, op, "u_NR", "have 2 dimensions [N, R]", f"shape {shape_of(u_NR)}")
    check_like(op, "u_NR", u_NR, dy)
    check_like(op, "b", b, dy)
    in_rows, rank, E = dy.dim() == 3, u_NR.shape[1], b.shape[0] if b.dim() else 0
    check_shape(op, "b", b, [E, *dy.shape[1:], rank])
    check_routing(op, dy, E, None if in_rows else dy.shape[0], slots_N, offsets_E1, positions_TK, blocks_B2)
    for name, rows in (("dy", dy), ("u_NR", u_NR))[not in_rows :]:
        require(rows.shape[0] == slots_N.shape[0], op, name, f"have N={slots_N.shape[0]} rows", rows.shape[0])
    check_routing_weights(op, weights_TK, dy, positions_TK)


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
    check_float_dtype(op, "rows_NC", rows_NC)
    _check_slots(op, slots_N, offsets_E1, top_k, rows_NC)
    N = slots_N.shape[0]
    rows = rows_NC.shape[0] * (top_k if gathered else 1)
    fits = may_be(rows >= N) if gathered else rows == N
    require(fits, op, "rows_NC", f"have one row per {'token' if gathered else 'slot'} ({N} slots)", rows_NC.shape[0])
    _check_weights(op, weights_TK, rows, rows_NC)


def check_bias_grad_add(
    op: str,
    rows_NC: Tensor,
    db_EC: Tensor,
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    *rest: Any,
) -> None:
    """``rest``: the arguments of ``expert_bias_grad`` after ``offsets_E1``."""
    check_bias_grad(op, rows_NC, weights_TK, slots_N, offsets_E1, *rest)
    check_shape(op, "db_EC", db_EC, [offsets_E1.shape[0] - 1, rows_NC.shape[1]])
    check_float32_or_like(op, "db_EC", db_EC, rows_NC)


def check_sums_like(op: str, name: str, sums: list[Tensor], weights: list[Tensor], like: Tensor) -> None:
    """Sums for all weights of a projection, or none: they are added to in place of gradients that would be returned."""
    require(
        len(sums) in (0, len(weights)), op, name, f"hold as many tensors as there are weights ({len(weights)}) or none", len(sums)
    )
    for gradient, w in zip(sums, weights, strict=False):
        check_shape(op, name, gradient, shape_of(w), " of the weight")
        check_float32_or_like(op, name, gradient, like)


def _check_slots(op: str, slots_N: Tensor, offsets_E1: Tensor, top_k: int, like: Tensor) -> None:
    """What of the four tensors of ``dispatch`` these ops take."""
    for name, tensor in (("slots_N", slots_N), ("offsets_E1", offsets_E1)):
        require_dtype(tensor.dtype == torch.int32, op, name, "be int32 (from dispatch)", tensor.dtype)
        require(tensor.dim() == 1, op, name, "have 1 dimension", f"shape {shape_of(tensor)}")
        check_device(op, name, tensor, like)
    require(top_k >= 1, op, "top_k", "be at least 1", top_k)


def _check_weights(op: str, weights_TK: Tensor | None, N: int, like: Tensor) -> None:
    if weights_TK is None:
        return
    require(weights_TK.numel() == N, op, "weights_TK", f"have {N} elements", f"shape {shape_of(weights_TK)}")
    check_float32_or_like(op, "weights_TK", weights_TK, like)
