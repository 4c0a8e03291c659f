"""Which numbers an index may be, and whether a dtype holds them: elsewhere they wrap around, or are rounded.

    ids * 2 + 1, (ids + 256).float()            but not  ids.int() * 2**30 * 4, which is 0

Weights indexed by -1 are the last expert's, and no expert's for the ops. Ids of which nothing is known, such as those that a
graph is given, are made numbers of experts by the rewrite.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import sympy
import torch

from moeblaze_ops.lowering.graph.functional_view import ELEMENTS_OF_FIRST, Value
from moeblaze_ops.lowering.graph.sizes import Size, exact_quotient
from moeblaze_ops.lowering.index_notation.expr import Expr, complement_of, factors_of, linear_parts, split_number
from moeblaze_ops.lowering.index_notation.indicators import LARGEST_EXACT, is_count, is_indicator, most_counted
from moeblaze_ops.lowering.index_notation.intervals import interval_of, is_integer, left_out

_LARGEST = LARGEST_EXACT | {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1, torch.float32: 2**24, torch.float64: 2**53}
_GIVEN = 2**15
"""Numbers of which nothing is known, such as ids that the graph is given, are taken to be no larger."""
_PLACES = ("var", "mod", "nonzero", "inverse", "group")

Floors = Mapping[Expr, float]
"""Expressions that are no less than a number."""


def extent(e: Expr, floors: Floors = MappingProxyType({})) -> Size | None:
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
        case "sum" | "prefix" if is_count(e):
            return most_counted(e) + 1
        case "mul" if len(rest := [factor for factor in args if not is_indicator(factor)]) == 1:
            bound = extent(*rest)
            is_less = bound is not None and any(left_out(mark) == (*rest, bound - 1, bound) for mark in args)
            return max(bound - 1, 1) if is_less else bound
        case "inverse":
            return args[0].shape[0]
        case "leaf":
            return args[0].bound
        case "linear" if never_negative(e, floors):
            end = 1 - _least_sum(-args[0], ((-coefficient, atom) for coefficient, atom in args[1]))
            return None if end == math.inf else int(end) if getattr(end, "is_Integer", True) else sympy.expand(end)
    return None


def never_negative(ids: Expr, floors: Floors = MappingProxyType({})) -> bool:
    """True if ids that the graph computes are from 0 on; what it is given, or an operator without a form gives, is trusted."""
    return lower_bound(ids, floors) >= 0


def lower_bound(e: Expr, floors: Floors = MappingProxyType({})) -> float:
    """A lower bound, where some expressions are no less than their floors; zero for one that is no less for any sizes."""
    if e in floors:
        return max(floors[e], lower_bound(e))
    if e.kind in _PLACES or is_indicator(e):
        return 0
    match e.kind:
        case "const" | "linear":
            least = _least_sum(*linear_parts(e), floors)
            return least if isinstance(least, int | float) else -math.inf if may_be_negative(least) else 0
        case "leaf" if _is_trusted(e.args[0]):
            return 0
        case "div":
            return 0 if never_negative(e.args[0], floors) else -math.inf
        case "cast":
            return lower_bound(e.args[1], floors)
        case "sum" | "prefix" if lower_bound(e.args[1], floors) >= 0:
            return 0 if e.own is None else lower_bound(e.own, floors)
        case "add":
            return sum(lower_bound(term, floors) for term in e.args)
        case "mul":
            return _least_product(*split_number(e), floors)
        case "call":
            return _least_call(e, floors)
    return -math.inf


def _least_sum(constant: Size, terms: Iterable[tuple[Size, Expr]], floors: Floors = MappingProxyType({})) -> Size | float:
    """A lower bound of ``constant + sum(coefficient * atom)``."""
    least = constant
    for coefficient, atom in terms:
        falls = may_be_negative(coefficient)
        end = lower_bound(atom, floors) if not falls else math.inf if (bound := extent(atom)) is None else bound - 1
        if abs(end) == math.inf or (falls and may_be_negative(-coefficient)):
            return -math.inf
        least = least + coefficient * end
    return least


def _least_call(call: Expr, floors: Floors) -> float:
    """A lower bound of a function of whole numbers.

        where((ids >= 2) & (ids < 5), ids - 2, 3)       0: where the mask holds, ids are no less than 2
    """
    name, operands, params = call.args
    if name == "where":
        mask, *chosen = operands
        return min(lower_bound(e, {**floors, **_floors(mask, holds)}) for e, holds in zip(chosen, (True, False), strict=True))
    least = [lower_bound(operand, floors) for operand in operands]
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
    factors, hold = (masks, not holds) if masks else (factors_of(mask), holds)
    told = [interval for factor in factors if (interval := interval_of(factor)) is not None]
    if hold:
        return dict.fromkeys(filter(is_indicator, factors), 1) | {atom: first for atom, first, end in told if end == math.inf}
    return {atom: end for atom, first, end in told if first == -math.inf and len(factors) == 1}


def _least_product(number: float, factors: Sequence[Expr], floors: Floors) -> float:
    if number >= 0:
        told = {**floors, **dict.fromkeys(filter(is_indicator, factors), 1)}  # where one of them is 0 so is the product
        known = all(lower_bound(f, told) >= 0 for f in factors)
        return number * math.prod(max(0, lower_bound(f, floors)) for f in factors) if known else -math.inf
    return number if all(map(is_indicator, factors)) else -math.inf


def _is_trusted(value: Value) -> bool:
    if value.bound is not None or value.op in ("input", "opaque", "output"):
        return True
    if value.op in ("cat", "stack"):
        return all(map(_is_trusted, value.args[0]))
    holds_others = value.op in ELEMENTS_OF_FIRST or value.op == "cast"
    return holds_others and not value.dtype.is_floating_point and _is_trusted(value.args[0])


def may_be_negative(number: Size) -> bool:
    """True if a number is below zero or none, or may be below zero for some sizes."""
    if isinstance(number, int | float):
        return not number >= 0
    return any(coefficient < 0 for coefficient in sympy.expand(number).as_coefficients_dict().values())


def is_whole(e: Expr) -> bool:
    """True if ``e`` is an integer in whatever dtype, of which sums lose nothing."""
    parts = [atom for _, atom in e.args[1]] if e.kind == "linear" else e.args if e.kind in ("mul", "add") else ()
    return is_integer(e) or is_count(e) or (bool(parts) and all(map(is_whole, parts)))


def holds(dtype: torch.dtype, e: Expr) -> bool:
    """True if ``dtype`` holds all that a sum or a product of integers may be; sizes of symbols are those of tensors in memory.

        (ids == e).to(torch.bfloat16) + 256         not this: it is 256 where the mark is 1
    """
    made = dtype in _LARGEST and e.kind in ("const", "linear", "add", "mul") and is_whole(e)
    return not made or _most(e) <= _LARGEST[dtype]


def _most(e: Expr) -> float:
    """The largest number that an integer may be, of either sign, 1 or more; one that wrapped around before may be any."""
    match e.kind:
        case "linear":
            terms = ((1, e.args[0]), *((number, _most(atom)) for number, atom in e.args[1]))
            return sum(abs(number * most) for number, most in terms if isinstance(number * most, int | float))
        case "add":
            return sum(map(_most, e.args))
        case "mul" if not is_count(e):
            return math.prod(map(_most, e.args))
        case "const":
            return abs(e.args[0])
    bound = most_counted(e) + 1 if is_count(e) else extent(e)
    if bound is None:
        return math.inf if e.kind == "leaf" and e.args[0].op == "pointwise" else _GIVEN
    return max(bound - 1, 1) if isinstance(bound, int) else 1
