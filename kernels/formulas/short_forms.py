"""Formulas in terms of what a GPU does in one instruction: ``2 ** x``, ``1 / x``, ``log2(x)``, sine and cosine near zero.

    sigmoid(1.702 * g)    rcp(exp2(g * -2.455) + 1)

Functions are taken apart here and not in a kernel, so that constants meet (1.702 and log2 e above), and what a value and its
derivative have in common is one node: the exponential of a softplus is that of its sigmoid.

Instructions are good to 2 ulp and flush denormals. Functions made of them are rounded to 16 bits next, and err less:

    half_erf    1.5e-5 of the smaller one of it and its difference to 1, 6e-5 beyond 4 standard deviations, 2e-4 beyond 6
    sin, cos    2e-6 absolute up to arguments of 100,000, and near zero a sine 5e-5 of it
    others      5e-5 of their value
"""

import math
from collections import Counter
from collections.abc import Callable

from moeblaze_ops.kernels.formulas.expression import ONE, PARAMETER_SYMBOLS, Node, apply, below, interned, number

_LOG2_E = 1 / math.log(2)


def shortened(*roots: Node) -> tuple[Node, ...]:
    """The same numbers, up to rounding, of functions that take one instruction each."""
    made = _Made(*roots)
    for node in below(*roots):
        rule = _RULES.get(node.op)
        found = rule(node, made) if rule else None
        if found is None:
            found = apply(node.op, *(made[arg] for arg in node.args)) if node.args else node
        made[node] = found
    return tuple(made[root] for root in roots)


class _Made(dict[Node, Node]):
    """What nodes became, and which of them have one reader: its work can go into them."""

    def __init__(self, *roots: Node):
        readers = Counter(arg for node in below(*roots) for arg in node.args)
        self.read_once = {node for node, count in readers.items() if count == 1}.difference(roots)


def _exp2(x: Node) -> Node:
    return interned("exp2", (x,))


def _reciprocal(x: Node) -> Node:
    return interned("rcp", (x,))


def _series(x: Node, *coefficients: float) -> Node:
    """``coefficients[0] + x * (coefficients[1] + ...)``."""
    total = apply("mul", x, number(coefficients[-1]))
    for coefficient in coefficients[-2:0:-1]:
        total = apply("mul", x, apply("add", total, number(coefficient)))
    return apply("add", total, number(coefficients[0]))


def _times(a: Node, factor: float) -> Node:
    """``a * factor``, with the factor where it costs nothing: in another one, in a sum of multiples, in a parameter."""
    if a.op == "mul" and not a.args[1].is_number:
        for one, other in (a.args, a.args[::-1]):
            if _is_line(other):
                return apply("mul", one, _times(other, factor))
            if _is_of_parameters(other):
                return interned("mul", (one, apply("mul", other, number(factor))))
    if a.op == "mul" and a.args[1].is_number and abs(a.args[1].number * factor) < 1e30:
        return _times(a.args[0], a.args[1].number * factor)
    if _is_line(a):
        return apply("add", _times(a.args[0], factor), number(a.args[1].number * factor))
    return apply("mul", a, number(factor))


def _is_line(a: Node) -> bool:
    """``q * 0.1 + 2.0``, one instruction whatever its numbers; not ``q + 2.0``, which would become one of two."""
    return a.op == "add" and a.args[1].is_number and a.args[0].op == "mul" and a.args[0].args[1].is_number


def _is_of_parameters(a: Node) -> bool:
    """Known before the rows are."""
    return all(node.symbol in PARAMETER_SYMBOLS for node in below(a) if node.symbol)


def _mul(node: Node, made: "_Made") -> Node | None:
    for a, b in (node.args, node.args[::-1]):
        if _is_slope_of_tanh_softplus(a, b):
            e, _, r = _tanh_softplus_parts(b.args[0], made)
            return apply("mul", apply("mul", apply("add", apply("mul", e, e), e), r), r)
        if a.op == "sub" and a.args[0] is ONE and a.args[1].op == "sigmoid":
            # One fused instruction instead of two.
            return apply("sub", made[b], apply("mul", made[b], made[a.args[1]]))
    if node.args[1].is_number:
        return _into_exponent(node.args[0], node.args[1], made) or _times(made[node.args[0]], node.args[1].number)
    return None


def _into_exponent(a: Node, factor: Node, made: "_Made") -> Node | None:
    """``y * exp(q * -0.5) * 0.4`` as ``y * exp2(q * -0.72 - 1.32)``."""
    if a.op == "mul" and a in made.read_once and 1e-6 < factor.number < 1e6:
        for one, other in (a.args, a.args[::-1]):
            if other.op == "exp" and other in made.read_once:
                exponent = apply("add", _times(made[other.args[0]], _LOG2_E), number(math.log2(factor.number)))
                return apply("mul", made[one], _exp2(exponent))
    return None


def _add(node: Node, made: "_Made") -> Node | None:
    """Of ``(q * 0.1 + 1.0) + q * 0.2``, as in the derivative of ``x * (x * x * 0.1 + 1.0)``; of ``where(x < 0, 0, y) - 1``."""
    for a, b in (node.args, node.args[::-1]):
        line, multiple = made[a], made[b]
        if line.op == "where" and multiple.is_number and any(side.is_number for side in line.args[1:]):
            mask, *sides = line.args
            return apply("where", mask, *(apply("add", side, multiple) for side in sides))
        if _is_line(line) and multiple.op == "mul" and multiple.args[1].is_number and multiple.args[0] is line.args[0].args[0]:
            slope = number(line.args[0].args[1].number + multiple.args[1].number)
            return apply("add", apply("mul", multiple.args[0], slope), line.args[1])
    return None


