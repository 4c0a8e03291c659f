"""Which ids are never negative: weights indexed by -1 are the last expert's, and no expert's for the ops.

Ids of which nothing is known, such as those that a graph is given, are made numbers of experts by the rewrite.
"""

import math

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import IDEMPOTENT, Expr

_PLACES = ("var", "div", "mod", "nonzero", "inverse", "group")
_VIEWS = ("reshape", "permute", "slice", "select", "expand", "tile", "spread", "index", "cast")


def never_negative(ids: Expr) -> bool:
    """Whether ids that the graph computes are from 0 on; what it is given, or an operator without a form gives, is trusted."""
    return _least(ids) >= 0


def _least(e: Expr) -> float:
    """A lower bound."""
    if e.kind == "const":
        return e.args[0]
    if e.kind in _PLACES or e.kind in IDEMPOTENT:
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
    return -math.inf


def _least_product(factors: tuple[Expr, ...]) -> float:
    number = math.prod(f.args[0] for f in factors if f.kind == "const")
    others = [f for f in factors if f.kind != "const"]
    if number >= 0:
        return 0 if all(_least(f) >= 0 for f in others) else -math.inf
    return number if all(f.kind in IDEMPOTENT for f in others) else -math.inf


def _is_trusted(value: Value) -> bool:
    if value.bound is not None or value.op in ("input", "opaque", "output"):
        return True
    if value.op in ("cat", "stack"):
        return all(map(_is_trusted, value.args[0]))
    return value.op in _VIEWS and not value.dtype.is_floating_point and _is_trusted(value.args[0])
