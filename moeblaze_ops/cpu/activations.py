"""Activations in place: what ``arguments.activations`` computes, with as few buffers and passes as ATen allows."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moeblaze_ops.arguments.activations import GATES, activate, activation_gradient, parameter_gradient
from moeblaze_ops.cpu.row_pieces import in_pieces
from moeblaze_ops.kernels.formulas.named import is_gated
from moeblaze_ops.kernels.settings import settings

_aten = torch.ops.aten
_Value: TypeAlias = Callable[..., Tensor]
_Slope: TypeAlias = Callable[..., Tensor]

_IN_PLACE: dict[str, tuple[_Value, _Slope]] = {
    "silu": (_aten.silu.out, _aten.silu_backward.grad_input),
    "gelu": (_aten.gelu.out, _aten.gelu_backward.grad_input),
    "gelu_tanh": (partial(_aten.gelu.out, approximate="tanh"), partial(_aten.gelu_backward.grad_input, approximate="tanh")),
    "relu": (partial(_aten.clamp_min.out, min=0), partial(_aten.threshold_backward.grad_input, threshold=0)),
}
"""Functions of one half: ``value(x, out=)`` and ``slope(grad, x, grad_input=)``, which is grad times the derivative at x."""


def activate_into(a_NF: Tensor, h_NGF: Tensor, activation: str, params_NP: Tensor | None = None) -> None:
    """a = act(h), as ``activate`` has it bit for bit."""
    if settings().batch_invariant:
        in_pieces(_activate_into, [a_NF], [h_NGF, params_NP], activation)
    else:
        _activate_into(a_NF, h_NGF, params_NP, activation)


def _activate_into(a_NF: Tensor, h_NGF: Tensor, params_NP: Tensor | None, activation: str) -> None:
    functions = _functions(activation, h_NGF)
    if functions is None:
        a_NF.copy_(activate(h_NGF, activation, params_NP))
        return
    value, _ = functions
    value(h_NGF[:, 0], out=a_NF)
    if is_gated(activation):
        a_NF *= h_NGF[:, 1]


def backward_into(
    dh_NGF: Tensor,
    wa_NF: Tensor,
    da_NF: Tensor,
    h_NGF: Tensor,
    scale_N1: Tensor | None,
    activation: str,
    params_NP: Tensor | None = None,
    dparams_NP: Tensor | None = None,
) -> Tensor | None:
    """``dh = act'(h) * s * da`` and ``wa = s * act(h)``; returns ``<da, act(h)>`` of each row where there are weights s.

    Args:
        dh_NGF: is written; may be the memory of h. wa_NF: is written.
        da_NF: the gradient of the activation without s, in the dtype of h; is overwritten.
        h_NGF: the pre-activation. scale_N1: s in the dtype of sums, or None for 1.
        activation: a name, or ``identity``.
        params_NP, dparams_NP: the parameters of each row, and what it adds to their gradients, which is written.
    """
    operands = da_NF, h_NGF, scale_N1, params_NP
    if not settings().batch_invariant:
        return _backward_into(dh_NGF, wa_NF, dparams_NP, *operands, activation)
    dscale_N = None if scale_N1 is None else scale_N1.new_empty(scale_N1.shape[0])

    def fill(dscale: Tensor | None, *given: Any) -> None:
        dots = _backward_into(*given)
        if dscale is not None and dots is not None:
            dscale.copy_(dots)

    in_pieces(fill, [dscale_N, dh_NGF, wa_NF, dparams_NP], operands, activation)
    return dscale_N


def _backward_into(dh_NGF, wa_NF, dparams_NP, da_NF, h_NGF, scale_N1, params_NP, activation: str) -> Tensor | None:
    functions = _functions(activation, h_NGF)
    if functions is None:
        return _backward_of_any(dh_NGF, wa_NF, dparams_NP, da_NF, h_NGF, scale_N1, params_NP, activation)
    value, slope = functions
    gate, dgate = h_NGF[:, 0], dh_NGF[:, 0]
    if not is_gated(activation):
        value(gate, out=wa_NF)
        dscale_N = _scaled(da_NF, wa_NF, scale_N1)
        slope(da_NF, gate, grad_input=dgate)
        return dscale_N
    up, dup = h_NGF[:, 1], dh_NGF[:, 1]
    value_NF = value(gate, out=torch.empty_like(da_NF))
    torch.mul(value_NF, up, out=wa_NF)
    dscale_N = _scaled(da_NF, wa_NF, scale_N1)
    value_NF *= da_NF
    da_NF *= up
    dup.copy_(value_NF)
    slope(da_NF, gate, grad_input=dgate)
    return dscale_N


def _scaled(da_NF: Tensor, a_NF: Tensor, scale_N1: Tensor | None) -> Tensor | None:
    """Multiplies both by s; returns their product of each row before."""
    if scale_N1 is None:
        return None
    dscale_N = torch.linalg.vecdot(da_NF, a_NF)
    da_NF *= scale_N1
    a_NF *= scale_N1
    return dscale_N


def _functions(activation: str, h_NGF: Tensor) -> tuple[_Value, _Slope] | None:
    """Functions that have a form in place, of numbers that are not computed in another dtype than theirs."""
    if h_NGF.dtype not in (torch.float32, torch.float64):
        return None
    return _IN_PLACE.get(GATES.get(activation, activation))


def _backward_of_any(dh_NGF, wa_NF, dparams_NP, da_NF, h_NGF, scale_N1, params_NP, activation: str) -> Tensor | None:
    wide = torch.promote_types(h_NGF.dtype, torch.float32)
    da_NF, a_NF, dscale_N = da_NF.to(wide), activate(h_NGF, activation, params_NP), None
    if scale_N1 is not None:
        dscale_N = (da_NF * a_NF).sum(1)
        da_NF, a_NF = da_NF * scale_N1, a_NF * scale_N1
    wa_NF.copy_(a_NF)
    if dparams_NP is not None:
        dparams_NP.copy_(parameter_gradient(da_NF, h_NGF, activation, params_NP))
    dh_NGF.copy_(activation_gradient(da_NF, h_NGF, activation, params_NP))
    return dscale_N
