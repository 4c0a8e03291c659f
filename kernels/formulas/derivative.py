"""The derivative of a formula by one of its symbols, as another formula.

It is that of torch's autograd where a function has none: zero of ``relu`` and ``abs`` at 0, half for each side of a maximum of
equals, and of a clamp at its bounds one up to torch 2.13, zero from 2.14 on. A branch that is not taken counts for nothing,
whatever its derivative would be, and whatever gradient arrives: of ``relu`` and ``where`` autograd chooses zero, and of a product
with zero an infinite gradient makes NaN. So a slope that chooses is a node of its own, until it is multiplied:

    choice(mask, slope)         where(mask, 0, gradient * slope)
"""

import math
from collections.abc import Callable

import torch

from moeblaze_ops.kernels.formulas.composites import sign
from moeblaze_ops.kernels.formulas.expression import ONE, ZERO, Node, apply, below, interned, number

CLAMPS_MOVE_AT_BOUNDS = torch.__version__ < "2.14"
"""True if the gradient of torch's clamp is one at its bounds."""

CHOICE = "choice"


def choice(mask: Node, slope: Node) -> Node:
    """Zero where ``mask`` holds, whatever it is multiplied by, else ``slope``."""
    return interned(CHOICE, (mask, slope))


def derivative(root: Node, by: Node) -> Node:
    """``d root / d by``, which shares what it can with ``root``; it may be, or hold, a choice."""
    slopes: dict[Node, Node] = {}
    for node in below(root):
        slopes[node] = ONE if node is by else _slope(node, slopes)
    return slopes[root]


def chosen(*roots: Node) -> tuple[Node, ...]:
    """Derivatives with a ``where`` for each choice."""
    made: dict[Node, Node] = {}
    for node in below(*roots):
        args = tuple(made[arg] for arg in node.args)
        if node.op == CHOICE:
            made[node] = apply("where", args[0], ZERO, args[1])
        else:
            made[node] = node if args == node.args else apply(node.op, *args)
    return tuple(made[root] for root in roots)


def times(a: Node, b: Node) -> Node:
    """``a * b`` of which one at least is a derivative: a zero says that nothing depends on the symbol."""
    if a is ZERO or b is ZERO:
        return ZERO
    for own, other in ((a, b), (b, a)):
        if own.op == CHOICE:
            mask, slope = own.args
            return choice(mask, times(slope, other))
    return apply("mul", a, b)


def _plus(a: Node, b: Node) -> Node:
    """``a + b`` of derivatives: two choices on one condition become one."""
    if a.op == b.op == CHOICE and a.args[0] is b.args[0]:
        return choice(a.args[0], _plus(a.args[1], b.args[1]))
    return apply("add", a, b)


def _slope(node: Node, slopes: dict[Node, Node]) -> Node:
    inner = [slopes[arg] for arg in node.args]
    if node.is_logical or node.op == "draw" or all(slope is ZERO for slope in inner):
        return ZERO
    if node.op == "mul":
        return _product(node, slopes)
    if node.op == "tanh" and node.args[0].op == "softplus":
        return _slope_of_tanh_softplus(node, slopes)
    if node.op in _CHAINED:
        return times(_CHAINED[node.op](node, *node.args), inner[0])
    return _JOINED[node.op](node, *node.args, *inner)


def _slope_of_tanh_softplus(node: Node, slopes: dict[Node, Node]) -> Node:
    """The two factors side by side, whose product has a short form."""
    x = node.args[0].args[0]
    return times(times(_CHAINED["tanh"](node, node.args[0]), apply("sigmoid", x)), slopes[x])


def _product(node: Node, slopes: dict[Node, Node]) -> Node:
    """Of ``a * sigmoid(z)``: the product itself is used once more, for ``a * sigmoid'(z)``."""
    terms = []
    for factor, other in (node.args, node.args[::-1]):
        relative = _RELATIVE.get(factor.op)
        if relative is not None and slopes[factor] is not ZERO:
            terms.append(times(times(node, relative(factor)), slopes[factor.args[0]]))
        else:
            terms.append(times(other, slopes[factor]))
    return _plus(*terms)


_RELATIVE: dict[str, Callable[[Node], Node]] = {
    "sigmoid": lambda s: apply("sub", ONE, s),
    "exp": lambda e: ONE,
}
"""The derivative of functions over their value."""


