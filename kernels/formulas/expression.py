"""Pointwise formulas as expressions: interned nodes over the symbols ``g``, ``u`` (gated) or ``h`` (ungated), and numbers.

The symbols ``p0``, ``p1`` and so on are parameters: one number for all rows and features of an expert, known only when run.
``n`` and ``f`` are the numbers of the row and of the feature, for ``draw(p0, n, f)``: a random number in [0, 1), of a seed.

Equal expressions are one object, so that a subexpression is computed once wherever it stands. The constructors fold numbers
and write what has a stable function in its terms (``1 / (1 + exp(-x))`` is ``sigmoid(x)``); they never drop a tensor, so
that infinities and NaN come out as in the formula as it was written.
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from moeblaze_ops.kernels.formulas.constants import add_up, is_moderate, multiply

GATED_SYMBOLS = ("g", "u")
UNGATED_SYMBOLS = ("h",)
PARAMETER_SYMBOLS = ("p0", "p1", "p2", "p3")
PLACE_SYMBOLS = ("n", "f")

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LOGICAL = (*COMPARISONS, "and", "or", "not")
ARITY = {
    **dict.fromkeys(("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "log1p", "expm1", "softplus"), 1),
    **dict.fromkeys(("sin", "cos", "relu", "not"), 1),
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "pow", "and", "or", *COMPARISONS), 2),
    **dict.fromkeys(("where", "clamp", "draw"), 3),
}
"""The functions that formulas are made of. ``pow`` takes a number as exponent, ``clamp`` numbers (infinite: none) as bounds."""
MASKS = {"and": 2, "or": 2, "not": 1, "where": 1}
"""How many of a function's first arguments are masks, of those that take any."""

FUNCTIONS: dict[str, Callable[..., float]] = {
    "neg": lambda x: -x, "abs": abs, "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x),
    "tanh": math.tanh, "erf": math.erf, "log1p": math.log1p, "expm1": math.expm1, "sin": math.sin, "cos": math.cos,
    "relu": lambda x: max(x, 0.0), "maximum": lambda x, y: y if y > x or y != y else x,
    "minimum": lambda x, y: y if y < x or y != y else x, "pow": math.pow, "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))), "clamp": lambda x, low, high: min(max(x, low), high),
    "where": lambda mask, x, y: x if mask else y, "not": operator.not_, "and": operator.and_, "or": operator.or_,
    **{name: getattr(operator, name) for name in COMPARISONS},
}  # fmt: skip
"""What they are of Python's numbers, but for ``draw``."""


@dataclass(frozen=True, eq=False)
class Node:
    """``number`` of a constant (``op`` is ``"number"``), ``symbol`` of a symbol, else a function ``op`` of ``args``."""

    op: str
    args: tuple["Node", ...] = ()
    number: float = 0.0
    symbol: str = ""

    @property
    def is_number(self) -> bool:
        return self.op == "number"

    @property
    def is_logical(self) -> bool:
        return self.op in LOGICAL


@cache
def interned(op: str, args: tuple[Node, ...] = (), number: float = 0.0, symbol: str = "") -> Node:
    """The one node of these parts, as it is; ``apply`` gives it its canonical form."""
    return Node(op, args, number, symbol)


def number(value: float) -> Node:
    """A constant. Raises ValueError for NaN."""
    if math.isnan(value):
        raise ValueError("a constant that is NaN")
    return interned("number", (), float(value) + 0.0, "")


def symbol(name: str) -> Node:
    return interned("symbol", (), 0.0, name)


ZERO, ONE = number(0.0), number(1.0)


def as_number(node: Node) -> Node:
    """One and zero of a mask, a number as it is."""
    return apply("where", node, ONE, ZERO) if node.is_logical else node


def apply(op: str, *args: Node) -> Node:
    """``op(*args)`` in its canonical form.

    Raises:
        ValueError: there is no such function of these arguments.
    """
    _check(op, args)
    if op in FUNCTIONS and all(arg.is_number for arg in args):
        try:
            return number(FUNCTIONS[op](*(arg.number for arg in args)))
        except (ArithmeticError, ValueError) as error:
            raise ValueError(f"{op} of {', '.join(str(arg.number) for arg in args)}") from error
    simplify = _SIMPLIFIED.get(op)
    found = simplify(*args) if simplify else None
    return interned(op, args, 0.0, "") if found is None else found


def _check(op: str, args: tuple[Node, ...]) -> None:
    if ARITY.get(op) != len(args):
        raise ValueError(f"no function {op} of {len(args)} arguments")
    for position, arg in enumerate(args):
        if arg.is_logical != (position < MASKS.get(op, 0)):
            raise ValueError(f"{op} of {'a comparison' if arg.is_logical else 'a number'}")
    if op in COMPARISONS and all(arg.is_number for arg in args):
        raise ValueError("a comparison of two constants")
    numbers = {"pow": (1,), "clamp": (1, 2)}.get(op, ())
    if not all(args[position].is_number for position in numbers):
        raise ValueError(f"{op} whose {'exponent' if op == 'pow' else 'bounds'} are no numbers")


