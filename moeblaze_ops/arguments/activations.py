"""The activations of the ops in eager code: formulas in torch's functions, and those that ATen has as one.

``h_NGF`` is the pre-activation; for gated activations ``g = h[:, 0]`` is the gate and ``u = h[:, 1]`` the
linear half. Half precision is computed in fp32 and rounded once, as the kernels do. ``params_NP`` are the parameters of
each row's expert and the number of the row, [N, P + 1], in the dtype that is computed in; None where a formula has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ops.arguments.draws import draw
from moeblaze_ops.kernels.formulas.derivative import chosen, derivative, times
from moeblaze_ops.kernels.formulas.expression import (
    GATED_SYMBOLS,
    PARAMETER_SYMBOLS,
    PLACE_SYMBOLS,
    UNGATED_SYMBOLS,
    Node,
    below,
    symbol,
)
from moeblaze_ops.kernels.formulas.named import IDENTITY, NAMED, formula_of, is_gated, num_parameters

_aten = torch.ops.aten
_DA = symbol("da")


@dataclass(frozen=True)
class Activation:
    """One activation: ``value`` gives a from the halves of h and the parameters, ``gradient`` the halves of dh from da and these.

    ``of_parameters`` gives what each element adds to the gradient of each parameter, from the same.
    """

    gated: bool
    value: Callable[..., Tensor]
    gradient: Callable[..., tuple[Tensor, ...]]
    of_parameters: Callable[..., tuple[Tensor, ...]] = lambda da, *halves: ()


def _gated(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    """act(g) * u, from act and ``slope(grad, g) = grad * act'(g)``."""
    return Activation(
        gated=True,
        value=lambda g, u: value(g) * u,
        gradient=lambda da, g, u: (slope(da * u, g), da * value(g)),
    )


