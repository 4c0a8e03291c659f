"""Formulas as programs for kernels: steps in order, each subexpression once, as a text that is a compile-time argument.

    mul 0 1.702;sigmoid 3;mul 0 4;...|8 11 12

A step is a function and its operands: the number of a value (g or h is 0, u is 1, the gradient of a is 2, then the steps'
own), or a constant, which has a point or an exponent. Behind the bar stand the results.
"""

import math
from dataclasses import dataclass
from functools import cache

from moeblaze_ops.kernels.formulas.derivative import derivative, times
from moeblaze_ops.kernels.formulas.expression import GATED_SYMBOLS, ZERO, Node, apply, below, symbol, symbols_of
from moeblaze_ops.kernels.formulas.named import formula_of, is_gated

IDENTITY_PROGRAM = "|0"
"""Of no activation."""

_PLACES = {"g": 0, "h": 0, "u": 1, "da": 2}
_FIRST_STEP = 3
_DA = symbol("da")


@cache
def value_program(activation: str) -> str:
    """``a`` of an activation, a name or a formula."""
    return _program(formula_of(activation))


@cache
def gradient_program(activation: str) -> str:
    """``(a, dgate, dup)``; dup is the gradient of a where there is no up half."""
    formula = formula_of(activation)
    computed = set(below(formula))
    if "h" in symbols_of(formula):
        return _program(formula, _weighted(derivative(formula, symbol("h")), computed), _DA)
    return _program(formula, *(_weighted(derivative(formula, symbol(name)), computed) for name in GATED_SYMBOLS))


@dataclass(frozen=True)
class Cost:
    """What tells how many registers a gradient takes, as kernels compiled for sm_90 without a GPU showed.

    ``is_long``: it takes more than 144 in the epilogue of the down projection's backward; with more than two choices, too,
    more than 96.
    """

    is_long: bool
    num_choices: int


@cache
def gradient_cost(activation: str) -> Cost:
    """Of the gradient's program."""
    program = gradient_program(activation)
    functions = [step.split(" ")[0] for step in program.split("|")[0].split(";")]
    is_long = is_gated(activation) and sum(_WEIGHTS.get(function, 1) for function in functions) > _MOST_STEPS
    return Cost(is_long, functions.count("where"))


_WEIGHTS = {"softplus": 14, "tanh_softplus": 6, "expm1": 12, "log1p": 12, "erf": 6, "tanh": 5, "sin": 14, "cos": 14, "log": 6}
"""Functions of several steps; those of one or two count once."""

_MOST_STEPS = 18


def _weighted(slope: Node, computed: set[Node]) -> Node:
    """``da * slope``, multiplied so that da, and what is behind a condition, end their lives in registers early."""
    if slope.op == "mul" and slope not in computed:
        small, large = sorted(slope.args, key=lambda factor: (factor.is_number, sum(1 for _ in below(factor))))
        return times(times(_DA, small), large)
    if slope.op == "where" and slope.args[1] is ZERO:
        return apply("where", slope.args[0], ZERO, _weighted(slope.args[2], computed))
    return times(_DA, slope)


def _program(*results: Node) -> str:
    made: dict[Node, Node] = {}
    for node in below(*results):
        made[node] = _lowered(node, [made[arg] for arg in node.args])
    results = tuple(made[result] for result in results)
    places: dict[Node, str] = {}
    steps: list[str] = []
    for node in below(*results):
        if node.symbol:
            places[node] = str(_PLACES[node.symbol])
        elif node.is_number:
            places[node] = repr(node.number)
        else:
            places[node] = str(_FIRST_STEP + len(steps))
            function, operands = _step(node)
            steps.append(" ".join((function, *(places[operand] for operand in operands))))
    return f"{';'.join(steps)}|{' '.join(places[result] for result in results)}"


def _step(node: Node) -> tuple[str, tuple[Node, ...]]:
    """The function of a step and what it takes: ``tanh(softplus(x))`` of mish is a function of its own, which is a short one."""
    if node.op == "tanh" and node.args[0].op == "softplus":
        return "tanh_softplus", node.args[0].args
    return node.op, node.args


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
        case "pow":
            return apply("exp", apply("mul", apply("log", x), args[1]))
    return apply(node.op, *args)
