"""Activations as people write them, for tests: functions of (gate, up) or of h in torch's own words, none of which has a name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def situ_glu(g: Tensor, u: Tensor) -> Tensor:
    """SwiGLU whose halves run into soft bounds."""
    return 6.0 * torch.tanh(g / 6.0) * torch.sigmoid(g) * 12.0 * torch.tanh(u / 12.0)


def xielu(h: Tensor) -> Tensor:
    """With the constants that its learned ones begin with."""
    return torch.where(h > 0, 0.8 * h * h + 0.5 * h, (torch.expm1(torch.clamp(h, max=-1e-6)) - h) * 0.8 + 0.5 * h)


def swiglu_oai(g: Tensor, u: Tensor) -> Tensor:
    """Clamped as in gpt-oss, at other limits and with another slope."""
    g, u = g.clamp(max=5.0), u.clamp(-5.0, 5.0)
    return (u + 1) * g * torch.sigmoid(1.5 * g)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "situ_glu": situ_glu,
    "quick_geglu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "mish_glu": lambda g, u: F.mish(g) * u,
    "softplus_glu": lambda g, u: F.softplus(g) * u,
    "swiglu_other_limits": swiglu_oai,
    "relu2_glu": lambda g, u: F.relu(g).square() * u,
    "tanh_glu": lambda g, u: torch.tanh(g) * u,
    "bilinear": lambda g, u: g * u,
    "glu": lambda g, u: torch.sigmoid(g) * u,
    "swish_beta": lambda g, u: g * torch.sigmoid(0.7 * g) * u,
    "elu_glu": lambda g, u: F.elu(g) * u,
    "larger": lambda g, u: torch.maximum(g, 0.1 * u) * torch.exp(-u.abs()),
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "xielu": xielu,
    "mish": F.mish,
    "hard_swish": F.hardswish,
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.1),
    "selu": F.selu,
    "log_cosh": lambda h: F.softplus(-2 * h) + h - 0.6931471805599453,
    "softsign": F.softsign,
    "gaussian": lambda h: torch.exp(-0.5 * h * h),
    "snake": lambda h: h + torch.sin(h) ** 2,
}
ALL: dict[str, Callable[..., Tensor]] = {**GATED, **UNGATED}
