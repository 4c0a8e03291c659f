"""Which ids are never negative: weights indexed by -1 are the last expert's, and no expert's for the ops.

Ids of which nothing is known, such as those that a graph is given, are made numbers of experts by the rewrite.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from moeblaze_ops.lowering.graph.functional_view import ELEMENTS_OF_FIRST, Value
from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr, complement_of, factors_of, split_number
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.intervals import interval_of
from moeblaze_ops.lowering.index_notation.number_ranges import extent, may_be_negative

Floors = Mapping[Expr, float]

_PLACES = ("var", "div", "mod", "nonzero", "inverse", "group")


def never_negative(ids: Expr, floors: Floors = MappingProxyType({})) -> bool:
    """True if ids that the graph computes are from 0 on; what it is given, or an operator without a form gives, is trusted."""
    return _least(ids, floors) >= 0


def _least(e: Expr, floors: Floors = MappingProxyType({})) -> float:
    """A lower bound, where some expressions are no less than their floors."""
    if e in floors:
        return max(floors[e], _least(e))
    if e.kind == "const":
        return e.args[0]
    if e.kind in _PLACES or is_indicator(e):
        return 0
    if e.kind == "leaf":
        return 0 if _is_trusted(e.args[0]) else -math.inf
    if e.kind == "cast":
        return _least(e.args[1], floors)
    if e.kind in ("sum", "prefix"):
        return 0 if _least(e.args[1], floors) >= 0 else -math.inf
    if e.kind == "add":
        return sum(_least(term, floors) for term in e.args)
    if e.kind == "mul":
        return _least_product(*split_number(e), floors)
    if e.kind == "linear":
        return _least_linear(e.args[0], e.args[1], floors)
    return _least_call(e, floors) if e.kind == "call" else -math.inf


def _least_linear(constant: Size, terms: Sequence[tuple[Size, Expr]], floors: Floors) -> float:
    """A lower bound of ``constant + sum(coefficient * atom)``; zero for one that is no less for any sizes."""
    least = constant
    for coefficient, atom in terms:
        falls = may_be_negative(coefficient)
        end = (extent(atom) or math.inf) - 1 if falls else _least(atom, floors)
        if abs(end) == math.inf or (falls and may_be_negative(-coefficient)):
            return -math.inf
        least = least + coefficient * end
    return least if isinstance(least, int) else -math.inf if may_be_negative(least) else 0


def _least_call(call: Expr, floors: Floors) -> float:
    """A lower bound of a function of whole numbers.

        where((ids >= 2) & (ids < 5), ids - 2, 3)       0: where the mask holds, ids are no less than 2
    """
    name, operands, params = call.args
    if name == "where":
        mask, *chosen = operands
        return min(_least(e, {**floors, **_floors(mask, holds)}) for e, holds in zip(chosen, (True, False), strict=True))
    least = [_least(operand, floors) for operand in operands]
    if name == "clamp":
        lower, upper = params
        bound = least[0] if lower is None else max(lower, least[0])
        return bound if upper is None else min(bound, upper)
    if name == "maximum":
        return max(least)
    if name == "minimum":
        return min(least)
    return 0 if name == "abs" else -math.inf


def _floors(mask: Expr, holds: bool) -> Floors:
    """What integers are no less than where a mask holds, or where it does not."""
    masks = complement_of(mask)
    return _floors_of(masks, not holds) if masks else _floors_of(factors_of(mask), holds)


def _floors_of(factors: Sequence[Expr], hold: bool) -> Floors:
    told = [interval for factor in factors if (interval := interval_of(factor)) is not None]
    if hold:
        return {atom: first for atom, first, end in told if end == math.inf}
    return {atom: end for atom, first, end in told if first == -math.inf and len(factors) == 1}


def _least_product(number: float, factors: Sequence[Expr], floors: Floors) -> float:
    if number >= 0:
        return 0 if all(_least(f, floors) >= 0 for f in factors) else -math.inf
    return number if all(map(is_indicator, factors)) else -math.inf


def _is_trusted(value: Value) -> bool:
    if value.bound is not None or value.op in ("input", "opaque", "output"):
        return True
    if value.op in ("cat", "stack"):
        return all(map(_is_trusted, value.args[0]))
    holds_others = value.op in ELEMENTS_OF_FIRST or value.op == "cast"
    return holds_others and not value.dtype.is_floating_point and _is_trusted(value.args[0])
