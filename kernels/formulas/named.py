"""The activations that have a name: each is a formula like any other."""

import math
from functools import cache
from typing import Any

from moeblaze_ops.kernels.formulas.constants import as_used
from moeblaze_ops.kernels.formulas.expression import FUNCTIONS, PARAMETER_SYMBOLS, Node, below, symbols_of
from moeblaze_ops.kernels.formulas.text import parse, to_text

IDENTITY = "identity"

CLAMP_ALPHA = 1.702
CLAMP_LIMIT = 7.0
"""``swiglu_clamped`` is that of gpt-oss."""

SILU_LIMIT = 10.0
"""``swiglu_limited`` is that of DeepSeek-V4: SwiGLU of halves that are clamped."""

NAMED = {
    "swiglu": "silu(g) * u",
    "geglu": "gelu(g) * u",
    "geglu_tanh": "gelu_tanh(g) * u",
    "reglu": "relu(g) * u",
    "swiglu_clamped": (
        f"clamp(g, None, {CLAMP_LIMIT}) * sigmoid({CLAMP_ALPHA} * clamp(g, None, {CLAMP_LIMIT}))"
        f" * (clamp(u, -{CLAMP_LIMIT}, {CLAMP_LIMIT}) + 1.0)"
    ),
    "swiglu_limited": f"silu(clamp(g, None, {SILU_LIMIT})) * clamp(u, -{SILU_LIMIT}, {SILU_LIMIT})",
    "silu": "silu(h)",
    "gelu": "gelu(h)",
    "gelu_tanh": "gelu_tanh(h)",
    "relu": "relu(h)",
    "relu2": "square(relu(h))",
}
"""The formula of every named activation; ``identity`` (no activation) is accepted by the ops but not listed here."""

_SQRT_HALF = 1 / math.sqrt(2)
_SLOPE = 2 * math.sqrt(2 / math.pi)

_BY_HAND = {
    "gelu": f"h * (erf(h * {_SQRT_HALF}) + 1.0) * 0.5",
    "geglu": f"g * (erf(g * {_SQRT_HALF}) + 1.0) * 0.5 * u",
    "gelu_tanh": f"h * sigmoid((h + h * h * h * 0.044715) * {_SLOPE})",
    "geglu_tanh": f"g * sigmoid((g + g * g * g * 0.044715) * {_SLOPE}) * u",
}
"""Other ways to write some of them."""


def formula_of(activation: str) -> Node:
    """The formula of a name or of a text.

    Raises:
        ValueError: it is neither; the message says why it is no formula.
    """
    return parse("h" if activation == IDENTITY else NAMED.get(activation, activation))


def name_of(root: Node, *, double: bool = False) -> str:
    """How ops take a formula: its name where it has one, up to the order of sums and products, else its text.

    A number is that of the name to its last bit in fp32, or in fp64 if it is used in ``double``.

    Raises:
        ValueError: it is too long.
    """
    return _named(double).get(_unordered(root, double)) or to_text(root)


def is_formula_of(activation: str, root: Node, *, double: bool) -> bool:
    """True if a name or a text is that of a formula: its numbers are read as ``name_of`` reads them.

    Raises:
        ValueError: it is no activation.
    """
    key = _unordered(root, double)
    return key == _unordered(formula_of(activation), double) or _named(double).get(key) == activation


@cache
def _named(double: bool) -> dict[int, str]:
    return {_unordered(parse(text), double): name for name, text in (*NAMED.items(), *_BY_HAND.items())}


_classes: dict[Any, int] = {}
"""Numbers of the keys below, so that a key holds those of its parts as numbers."""


def _unordered(root: Node, double: bool) -> int:
    """A number that formulas share which differ in the order of sums and products alone."""
    flat: dict[Node, tuple[int, ...]] = {}
    numbers: dict[Node, int] = {}
    for node in below(root):
        parts = [numbers[arg] for arg in node.args]
        if node.op in ("add", "mul"):
            parts = sorted(part for arg in node.args for part in (flat[arg] if arg.op == node.op else (numbers[arg],)))
            flat[node] = tuple(parts)
        key = (node.op, node.symbol, as_used(node.number, double), *parts)
        numbers[node] = _classes.setdefault(key, len(_classes))
    return numbers[root]


def is_gated(activation: str) -> bool:
    """True if it has a gate and an up half."""
    return "h" not in symbols_of(formula_of(activation))


def num_parameters(activation: str) -> int:
    """P: parameters up to the last one that it reads, of p0, p1 and so on; 0 for most."""
    own = symbols_of(formula_of(activation)).intersection(PARAMETER_SYMBOLS)
    return max((PARAMETER_SYMBOLS.index(name) + 1 for name in own), default=0)


def value_at_zero(activation: str) -> float:
    """What an activation of zeros is, for parameters that are no special numbers; NaN where a part is not finite."""
    values: dict[Node, float] = {}
    for node in below(formula_of(activation)):
        number = 0.37 if node.symbol in PARAMETER_SYMBOLS else node.number
        try:
            values[node] = FUNCTIONS[node.op](*(values[arg] for arg in node.args)) if node.args else number
        except (ArithmeticError, ValueError):  # a quotient by zero, or a logarithm of it
            values[node] = math.nan
    return values[node]


def is_zero_at_zero(activation: str) -> bool:
    """True if an activation of zeros is zero; one with parameters counts as none."""
    return not num_parameters(activation) and value_at_zero(activation) == 0


@cache
def keeps_zero(function: str) -> bool:
    """True if a function of formulas, by its name, makes zero of zero; the gradient of a square root is infinite there.

        gelu, tanh              but not  exp, sqrt
    """
    text = f"{function}(h)"
    return function != "sqrt" and why_no_formula(text) is None and is_zero_at_zero(text)


def why_no_formula(text: str) -> str | None:
    """What keeps a text from being a formula."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return None


# A compiler that traces a call has texts at hand, and takes what is known of them.
is_gated._dynamo_marked_constant = True  # type: ignore[attr-defined]
num_parameters._dynamo_marked_constant = True  # type: ignore[attr-defined]
why_no_formula._dynamo_marked_constant = True  # type: ignore[attr-defined]
