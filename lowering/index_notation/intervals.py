"""Comparisons of an integer with numbers: which ones it may be, from a first one to one that it is below.

    (ids >= 2) & (ids < 3), ids - 2 == 0, ~((ids < 2) | (ids > 2))          all say  ids = 2
"""

import math

from moeblaze_ops.lowering.graph.stored_numbers import is_integral
from moeblaze_ops.lowering.index_notation.expr import Expr, complement_of, key_and_number, linear_parts

Interval = tuple[Expr, float, float]
"""An integer, the first number that it may be, and one that it is below."""

_INTEGERS = frozenset(("div", "mod", "nonzero", "inverse"))


def is_integer(e: Expr) -> bool:
    """True if an expression is an index, or an integer that a tensor holds; a variable of no extent stands for any number."""
    if e.kind == "var":
        return e.args[1] != 0
    if e.kind == "const":
        return type(e.args[0]) is int
    if e.kind == "leaf":
        return is_integral(e.args[0].dtype)
    return e.kind in _INTEGERS or (e.kind == "linear" and all(is_integer(atom) for _, atom in e.args[1]))


def is_bound(e: Expr) -> bool:
    """True if an integer is no less than a number, or below one."""
    return e.kind == "call" and interval_of(e) is not None


def _has_bounds(e: Expr) -> bool:
    """True if comparisons with numbers are intervals: of an integer, but not of a place among tokens or slots."""
    return e.kind in ("leaf", "div", "mod") and is_integer(e)


def interval_of(e: Expr) -> Interval | None:
    """What a comparison with a number says of an integer."""
    name, sides = e.args[:2] if e.kind == "call" else (e.kind, key_and_number(e))
    if name not in ("eq", "ge", "lt") or None in sides or not _has_bounds(sides[0]):
        return None
    atom, number = sides[0], sides[1].args[0]
    if sides[1].kind != "const" or type(number) is not int:
        return None
    return atom, -math.inf if name == "lt" else number, number + 1 if name == "eq" else number if name == "lt" else math.inf


def left_out(e: Expr) -> Interval | None:
    """The one number that a factor ``1 - [integer = number]`` leaves out."""
    masks = complement_of(e)
    return interval_of(masks[0]) if len(masks) == 1 and masks[0].kind == "eq" else None


def solved(name: str, difference: Expr) -> Interval | None:
    """Which numbers an integer may be, of which a multiple and a constant are less (or greater) than zero."""
    constant, terms = linear_parts(difference)
    ((scale, atom), *others) = terms
    if others or type(scale) is not int or type(constant) is not int or not _has_bounds(atom):
        return None
    if scale < 0:
        name = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}[name]
        scale, constant = -scale, -constant
    least = -(constant // scale)  # of which the multiple is no less than -constant
    above = -constant // scale + 1  # of which it is greater
    end = least if name in ("ge", "lt") else above
    return (atom, end, math.inf) if name in ("ge", "gt") else (atom, -math.inf, end)
