"""Formulas as programs for kernels: steps in order, each subexpression once, as a text that is a compile-time argument.

    mul 0 1.702;sigmoid 3;mul 0 4;...|8 11 12

A step is a function and its operands: the number of a value (g or h is 0, u is 1, the gradient of a is 2, then parameters, the
place of the element where a formula draws, and the steps' own), or a constant, which has a point or an exponent. Behind the bar
stand the results.
"""

import math
from dataclasses import dataclass
from functools import cache

from moeblaze_ops.kernels.formulas.derivative import CHOICE, choice, chosen, derivative, times
from moeblaze_ops.kernels.formulas.expression import (
    GATED_SYMBOLS,
    ONE,
    PARAMETER_SYMBOLS,
    PLACE_SYMBOLS,
    ZERO,
    Node,
    apply,
    below,
    interned,
    number,
    symbol,
    symbols_of,
)
from moeblaze_ops.kernels.formulas.named import formula_of, is_gated, num_parameters
from moeblaze_ops.kernels.formulas.short_forms import shortened

IDENTITY_PROGRAM = "|0"
"""Of no activation."""

_PLACES = {"g": 0, "h": 0, "u": 1, "da": 2, **{name: 3 + i for i, name in enumerate(PARAMETER_SYMBOLS)}}
_DA = symbol("da")
_HALF = number(0.5)


@cache
def value_program(activation: str, is_short: bool = False) -> str:
    """``a`` of an activation, a name or a formula; ``is_short``, here and below: in ``short_forms``."""
    return _program(num_parameters(activation), is_short, formula_of(activation))


@cache
def gradient_program(activation: str, is_short: bool = False) -> str:
    """``(a, dgate, dup)`` and the gradient of each parameter; dup is the gradient of a where there is no up half."""
    formula, count = formula_of(activation), num_parameters(activation)
    computed = set(below(formula))
    halves = ("h",) if "h" in symbols_of(formula) else GATED_SYMBOLS
    slopes = [_weighted(derivative(formula, symbol(name)), computed, is_short) for name in halves]
    if len(halves) == 1:
        slopes.append(_DA)
    for name in PARAMETER_SYMBOLS[:count]:
        slope = derivative(formula, symbol(name))
        # Products with da are summed, in one instruction where they are not behind a condition.
        slopes.append(times(_DA, slope) if slope.op == CHOICE else _weighted(slope, computed, is_short))
    return _program(count, is_short, formula, *chosen(*slopes))


@dataclass(frozen=True)
class Cost:
    """What of a program tells how many registers an epilogue takes, as kernels compiled without a GPU showed.

    ``num_steps``: those of long functions count several times. ``num_choices``: conditions, whose two sides are alive at once; as
    many values are in ``half_erf`` as in three of them.
    """

    num_steps: int
    num_choices: int
    is_gated: bool


@cache
def value_cost(activation: str) -> Cost:
    return _cost(value_program(activation), is_gated(activation))


@cache
def gradient_cost(activation: str) -> Cost:
    return _cost(gradient_program(activation), is_gated(activation))


def _cost(program: str, gated: bool) -> Cost:
    functions = [step.split(" ")[0] for step in program.split("|")[0].split(";") if step]
    choices = sum(map(functions.count, ("where", "maximum", "minimum"))) + 3 * functions.count("half_erf")
    return Cost(sum(_WEIGHTS.get(function, 1) for function in functions), choices, gated)


_WEIGHTS = {
    "softplus": 19, "tanh_softplus": 19, "expm1": 12, "log1p": 12, "erf": 6, "half_erf": 7, "tanh": 5, "sin": 14, "cos": 14,
    "draw": 14, "log": 6, "minimum": 2, "maximum": 2,
}  # fmt: skip
"""Functions of several steps; those of one or two count once."""


def _weighted(slope: Node, computed: set[Node], is_short: bool) -> Node:
    """``da * slope``, multiplied so that da, and what is behind a condition, end their lives in registers early.

    If ``is_short``, a condition is on one factor where the other has bounds, since behind the product it spills: on the one that
    da is not in, if it can be, as on da a step of swiglu_clamped takes 3% longer. Where da is infinite it gives NaN then.
    """
    if slope.op == "mul" and slope not in computed:
        small, large = sorted(slope.args, key=lambda factor: (factor.is_number, sum(1 for _ in below(factor))))
        return times(times(_DA, small), large)
    if slope.op == CHOICE:
        mask, weighted = slope.args[0], _weighted(slope.args[1], computed, is_short)
        if is_short and weighted.op == "mul":
            of_da, other = weighted.args
            if of_da.op == "mul" and _is_bounded(of_da.args[1], mask):
                return apply("mul", of_da, choice(mask, other))
            if _is_bounded(other, mask):
                return apply("mul", choice(mask, of_da), other)
        return choice(mask, weighted)
    return times(_DA, slope)


@cache
def _is_bounded(node: Node, mask: Node) -> bool:
    """True if a number, where it is no NaN, lies between bounds: under the mask of a clamp that clamp does."""
    if node.op == "clamp":
        x, *bounds = node.args
        return all(math.isfinite(bound.number) for bound in bounds) or derivative(node, x) is choice(mask, ONE)
    if node.op in ("add", "sub", "mul", "neg"):
        return all(_is_bounded(arg, mask) for arg in node.args)
    return node.is_number or node.op in ("sigmoid", "tanh", "erf")


def _program(num_parameters: int, is_short: bool, *results: Node) -> str:
    first_place = 3 + num_parameters
    made: dict[Node, Node] = {}
    for node in below(*results):
        made[node] = _lowered(node, [made[arg] for arg in node.args])
    results = tuple(made[result] for result in results)
    if is_short:
        results = shortened(*results)
    given = _PLACES | {name: first_place + i for i, name in enumerate(PLACE_SYMBOLS)}
    places = {symbol(name): str(place) for name, place in given.items()}
    draws = any(node.op == "draw" for node in below(*results))
    first_step = first_place + (len(PLACE_SYMBOLS) if draws else 0)
    steps: list[str] = []
    for node in below(*results):
        if node.is_number:
            places[node] = repr(node.number)
        elif not node.symbol:
            places[node] = str(first_step + len(steps))
            function, operands = _step(node)
            steps.append(" ".join((function, *(places[operand] for operand in operands))))
    return f"{';'.join(steps)}|{' '.join(places[result] for result in results)}"


def _step(node: Node) -> tuple[str, tuple[Node, ...]]:
    """The function of a step and what it takes: ``tanh(softplus(x))`` of mish is a function of its own, which is a short one."""
    if node.op == "tanh" and node.args[0].op == "softplus":
        return "tanh_softplus", node.args[0].args
    return node.op, node.args


def _is_half_erf(a: Node, b: Node) -> bool:
    """``erf(x) * 0.5 + 0.5``, as in GELU."""
    return b is _HALF and a.op == "mul" and a.args[1] is _HALF and a.args[0].op == "erf"


def _lowered(node: Node, args: list[Node]) -> Node:
    """A function in terms of those that kernels know."""
    if not node.args:
        return node
    x = args[0]
    match node.op:
        case "relu":
            return apply("maximum", x, ZERO)
        case "clamp":
            low, high = args[1:]
            bounded = x if math.isinf(low.number) else apply("maximum", x, low)
            return bounded if math.isinf(high.number) else apply("minimum", bounded, high)
        case "add" if _is_half_erf(x, args[1]):
            return interned("half_erf", x.args[0].args)
        case "pow":
            return apply("exp", apply("mul", apply("log", x), args[1]))
    return apply(node.op, *args)
