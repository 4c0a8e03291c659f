"""The fused activations: names, eager formulas and their derivatives.

``h_NGF`` is the pre-activation; for gated activations ``g = h[:, 0]`` is the gate and ``u = h[:, 1]`` the
linear half. Half precision is computed in fp32 and rounded once, as the kernels do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMP_ALPHA = 1.702
CLAMP_LIMIT = 7.0
"""``swiglu_clamped`` is that of gpt-oss."""

SILU_LIMIT = 10.0
"""``swiglu_limited`` is that of DeepSeek-V4: SwiGLU of halves that are clamped."""

IDENTITY = "identity"

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation: ``value`` gives a from the halves of h, ``gradient`` the halves of dh from (halves, da)."""

    gated: bool
    value: Callable[..., Tensor]
    gradient: Callable[..., tuple[Tensor, ...]]


def _gated(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    """act(g) * u, from act and ``slope(grad, g) = grad * act'(g)``."""
    return Activation(
        gated=True,
        value=lambda g, u: value(g) * u,
        gradient=lambda da, g, u: (slope(da * u, g), da * value(g)),
    )


def _ungated(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    return Activation(gated=False, value=value, gradient=lambda da, h: (slope(da, h),))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_slope(grad: Tensor, x: Tensor) -> Tensor:
    return _aten.gelu_backward(grad, x, approximate="tanh")


def _relu_slope(grad: Tensor, x: Tensor) -> Tensor:
    return _aten.threshold_backward(grad, x, 0)


def _swiglu_clamped(g: Tensor, u: Tensor) -> Tensor:
    g = g.clamp(max=CLAMP_LIMIT)
    return (u.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1) * g * torch.sigmoid(CLAMP_ALPHA * g)


def _swiglu_clamped_gradient(da: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    clamped_g, clamped_u = g.clamp(max=CLAMP_LIMIT), u.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    sigmoid = torch.sigmoid(CLAMP_ALPHA * clamped_g)
    slope = sigmoid * (1 + CLAMP_ALPHA * clamped_g * (1 - sigmoid))
    # The gradient passes at the bounds, NaN included: as that of torch.clamp in torch 2.13; torch 2.15 has none there.
    dg = torch.where(g > CLAMP_LIMIT, 0, da * (clamped_u + 1) * slope)
    du = torch.where(u.abs() > CLAMP_LIMIT, 0, da * clamped_g * sigmoid)
    return dg, du


def _swiglu_limited(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g.clamp(max=SILU_LIMIT)) * u.clamp(-SILU_LIMIT, SILU_LIMIT)


def _swiglu_limited_gradient(da: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    limited_g, limited_u = g.clamp(max=SILU_LIMIT), u.clamp(-SILU_LIMIT, SILU_LIMIT)
    dg = torch.where(g > SILU_LIMIT, 0, _aten.silu_backward(da * limited_u, limited_g))
    du = torch.where(u.abs() > SILU_LIMIT, 0, da * F.silu(limited_g))
    return dg, du


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": _gated(F.silu, _aten.silu_backward),
    "geglu": _gated(F.gelu, _aten.gelu_backward),
    "geglu_tanh": _gated(_gelu_tanh, _gelu_tanh_slope),
    "reglu": _gated(F.relu, _relu_slope),
    "swiglu_clamped": Activation(True, _swiglu_clamped, _swiglu_clamped_gradient),
    "swiglu_limited": Activation(True, _swiglu_limited, _swiglu_limited_gradient),
    "silu": _ungated(F.silu, _aten.silu_backward),
    "gelu": _ungated(F.gelu, _aten.gelu_backward),
    "gelu_tanh": _ungated(_gelu_tanh, _gelu_tanh_slope),
    "relu": _ungated(F.relu, _relu_slope),
    "relu2": _ungated(lambda h: F.relu(h).square(), lambda grad, h: 2 * grad * F.relu(h)),
}
"""Every fused activation by name. ``identity`` (no activation) is accepted by the ops but not listed here."""


def is_gated(activation: str) -> bool:
    return activation != IDENTITY and ACTIVATIONS[activation].gated


def activate(h_NGF: Tensor, activation: str) -> Tensor:
    """a = act(h). Shape [N, F], dtype of h; ``identity`` needs G = 1 and returns h[:, 0]."""
    if activation == IDENTITY:
        return h_NGF[:, 0]
    halves = _compute_dtype(h_NGF).unbind(1)
    return ACTIVATIONS[activation].value(*halves).to(h_NGF.dtype)


def activation_gradient(da_NF: Tensor, h_NGF: Tensor, activation: str) -> Tensor:
    """dh from da, shape [N, G, F], dtype of h."""
    if activation == IDENTITY:
        return da_NF.unsqueeze(1).to(h_NGF.dtype)
    halves = _compute_dtype(h_NGF).unbind(1)
    gradients = ACTIVATIONS[activation].gradient(_compute_dtype(da_NF), *halves)
    return torch.stack(gradients, dim=1).to(h_NGF.dtype)


def _compute_dtype(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