def _add(a: Node, b: Node) -> Node | None:
    if a.is_number:
        return apply("add", b, a)
    if b is ZERO:
        return a
    if a is b:
        return apply("mul", a, number(2))
    if b.op == "neg":
        return apply("sub", a, b.args[0])
    if a.op == "neg":
        return apply("sub", b, a.args[0])
    if b is ONE and a.op == "tanh":  # without the cancellation where tanh is nearly -1
        return apply("mul", apply("sigmoid", apply("mul", a.args[0], number(2))), number(2))
    if b.is_number and a.op == "add" and a.args[1].is_number and add_up(a.args[1].number, b.number):
        return apply("add", a.args[0], number(a.args[1].number + b.number))
    return None


def _sub(a: Node, b: Node) -> Node | None:
    if b.is_number:
        return apply("add", a, number(-b.number))
    if a is ZERO:
        return apply("neg", b)
    return apply("add", a, b.args[0]) if b.op == "neg" else None


def _neg(a: Node) -> Node | None:
    if a.op == "neg":
        return a.args[0]
    if a.op == "mul" and a.args[1].is_number:
        return apply("mul", a.args[0], number(-a.args[1].number))
    return None


def _mul(a: Node, b: Node) -> Node | None:
    if a.is_number:
        return apply("mul", b, a)
    if b is ONE:
        return a
    if b.is_number and b.number == -1:
        return apply("neg", a)
    (a, one), (b, other) = _apart(a), _apart(b)
    if one != 1 or (other != 1 and b is not ONE and not b.is_number):
        if b is ONE:
            return apply("mul", a, number(one * other)) if other == 0 or multiply(one, other) else None
        if is_moderate(one) and is_moderate(other):
            return apply("mul", apply("mul", a, b), number(one * other))
    return None


def _apart(a: Node) -> tuple[Node, float]:
    """``a`` as a node times a number."""
    if a.is_number:
        return ONE, a.number
    if a.op == "neg":
        return a.args[0], -1.0
    return (a.args[0], a.args[1].number) if a.op == "mul" and a.args[1].is_number else (a, 1.0)


def _is_finite(value: float) -> bool:
    return math.isfinite(value) and (value == 0 or abs(value) > 1e-37)


def _div(a: Node, b: Node) -> Node | None:
    if b.is_number and b.number != 0 and _is_finite(1 / b.number):
        return apply("mul", a, number(1 / b.number))
    exponential = _exponential_plus_one(b)
    if exponential is not None:
        return apply("mul", a, apply("sigmoid", apply("neg", exponential)))
    return None


def _exponential_plus_one(a: Node) -> Node | None:
    """z of ``1 + exp(z)``."""
    return a.args[0].args[0] if a.op == "add" and a.args[1] is ONE and a.args[0].op == "exp" else None


_POWERS: dict[float, Callable[[Node], Node]] = {
    0.5: lambda x: apply("sqrt", x),
    -0.5: lambda x: apply("rsqrt", x),
    1: lambda x: x,
}


def _pow(a: Node, exponent: Node) -> Node | None:
    n = exponent.number
    if n in _POWERS:
        return _POWERS[n](a)
    if n != int(n) or not 0 < abs(n) <= 64:
        return None
    if n < 0:
        return apply("div", ONE, apply("pow", a, number(-n)))
    half = apply("pow", a, number(n // 2))
    square = apply("mul", half, half)
    return apply("mul", square, a) if n % 2 else square


def _clamp(a: Node, low: Node, high: Node) -> Node | None:
    return a if (low.number, high.number) == (-math.inf, math.inf) else None


def _where(mask: Node, kept: Node, other: Node) -> Node | None:
    if kept is other:
        return kept
    return apply("where", mask.args[0], other, kept) if mask.op == "not" else None


def _not(a: Node) -> Node | None:
    return a.args[0] if a.op == "not" else None


_SIMPLIFIED: dict[str, Callable[..., Node | None]] = {
    "add": _add, "sub": _sub, "neg": _neg, "mul": _mul, "div": _div, "pow": _pow,
    "clamp": _clamp, "where": _where, "not": _not,
}  # fmt: skip


def below(*roots: Node) -> Iterator[Node]:
    """The nodes under ``roots``, each once, behind those that it is made of."""
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))


@cache
def symbols_of(root: Node) -> frozenset[str]:
    return frozenset(node.symbol for node in below(root) if node.symbol)