def _exp(node: Node, made: "_Made") -> Node:
    return _exp2(_times(made[node.args[0]], _LOG2_E))


def _one_plus_exp(x: Node, factor: float) -> Node:
    """``1 + exp(x * factor)``."""
    return apply("add", _exp2(_times(x, _LOG2_E * factor)), ONE)


def _sigmoid(node: Node, made: "_Made") -> Node:
    return _reciprocal(_one_plus_exp(made[node.args[0]], -1))


def _softplus(node: Node, made: "_Made") -> Node:
    """``x + log(1 + exp(-x))``; below -3.25 the series of ``-log(1 - s)``, s the sigmoid, which is the derivative anyway."""
    x = made[node.args[0]]
    one_more = _one_plus_exp(x, -1)
    sigmoid = _reciprocal(one_more)
    curve = apply("add", apply("mul", interned("log2", (one_more,)), number(math.log(2))), x)
    tail = apply("mul", sigmoid, _series(sigmoid, 1.0, 0.5, 1 / 3))
    return apply("where", apply("lt", x, number(-3.25)), tail, curve)


def _tanh_softplus_parts(x: Node, made: "_Made") -> tuple[Node, Node, Node]:
    """``e = exp(x)``, ``n = e * (e / 2 + 1)``, ``1 / (n + 1)``; from 20 on, where the tanh is 1, those of 20."""
    e = _exp2(_times(apply("minimum", made[x], number(20)), _LOG2_E))
    n = apply("mul", e, apply("add", apply("mul", e, number(0.5)), ONE))
    return e, n, _reciprocal(apply("add", n, ONE))


def _tanh(node: Node, made: "_Made") -> Node:
    """``1 - 2 / (1 + exp(2 * x))``, or of a softplus ``n / (n + 1)``."""
    if node.args[0].op == "softplus":
        _, n, r = _tanh_softplus_parts(node.args[0].args[0], made)
        return apply("mul", n, r)
    x = made[node.args[0]]
    curve = apply("add", apply("mul", _reciprocal(_one_plus_exp(x, 2)), number(-2)), ONE)
    return _near_zero(x, 0.008, x, curve)


def _near_zero(x: Node, bound: float, near: Node, far: Node) -> Node:
    return apply("where", apply("lt", apply("abs", x), number(bound)), near, far)


def _is_slope_of_tanh_softplus(a: Node, b: Node) -> bool:
    """``(1 - t * t) * sigmoid(x)`` with ``t = tanh(softplus(x))``, which is ``(e * e + e) / (n + 1) ** 2``."""
    if b.op != "sigmoid" or a.op != "sub" or a.args[0] is not ONE:
        return False
    tanh = apply("tanh", apply("softplus", b.args[0]))
    return a.args[1] is apply("mul", tanh, tanh)


def _expm1(node: Node, made: "_Made") -> Node:
    x = made[node.args[0]]
    near = apply("add", apply("mul", x, apply("mul", x, number(0.5))), x)
    return _near_zero(x, 0.012, near, apply("add", _exp2(_times(x, _LOG2_E)), number(-1)))


_LOG2_OF_TAIL = (-1.0, -1.15105177, -0.45901953, -0.0534062827, 8.24766491e-3, -8.68141015e-4, 5.42263865e-5, -1.49470945e-6)
"""``log2`` of the normal distribution's upper tail, as a polynomial in x from 0 on, which falls for ever."""


def _half_erf(node: Node, made: "_Made") -> Node:
    """``(1 + erf(x)) / 2``: the tail of |x|, or one minus it."""
    x, factor = made[node.args[0]], math.sqrt(2)
    if x.op == "mul" and x.args[1].is_number and 0 < x.args[1].number < 1e6:
        x, factor = x.args[0], factor * x.args[1].number
    coefficients = (c * factor**power for power, c in enumerate(_LOG2_OF_TAIL))
    tail = _exp2(_series(apply("abs", x), *coefficients))
    return apply("where", apply("lt", x, number(0)), tail, apply("sub", ONE, tail))


def _within_a_turn(x: Node) -> Node:
    """``x - 2 * pi * n`` for the whole number n that makes it small; a turn is a number of eight bits and the rest of it."""
    n = interned("nearest", (_times(x, 1 / (2 * math.pi)),))
    most = apply("sub", x, apply("mul", n, number(6.28125)))
    return apply("sub", most, apply("mul", n, number(2 * math.pi - 6.28125)))


def _sin(node: Node, made: "_Made") -> Node:
    x = _within_a_turn(made[node.args[0]])
    return _near_zero(x, 0.016, x, interned("sin_of_turn", (x,)))


def _cos(node: Node, made: "_Made") -> Node:
    return interned("cos_of_turn", (_within_a_turn(made[node.args[0]]),))


_RULES: dict[str, Callable[[Node, "_Made"], Node | None]] = {
    "mul": _mul, "add": _add, "exp": _exp, "sigmoid": _sigmoid, "softplus": _softplus, "tanh": _tanh, "expm1": _expm1,
    "half_erf": _half_erf, "sin": _sin, "cos": _cos,
}  # fmt: skip