def _ungated(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    return Activation(gated=False, value=value, gradient=lambda da, h: (slope(da, h),))


GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""The function of the gate of those that multiply it by the up half."""

_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, _aten.silu_backward),
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    "relu": (F.relu, partial(_aten.threshold_backward, threshold=0)),
}
_ATEN: dict[str, Activation] = {
    **{name: _ungated(*functions) for name, functions in _FUNCTIONS.items()},
    **{name: _gated(*_FUNCTIONS[of_gate]) for name, of_gate in GATES.items()},
    "relu2": _ungated(lambda h: F.relu(h).square(), lambda grad, h: _aten.threshold_backward(2 * grad * h, h, 0)),
}
"""Those for which ATen has functions of one pass, forward and backward."""


@cache
def activation_of(activation: str) -> Activation:
    """Of a name or a formula."""
    if activation in _ATEN:
        return _ATEN[activation]
    formula, gated = formula_of(activation), is_gated(activation)
    halves, parameters = GATED_SYMBOLS if gated else UNGATED_SYMBOLS, PARAMETER_SYMBOLS[: num_parameters(activation)]
    symbols = [symbol(name) for name in (*halves, *parameters)]
    slopes = chosen(*(times(_DA, derivative(formula, by)) for by in symbols))
    symbols += map(symbol, PLACE_SYMBOLS)  # given with parameters, for what draws

    def value(*given: Tensor) -> Tensor:
        return _evaluated([formula], dict(zip(symbols, given, strict=False)))[0]

    def gradients(slopes: tuple[Node, ...], *given: Tensor) -> tuple[Tensor, ...]:
        found = _evaluated(slopes, dict(zip((_DA, *symbols), given, strict=False)))
        return tuple(x if isinstance(x, Tensor) else torch.full_like(given[0], x) for x in found)

    return Activation(
        gated, value, partial(gradients, slopes[: len(halves)]), partial(gradients, slopes[len(halves) :])
    )


ACTIVATIONS: dict[str, Activation] = {name: activation_of(name) for name in NAMED}
"""Every activation that has a name. ``identity`` (no activation) is accepted by the ops but not listed here."""


def _evaluated(roots: Sequence[Node], values: dict[Node, Any]) -> list[Any]:
    """The tensors that formulas are; numbers where they are constants."""
    (like, *_) = values.values()
    for node in below(*roots):
        if node.is_number:
            values[node] = node.number
        elif node not in values:
            args = [values[arg] for arg in node.args]
            if node.op == "where" and not any(isinstance(arg, Tensor) for arg in args[1:]):
                args[1] = torch.full_like(like, args[1])  # of two numbers torch would make a tensor of the default dtype
            values[node] = _TORCH[node.op](*args)
    return [values[root] for root in roots]


def _of_tensors(function: Callable) -> Callable:
    """``function`` of two operands, of which one may be a number."""

    def apply(a: Any, b: Any) -> Tensor:
        like = a if isinstance(a, Tensor) else b
        return function(*(x if isinstance(x, Tensor) else torch.full_like(like, x) for x in (a, b)))

    return apply


_TORCH: dict[str, Callable[..., Any]] = {
    "add": torch.add, "mul": torch.mul, "sub": lambda a, b: a - b, "div": lambda a, b: a / b, "neg": torch.neg,
    **{name: getattr(torch, name) for name in ("abs", "exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "log1p")},
    **{name: getattr(torch, name) for name in ("expm1", "sin", "cos", "relu", "pow", "where")},
    "softplus": F.softplus, "clamp": torch.clamp, "draw": draw,
    **{name: _of_tensors(getattr(torch, name)) for name in ("maximum", "minimum", "lt", "le", "gt", "ge", "eq", "ne")},
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
}  # fmt: skip


def activate(h_NGF: Tensor, activation: str, params_NP: Tensor | None = None) -> Tensor:
    """a = act(h). Shape [N, F], dtype of h; ``identity`` needs G = 1 and returns h[:, 0]."""
    if activation == IDENTITY:
        return h_NGF[:, 0]
    return activation_of(activation).value(*_given(h_NGF, params_NP)).to(h_NGF.dtype)


def activation_gradient(da_NF: Tensor, h_NGF: Tensor, activation: str, params_NP: Tensor | None = None) -> Tensor:
    """dh from da, shape [N, G, F], dtype of h."""
    if activation == IDENTITY:
        return da_NF.unsqueeze(1).to(h_NGF.dtype)
    gradients = activation_of(activation).gradient(_compute_dtype(da_NF), *_given(h_NGF, params_NP))
    return torch.stack(gradients, dim=1).to(h_NGF.dtype)


def parameter_gradient(da_NF: Tensor, h_NGF: Tensor, activation: str, params_NP: Tensor) -> Tensor:
    """What each row adds to the gradient of its expert's parameters, [N, P], in the dtype of ``params_NP``."""
    gradients = activation_of(activation).of_parameters(_compute_dtype(da_NF), *_given(h_NGF, params_NP))
    return torch.stack([gradient.expand(da_NF.shape).sum(1) for gradient in gradients], dim=1)


def with_numbers(params_NP: Tensor, first: int) -> Tensor:
    """``params_NP`` with a column of the numbers of rows, from ``first`` on."""
    rows_N = torch.arange(first, first + params_NP.shape[0], device=params_NP.device)
    return torch.cat([params_NP, rows_N.to(params_NP.dtype).unsqueeze(1)], dim=1)


def stacked_parameters(parameters: Sequence[Tensor], E: int, dtype: torch.dtype) -> Tensor | None:
    """Parameters of one element or [E] each as the ops take them beside tokens of ``dtype``: [E, P], or None of none."""
    if not parameters:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    return torch.stack([parameter.reshape(-1).to(wide).expand(E) for parameter in parameters], dim=1)


def _given(h_NGF: Tensor, params_NP: Tensor | None) -> tuple[Tensor, ...]:
    """What a formula is a function of: the halves of h, parameters as columns, and the numbers of rows and features."""
    halves = _compute_dtype(h_NGF).unbind(1)
    if params_NP is None:
        return halves
    return *halves, *params_NP.unsqueeze(2).unbind(1), torch.arange(h_NGF.shape[2], device=h_NGF.device)


def _compute_dtype(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
