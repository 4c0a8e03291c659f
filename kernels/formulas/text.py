"""Formulas as text: ``g * sigmoid(1.702 * g) * (u + 1.0)``, which is how operators take them, and back.

The syntax is that of Python's expressions, of which nothing is ever executed: names of symbols and functions, numbers,
``+ - * / **``, comparisons, ``& | ~`` of them. ``where(x > 0.0, x, y)``, ``clamp(x, -1.0, 1.0)`` with None for no bound.
"""

import ast
import math
from functools import cache

from moeblaze_ops.kernels.formulas.composites import COMPOSITES
from moeblaze_ops.kernels.formulas.expression import (
    ARITY,
    COMPARISONS,
    GATED_SYMBOLS,
    PARAMETER_SYMBOLS,
    PLACE_SYMBOLS,
    UNGATED_SYMBOLS,
    Node,
    apply,
    below,
    number,
    symbol,
    symbols_of,
)

MOST_CHARACTERS = 2000
MOST_NODES = 200
"""Of a formula: what is longer is no activation that anybody has written, and takes long to compile."""

_INFIX = {
    "or": ("|", 2), "and": ("&", 3), "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1), "eq": ("==", 1),
    "ne": ("!=", 1), "add": ("+", 4), "sub": ("-", 4), "mul": ("*", 5), "div": ("/", 5),
}  # fmt: skip
_ATOM = 9
_UNARY = 6

_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.BitAnd: "and", ast.BitOr: "or",
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip


def to_text(root: Node) -> str:
    """The text of a formula, of which ``parse`` makes it again.

    Raises:
        ValueError: it is too long.
    """
    texts: dict[Node, tuple[str, int]] = {}
    for node in below(root):
        texts[node] = text, _ = _text(node, texts)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"a formula of more than {MOST_CHARACTERS} characters")
    return texts[root][0]


def _text(node: Node, texts: dict[Node, tuple[str, int]]) -> tuple[str, int]:
    """The text and how tightly it binds."""
    if node.symbol:
        return node.symbol, _ATOM
    if node.is_number:
        infinite = "None" if math.isinf(node.number) else repr(node.number)
        return infinite, _ATOM if node.number >= 0 else _UNARY
    parts = [texts[arg] for arg in node.args]
    if node.op in ("neg", "not"):
        return ("-" if node.op == "neg" else "~") + _inside(parts[0], _UNARY), _UNARY
    if node.op in _INFIX:
        sign, level = _INFIX[node.op]
        # Sums and products are read from the left, and comparisons never stand side by side.
        left = level + (node.op in COMPARISONS)
        return f"{_inside(parts[0], left)} {sign} {_inside(parts[1], level + 1)}", level
    return f"{node.op}({', '.join(text for text, _ in parts)})", _ATOM


def _inside(part: tuple[str, int], level: int) -> str:
    text, own = part
    return text if own >= level else f"({text})"


@cache
def parse(text: str) -> Node:
    """The formula that ``text`` is.

    Raises:
        ValueError: it is none; the message says which part of it.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("no expression") from error
    root = _read(tree)
    check_root(root)
    return root


def check_root(root: Node) -> None:
    """Refuse what is no function of (g, u) or of h, or is too long, as a ValueError."""
    names = symbols_of(root).difference(PARAMETER_SYMBOLS, PLACE_SYMBOLS)
    if not names or not (names <= set(GATED_SYMBOLS) or names <= set(UNGATED_SYMBOLS)):
        found = ", ".join(sorted(names)) or "no symbol"
        raise ValueError(f"a function of {found} instead of g and u (gated), or of h (ungated)")
    if root.is_logical:
        raise ValueError("a comparison instead of a number")
    read = [arg for node in below(root) for arg in (node.args[:1] if node.op == "clamp" else node.args)]
    if any(arg.is_number and math.isinf(arg.number) for arg in read):
        raise ValueError("a constant that is infinite")
    if sum(1 for _ in below(root)) > MOST_NODES:
        raise ValueError(f"more than {MOST_NODES} steps")


def _read(tree: ast.expr) -> Node:
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return number(value)
        case ast.Name(id=name) if name in (*GATED_SYMBOLS, *UNGATED_SYMBOLS, *PARAMETER_SYMBOLS, *PLACE_SYMBOLS):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return apply("neg", _read(operand))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return apply("not", _read(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return apply(_BINARY[type(op)], _read(left), _read(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _BINARY:
            return apply(_BINARY[type(op)], _read(left), _read(right))
        case ast.Call(func=ast.Name(id="clamp"), args=[x, low, high], keywords=[]):
            return apply("clamp", _read(x), _bound(low, -math.inf), _bound(high, math.inf))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in ARITY:
            return apply(name, *map(_read, args))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in COMPOSITES:
            return COMPOSITES[name](*map(_read, args))
    raise ValueError(f"{ast.unparse(tree)!r}, which is no symbol, number or known function")


def _bound(tree: ast.expr, missing: float) -> Node:
    return number(missing) if isinstance(tree, ast.Constant) and tree.value is None else _read(tree)