def _is_between(x: Node, low: float, high: float) -> Node:
    """True if a clamp of ``x`` has a derivative there: NaN has none."""
    less, greater = ("le", "ge") if CLAMPS_MOVE_AT_BOUNDS else ("lt", "gt")
    if low == -high:
        return apply(less, apply("abs", x), number(high))
    above_low, below_high = apply(greater, x, number(low)), apply(less, x, number(high))
    if math.isinf(low):
        return below_high
    return above_low if math.isinf(high) else apply("and", above_low, below_high)


def _power(x: Node, exponent: Node) -> Node:
    return times(exponent, apply("pow", x, number(exponent.number - 1)))


_CHAINED: dict[str, Callable[..., Node]] = {
    "neg": lambda y, x: number(-1),
    "abs": lambda y, x: sign(x),
    "exp": lambda y, x: y,
    "log": lambda y, x: apply("div", ONE, x),
    "sqrt": lambda y, x: apply("div", number(0.5), y),
    "rsqrt": lambda y, x: apply("mul", apply("mul", y, apply("mul", y, y)), number(-0.5)),
    "sigmoid": lambda y, x: apply("mul", y, apply("sub", ONE, y)),
    "tanh": lambda y, x: apply("sub", ONE, apply("mul", y, y)),
    "erf": lambda y, x: apply("mul", apply("exp", apply("neg", apply("mul", x, x))), number(2 / math.sqrt(math.pi))),
    "log1p": lambda y, x: apply("div", ONE, apply("add", x, ONE)),
    "expm1": lambda y, x: apply("exp", x),
    "softplus": lambda y, x: apply("sigmoid", x),
    "sin": lambda y, x: apply("cos", x),
    "cos": lambda y, x: apply("neg", apply("sin", x)),
    "relu": lambda y, x: choice(apply("le", x, ZERO), ONE),
    "clamp": lambda y, x, low, high: choice(apply("not", _is_between(x, low.number, high.number)), ONE),
    "pow": lambda y, x, exponent: _power(x, exponent),
}
"""``f'(x)`` from ``y = f(x)`` and what f is applied to."""


def _quotient(y: Node, a: Node, b: Node, da: Node, db: Node) -> Node:
    numerator = _minus(da, times(y, db))
    if db is ZERO or a.is_number or numerator.op == CHOICE:
        return times(numerator, apply("div", ONE, b))
    return apply("div", numerator, b)


def _minus(a: Node, b: Node) -> Node:
    return _plus(a, times(b, number(-1)))


def _larger(y: Node, a: Node, b: Node, da: Node, db: Node) -> Node:
    """Of ``maximum(a, b)``; both of NaN, which is neither larger nor equal."""
    half = apply("where", apply("eq", a, b), number(0.5), ONE)
    if ZERO in (da, db):
        return choice(apply("lt", a, b), times(da, half)) if db is ZERO else choice(apply("gt", a, b), times(db, half))
    both = times(half, _plus(da, db))
    return _chosen_of(apply("gt", a, b), da, _chosen_of(apply("lt", a, b), db, both))


def _chosen_of(mask: Node, kept: Node, other: Node) -> Node:
    """``where(mask, kept, other)`` of derivatives: a choice if one of them is."""
    if other is ZERO:
        return choice(apply("not", mask), kept)
    if kept is ZERO:
        return choice(mask, other)
    if kept.op == other.op == CHOICE and kept.args[0] is other.args[0]:
        return choice(kept.args[0], _chosen_of(mask, kept.args[1], other.args[1]))
    if kept.op == CHOICE:
        return choice(apply("and", mask, kept.args[0]), _chosen_of(mask, kept.args[1], other))
    if other.op == CHOICE:
        return choice(apply("and", apply("not", mask), other.args[0]), _chosen_of(mask, kept, other.args[1]))
    return apply("where", mask, kept, other)


_JOINED: dict[str, Callable[..., Node]] = {
    "add": lambda y, a, b, da, db: _plus(da, db),
    "sub": lambda y, a, b, da, db: _minus(da, db),
    "div": _quotient,
    "maximum": _larger,
    "minimum": lambda y, a, b, da, db: _larger(y, b, a, da, db),
    "where": lambda y, mask, kept, other, _, dkept, dother: _chosen_of(mask, dkept, dother),
}
"""The derivative from ``y = f(a, b)``, a, b and their derivatives."""
