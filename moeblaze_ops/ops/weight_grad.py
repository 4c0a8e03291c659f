"""``moeblaze::expert_weight_grad`` and ``expert_bias_grad``: gradients of weights and biases, apart from input gradients.

They are ops of their own so that memory planning frees buffers early, and so that with several GPUs the reduction of
input gradients runs beside them. ``expert_weight_grad_add`` and ``expert_bias_grad_add`` add to gradients that exist.
"""

from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation_gradients import (
    check_bias_grad,
    check_bias_grad_add,
    check_weight_grad_add,
    check_weight_grad_like,
)
from moeblaze_ops.cpu import weight_grad as cpu_gradients
from moeblaze_ops.ops.accumulation import buffers_of, buffers_of_parameters, in_form_of
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.register import register_op, register_plain_op


def _weight_grad_flops(gathered_shape, grouped_shape, *args, **kwargs) -> int:
    N, G, F = grouped_shape
    return 2 * N * G * F * gathered_shape[1]


def _nothing(*args) -> None:
    """What an op returns that adds to its arguments."""


expert_weight_grad = register_op(
    "expert_weight_grad",
    "(Tensor gathered_TD, Tensor grouped_NGF, Tensor[] like, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1,"
    " SymInt top_k) -> Tensor[]",
    fake=lambda gathered_TD, grouped_NGF, like, *_: [torch.empty_like(w, device=gathered_TD.device) for w in like],
    cpu=cpu_gradients.expert_weight_grad,
    kernel="experts.weight_grad:launch_expert_weight_grad",
    check=check_weight_grad_like,
    flops=_weight_grad_flops,
)
"""Weight gradient of one projection: ``dW[e, g, f, :] = sum_r s[r] * grouped[r, g, f] * gathered[token(r), :]``.

Args:
    gathered_TD: the side in token order, read by index: x for the up weights, dout for the down weight.
    grouped_NGF: the side in expert order, [N, G, F]: dh for the up weights, wa as [N, 1, F] for the down weight.
    like: the weights, for their shapes and strides: one [E, G, F, D] or [E, F, D] tensor, or gate and up; with experts
        stored apart tensors of one expert each, as ``expert_up`` and ``expert_down`` take them.
    weights_TK: routing weights s, or None for 1.
    slots_N, offsets_E1: from ``dispatch``. top_k: K.

Returns:
    One gradient per tensor of ``like``, of its shape and dtype, with its strides if they are dense; of experts stored
    apart as if they were one tensor. Zero for an expert without tokens. Accumulated in fp32 (fp64 for fp64); two runs
    agree bit for bit.
"""

expert_weight_grad_add = register_op(
    "expert_weight_grad_add",
    "(Tensor gathered_TD, Tensor grouped_NGF, Tensor(a!)[] dw, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1,"
    " SymInt top_k) -> ()",
    fake=_nothing,
    cpu=cpu_gradients.expert_weight_grad_add,
    kernel="experts.weight_grad:launch_expert_weight_grad_add",
    check=check_weight_grad_add,
    flops=_weight_grad_flops,
    inline=False,
)
"""Add the weight gradient of one projection to tensors: ``dw += expert_weight_grad(...)``, without that temporary.

Args:
    dw: what is added to, in the form of ``like`` of ``expert_weight_grad``: dtype of gathered, or fp32; any strides without
        overlap.
    Others: as for ``expert_weight_grad``.

The sum over an expert's rows is taken in fp32 (fp64 for fp64), added to the element and rounded once; an expert without
tokens keeps what it has. Every element has one writer: two runs agree bit for bit.
"""

