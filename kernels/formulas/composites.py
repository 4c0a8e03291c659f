"""Functions that formulas are written with, in terms of those that they are made of; numbers beside ``x`` are as in torch."""

import math
from collections.abc import Callable

from moeblaze_ops.kernels.formulas.expression import ONE, ZERO, Node, apply, number

_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715
_SELU_ALPHA = 1.6732632423543772
_SELU_SCALE = 1.0507009873554805
_HALF = number(0.5)


def square(x: Node) -> Node:
    return apply("mul", x, x)


def reciprocal(x: Node) -> Node:
    return apply("div", ONE, x)


def sign(x: Node) -> Node:
    """Of NaN zero, as in torch."""
    return apply("where", apply("gt", x, ZERO), ONE, apply("where", apply("lt", x, ZERO), number(-1), ZERO))


def silu(x: Node) -> Node:
    return apply("mul", x, apply("sigmoid", x))


def gelu(x: Node) -> Node:
    cdf = apply("add", apply("mul", apply("erf", apply("mul", x, number(math.sqrt(0.5)))), number(0.5)), number(0.5))
    return apply("mul", x, cdf)


def gelu_tanh(x: Node) -> Node:
    """``0.5 * (1 + tanh(z))`` is ``sigmoid(2 z)``."""
    z = apply("mul", x, apply("add", apply("mul", square(x), number(_GELU_CUBIC)), ONE))
    return apply("mul", x, apply("sigmoid", apply("mul", z, number(_GELU_SLOPE))))


def mish(x: Node) -> Node:
    return apply("mul", x, apply("tanh", apply("softplus", x)))


def softplus(x: Node, beta: Node = ONE, threshold: Node | None = None) -> Node:
    """Linear above ``threshold`` as in torch, where the curve is the line up to rounding unless the threshold is low."""
    curve = apply("div", apply("softplus", apply("mul", x, beta)), beta)
    if threshold is None or threshold.number >= 16:
        return curve
    return apply("where", apply("gt", apply("mul", x, beta), threshold), x, curve)


def leaky_relu(x: Node, slope: Node | None = None) -> Node:
    slope = number(0.01) if slope is None else slope
    return apply("where", apply("gt", x, ZERO), x, apply("mul", x, slope))


def prelu(x: Node, slope: Node) -> Node:
    return leaky_relu(x, slope)


def elu(x: Node, alpha: Node = ONE, scale: Node = ONE, input_scale: Node = ONE) -> Node:
    negative = apply("mul", apply("expm1", apply("mul", x, input_scale)), apply("mul", alpha, scale))
    return apply("where", apply("le", x, ZERO), negative, apply("mul", x, scale))


def celu(x: Node, alpha: Node = ONE) -> Node:
    return elu(x, alpha, ONE, number(1 / alpha.number))


def selu(x: Node) -> Node:
    return elu(x, number(_SELU_ALPHA), number(_SELU_SCALE))


def relu6(x: Node) -> Node:
    """Its gradient is zero at both bounds, unlike that of a clamp."""
    inside = apply("where", apply("ge", x, number(6)), number(6), x)
    return apply("relu", inside)


def hardsigmoid(x: Node) -> Node:
    """Its gradient is zero at both bounds, too."""
    line = apply("add", apply("mul", x, number(1 / 6)), number(0.5))
    inside = apply("where", apply("ge", x, number(3)), ONE, line)
    return apply("where", apply("le", x, number(-3)), ZERO, inside)


def hardtanh(x: Node, low: Node | None = None, high: Node | None = None) -> Node:
    """Its gradient is zero at both bounds, unlike that of a clamp; an infinite bound is none."""
    low, high = number(-1) if low is None else low, ONE if high is None else high
    inside = x if math.isinf(high.number) else apply("where", apply("ge", x, high), high, x)
    return inside if math.isinf(low.number) else apply("where", apply("le", x, low), low, inside)


def hardswish(x: Node) -> Node:
    """Its gradient is that of zero and of x at the bounds of what lies between them; of minus infinity it is NaN, as in torch."""
    curve = apply("mul", apply("mul", x, apply("add", x, number(3))), number(1 / 6))
    above = apply("where", apply("ge", x, number(3)), x, curve)
    return apply("where", apply("le", x, number(-3)), apply("mul", x, ZERO), above)


def logsigmoid(x: Node) -> Node:
    return apply("neg", apply("softplus", apply("neg", x)))


def softsign(x: Node) -> Node:
    return apply("div", x, apply("add", apply("abs", x), ONE))


def threshold(x: Node, bound: Node, value: Node) -> Node:
    return apply("where", apply("le", x, bound), value, x)


def hardshrink(x: Node, bound: Node = _HALF) -> Node:
    """Its gradient is zero at both bounds."""
    return apply("where", apply("le", apply("abs", x), bound), ZERO, x)


def softshrink(x: Node, bound: Node = _HALF) -> Node:
    """Its gradient is zero at both bounds."""
    if bound.number < 0:
        raise ValueError("softshrink of a bound below zero")
    shrunk = apply("where", apply("gt", x, ZERO), apply("sub", x, bound), apply("add", x, bound))
    return apply("where", apply("le", apply("abs", x), bound), ZERO, shrunk)


COMPOSITES: dict[str, Callable[..., Node]] = {
    "square": square, "reciprocal": reciprocal, "sign": sign, "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "mish": mish,
    "leaky_relu": leaky_relu, "prelu": prelu, "elu": elu, "celu": celu, "selu": selu, "relu6": relu6, "hardsigmoid": hardsigmoid,
    "hardswish": hardswish, "hardtanh": hardtanh, "logsigmoid": logsigmoid, "softsign": softsign, "threshold": threshold,
    "hardshrink": hardshrink, "softshrink": softshrink,
}  # fmt: skip
"""By name, as in a text; ``softplus`` of one argument is a function that formulas are made of."""
