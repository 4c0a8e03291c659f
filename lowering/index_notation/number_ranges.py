"""Which numbers an index may be, and whether a dtype holds them: elsewhere they wrap around, or are rounded.

    ids * 2 + 1, (ids + 256).float()            but not  ids.int() * 2**30 * 4, which is 0
"""

import math

import sympy
import torch

from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.indicators import LARGEST_EXACT

_LARGEST = LARGEST_EXACT | {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1, torch.float32: 2**24, torch.float64: 2**53}
_GIVEN = 2**15
"""Numbers of which nothing is known, such as ids that the graph is given, are taken to be no larger."""


def extent(e: Expr) -> Size | None:
    """An exclusive upper bound of a non-negative index expression, or None when there is none."""
    args = e.args
    match e.kind:
        case "var" | "mod":
            return args[1]
        case "const":
            return None if may_be_negative(args[0]) else args[0] + 1
        case "div":
            bound = None if args[1] == 0 else extent(args[0])
            if isinstance(bound, int) and isinstance(args[1], int):
                return -(-bound // args[1])
            return None if bound is None else exact_quotient(bound, args[1])
        case "nonzero":
            return args[3]
        case "inverse":
            return args[0].shape[0]
        case "leaf":
            return args[0].bound
        case "linear":
            bounds = [extent(atom) for _, atom in args[1]]
            if None in bounds or any(map(may_be_negative, (args[0], *(coefficient for coefficient, _ in args[1])))):
                return None
            most = sum((c * (bound - 1) for (c, _), bound in zip(args[1], bounds, strict=True)), args[0] + 1)
            return int(most) if getattr(most, "is_Integer", True) else sympy.expand(most)
    return None


def exact_quotient(number: Size, size: Size) -> Size | None:
    """``number / size`` where that is known to be whole."""
    if isinstance(number, int) and isinstance(size, int):
        return number // size if number % size == 0 else None
    ratio = sympy.cancel(sympy.sympify(number) / sympy.sympify(size))
    if sympy.denom(ratio) != 1:
        return None
    return int(ratio) if ratio.is_Integer else ratio


def may_be_negative(number: Size) -> bool:
    """True if a number is below zero or none, or may be below zero for some sizes."""
    if isinstance(number, int | float):
        return not number >= 0
    return any(coefficient < 0 for coefficient in sympy.expand(number).as_coefficients_dict().values())


def holds(dtype: torch.dtype, e: Expr) -> bool:
    """True if ``dtype`` holds all that an index may be; sizes that are symbols are those of tensors in memory."""
    if dtype not in _LARGEST or e.kind not in ("const", "linear"):
        return True
    constant, terms = e.args if e.kind == "linear" else (e.args[0], ())
    largest: float = abs(constant) if isinstance(constant, int) else 0
    for coefficient, atom in terms:
        bound = extent(atom)
        if isinstance(coefficient, int) and (bound is None or isinstance(bound, int)):
            largest += abs(coefficient) * (_most_given(atom) if bound is None else max(bound - 1, 0))
    return largest <= _LARGEST[dtype]


def _most_given(atom: Expr) -> float:
    """The largest number that an atom without a bound may be; one that wrapped around before may be any."""
    return math.inf if atom.kind == "leaf" and atom.args[0].op == "pointwise" else _GIVEN