expert_bias_grad = register_op(
    "expert_bias_grad",
    "(Tensor rows_NC, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1, SymInt top_k, bool gathered) -> Tensor",
    fake=lambda rows_NC, weights_TK, slots_N, offsets_E1, *_: rows_NC.new_empty((offsets_E1.shape[0] - 1, rows_NC.shape[1])),
    cpu=cpu_gradients.expert_bias_grad,
    kernel="experts.bias_grad:launch_expert_bias_grad",
    check=check_bias_grad,
)
"""Bias gradient: the sum of each expert's rows, times the routing weight if given. Shape [E, C], dtype of the rows.

Args:
    rows_NC: rows in expert order [N, C], or with ``gathered`` in token order [T, C], read by index.
    weights_TK: routing weights, or None for 1.
    slots_N, offsets_E1: from ``dispatch``. top_k: K.

Sums are taken in fp32 (fp64 for fp64); two runs agree bit for bit.
"""


expert_bias_grad_add = register_op(
    "expert_bias_grad_add",
    "(Tensor rows_NC, Tensor(a!) db_EC, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1, SymInt top_k, bool gathered)"
    " -> ()",
    fake=_nothing,
    cpu=cpu_gradients.expert_bias_grad_add,
    kernel="experts.bias_grad:launch_expert_bias_grad_add",
    check=check_bias_grad_add,
    inline=False,
)
"""Add a bias gradient to a tensor: ``db_EC += expert_bias_grad(...)``, summed in fp32 (fp64 for fp64) and rounded once.

Args:
    db_EC: what is added to. Shape [E, C], dtype of the rows or fp32.
    Others: as for ``expert_bias_grad``.
"""


def weight_gradients(gathered_TD: Tensor, grouped_NGF: Tensor, weights: list[Tensor], *rest: Any) -> list[Tensor | None]:
    """``expert_weight_grad`` for autograd: None for each weight whose gradient was added where ``accumulate_grad`` says."""
    _, _, offsets_E1, _ = rest
    buffers = buffers_of(weights, offsets_E1.shape[0] - 1)
    if buffers is None:
        return call(expert_weight_grad, gathered_TD, grouped_NGF, weights, *rest)
    call(expert_weight_grad_add, gathered_TD, grouped_NGF, buffers, *rest)
    return [None] * len(weights)


def _gradients(*args) -> list[Tensor]:
    *given, parameters = args
    gradients = call(expert_weight_grad, *given)
    return [gradient.to(p.dtype) for gradient, p in zip(in_form_of(parameters, gradients), parameters, strict=True)]


def _gradients_or_add(gathered_TD, grouped_NGF, like, *rest) -> list[Tensor | None]:
    *routed, parameters = rest
    buffers = buffers_of_parameters(parameters)
    if buffers is None:
        return list[Tensor | None](_gradients(gathered_TD, grouped_NGF, like, *rest))
    call(expert_weight_grad_add, gathered_TD, grouped_NGF, in_form_of(like, buffers), *routed)
    return [None] * len(parameters)


expert_weight_grad_or_add = register_plain_op(
    "expert_weight_grad_or_add",
    "(Tensor gathered_TD, Tensor grouped_NGF, Tensor[] like, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1,"
    " SymInt top_k, Tensor[] parameters) -> Tensor[]",
    _gradients,
    lambda *args: [torch.empty_like(parameter) for parameter in args[-1]],
)
"""``expert_weight_grad`` in the shapes, strides and dtypes of parameters, whose memory has the order of ``like``.

Compiled code calls ``implementation``. It returns None for all of them where ``accumulate_grad`` says what they are added to.
Parameters are fp32 or have the dtype of ``like``.
"""
expert_weight_grad_or_add.implementation = _gradients_or_add  # type: ignore[attr-defined]


def up_bias_gradients(dh_NGF: Tensor, slots_N: Tensor, offsets_E1: Tensor, top_k: int, num_b_up: int) -> list[Tensor]:
    """Gradients of the up biases in the form of the biases: one [E, G, F] tensor, or gate and up as [E, 1, F]."""
    N, G, F = dh_NGF.shape
    db_EC = call(expert_bias_grad, dh_NGF.view(N, G * F), None, slots_N, offsets_E1, top_k, False)
    return [db.contiguous() for db in db_EC.view(-1, G, F).chunk(num_b_up, dim=1)]
