"""Which ids are never negative: weights indexed by -1 are the last expert's, and no expert's for the ops.

Ids of which nothing is known, such as those that a graph is given, are made numbers of experts by the rewrite.
"""

import math

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import IDEMPOTENT, Expr
from moeblaze_ops.lowering.index_notation.indicators import is_indicator

_PLACES = ("var", "div", "mod", "nonzero", "inverse", "group")
_VIEWS = ("reshape", "permute", "slice", "select", "expand", "tile", "spread", "index", "cast")


def never_negative(ids: Expr) -> bool:
    """Whether ids that the graph computes are from 0 on; what it is given, or an operator without a form gives, is trusted."""
    return _least(ids) >= 0


def _least(e: Expr) -> float:
    """A lower bound."""
    if e.kind == "const":
        return e.args[0]
    if e.kind in _PLACES or _is_flag(e):
        return 0
    if e.kind == "leaf":
        return 0 if _is_trusted(e.args[0]) else -math.inf
    if e.kind == "cast":
        return _least(e.args[1])
    if e.kind in ("sum", "prefix"):
        return 0 if _least(e.args[1]) >= 0 else -math.inf
    if e.kind == "add":
        return sum(map(_least, e.args))
    if e.kind == "mul":
        return _least_product(e.args)
    if e.kind == "linear":
        known = all(isinstance(c, int) and c >= 0 for c, _ in e.args[1]) and isinstance(e.args[0], int)
        return e.args[0] + sum(c * _least(atom) for c, atom in e.args[1]) if known else -math.inf
    return _least_call(*e.args) if e.kind == "call" else -math.inf


def _least_call(name: str, operands: tuple[Expr, ...], params: tuple) -> float:
    """A lower bound of a function of whole numbers."""
    if name == "clamp":
        lower, upper = params
        least = _least(operands[0]) if lower is None else max(lower, _least(operands[0]))
        return least if upper is None else min(least, upper)
    if name == "maximum":
        return max(map(_least, operands))
    if name in ("minimum", "where"):
        return min(map(_least, operands[-2:]))
    return 0 if name == "abs" else -math.inf


def _is_flag(e: Expr) -> bool:
    return e.kind in IDEMPOTENT or is_indicator(e)


def _least_product(factors: tuple[Expr, ...]) -> float:
    number = math.prod(f.args[0] for f in factors if f.kind == "const")
    others = [f for f in factors if f.kind != "const"]
    if number >= 0:
        return 0 if all(_least(f) >= 0 for f in others) else -math.inf
    return number if all(map(_is_flag, others)) else -math.inf


def _is_trusted(value: Value) -> bool:
    if value.bound is not None or value.op in ("input", "opaque", "output"):
        return True
    if value.op in ("cat", "stack"):
        return all(map(_is_trusted, value.args[0]))
    return value.op in _VIEWS and not value.dtype.is_floating_point and _is_trusted(value.args[0])
