"""Pointwise functions of expressions: all that sums and products can say is said by them."""

import math
import operator
from collections import Counter
from collections.abc import Sequence

import torch

from moeblaze_ops.kernels.formulas.named import keeps_zero
from moeblaze_ops.lowering.index_notation.expr import DETACH, Expr, complement_of, differ, factors_of, is_hidden
from moeblaze_ops.lowering.index_notation.indicators import is_choice, is_indicator
from moeblaze_ops.lowering.index_notation.intervals import interval_of, is_bound, is_integer, solved
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.number_ranges import is_whole, never_negative

_EXACT = (0, 0.5, 1)
"""Numbers that every dtype holds as they are, beside zeros and ones."""
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def apply_pointwise(algebra: Algebra, name: str, args: list[Expr], params: tuple, *, integers: bool) -> Expr:
    """The canonical form of a pointwise function of elements; ``integers`` selects index arithmetic."""
    a, b = args[0], args[1] if len(args) > 1 else algebra.zero
    integers = integers or (all(map(is_whole, args)) and not all(e.kind in ("const", "add") or is_indicator(e) for e in args))
    match name:
        case "add" | "sub" | "rsub" | "neg":
            scale_a, scale_b = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1), "neg": (-1, 0)}[name]
            if integers:
                return algebra.linear(0, [(scale_a, a), (scale_b, b)])
            return algebra.add(*(e if s == 1 else algebra.mul(algebra.const(s), e) for s, e in ((scale_a, a), (scale_b, b)) if s))
        case "mul" | "and":
            if integers and "const" in (a.kind, b.kind):
                number, e = (a, b) if a.kind == "const" else (b, a)
                return algebra.linear(0, [(number.args[0], e)])
            return algebra.mul(a, b)
        case "div" if b.kind == "const" and b.args[0] != 0:
            return algebra.mul(a, algebra.const(1 / b.args[0]))
        case "div" if not is_hidden(b):
            return algebra.mul(a, algebra.call("reciprocal", (b,)))
        case "floordiv" if integers and b.kind == "const" and type(b.args[0]) is int and b.args[0] > 0:
            return algebra.div(a, b.args[0])
        case "mod" if integers and b.kind == "const" and type(b.args[0]) is int and b.args[0] > 0:
            return algebra.mod(a, b.args[0])
        case "ceil" | "floor" if is_integer(a):
            return a
        case "square":
            return algebra.mul(a, a)
        case "silu":
            return algebra.mul(a, algebra.call("sigmoid", (a,)))
        case "clamp" if (integers or a is algebra.zero) and _stays(algebra, a, *params):
            return a
        case _ if a is algebra.zero and len(args) == 1 and not params and keeps_zero(name):
            return a
        case "minimum" if integers and "const" in (a.kind, b.kind):
            number, e = (a, b) if a.kind == "const" else (b, a)
            least = number if never_negative(algebra.linear(0, [(1, e), (-1, number)])) else algebra.call(name, (a, b))
            return e if _stays(algebra, e, None, number.args[0]) else least
        case "minimum" if integers and (marks := [m for e in args if e.kind == "linear" for m in e.children if is_indicator(m)]):
            sides = ([algebra.substitute(e, {marks[0]: number}) for e in args] for number in (algebra.one, algebra.zero))
            return algebra.call("where", (marks[0], *(apply_pointwise(algebra, name, s, params, integers=True) for s in sides)))
        case "lt" | "le" | "gt" | "ge" if integers and (known := _known(algebra, name, a, b)) is not None:
            return known
        case "lt" | "le" | "gt" | "ge" if is_integer(a) and is_integer(b):
            difference = algebra.linear(0, [(1, a), (-1, b)])
            if difference.kind == "const":
                return algebra.const(int(getattr(operator, name)(difference.args[0], 0)))
            interval = solved(name, difference)
            return algebra.call(name, (a, b)) if interval is None else algebra.between(interval)
        case "or" if algebra.zero in (a, b) or a is b:
            return b if a is algebra.zero else a
        case "or" if is_hidden(a) or is_hidden(b):
            return algebra.call(name, (a, b))
        case "or" if (is_bound(a) or is_bound(b)) and interval_of(a) and interval_of(b):
            return _not(algebra, algebra.mul(_not(algebra, a), _not(algebra, b)))
        case "or" if is_indicator(a) and is_indicator(b):
            return algebra.cast(torch.bool, algebra.add(a, b))
        case "eq" | "ne" if is_hidden(a) or is_hidden(b):  # NaN equals nothing
            return algebra.call(name, (a, b))
        case "eq":
            return algebra.eq(a, b)
        case "ne":
            return _not(algebra, algebra.eq(a, b))
        case "not":
            return _not(algebra, a)
        case _ if name == DETACH:
            return algebra.detached(a)
        case "where" if not is_hidden(a):  # else it is no product: of NaN h * (h > 0) is NaN, and where(h > 0, h, 0) is zero
            return _where(algebra, *args)
    return algebra.call(name, tuple(args), *params)


def _known(algebra: Algebra, name: str, a: Expr, b: Expr) -> Expr | None:
    """Whether the index ``a`` is less (or greater) than a number, where the ends of its range agree, or those of each choice."""
    if is_choice(a) and not never_negative(a):
        mask, *sides = a.args[1]
        known = [_known(algebra, name, side, b) for side in sides]
        return None if None in known else _where(algebra, mask, *known)
    end = algebra.extent(a)
    ends = (a.args[0],) if a.kind == "const" and is_whole(a) else (0, end - 1) if isinstance(end, int) else ()
    if b.kind != "const" or not isinstance(b.args[0], int | float):
        return None
    found = {getattr(operator, name)(number, b.args[0]) for number in ends}
    return algebra.const(int(*found)) if len(found) == 1 else None


def _stays(algebra: Algebra, a: Expr, lower: float | None, upper: float | None) -> bool:
    """True if the whole range of the index ``a`` lies inside the bounds."""
    end = algebra.extent(a)
    return isinstance(end, int) and (lower is None or lower <= 0) and (upper is None or end - 1 <= upper)


def _where(algebra: Algebra, mask: Expr, kept: Expr, other: Expr) -> Expr:
    """``mask * kept + (1 - mask) * other`` where one side is zero, or where it is ``other`` plus something masked."""
    added = added_to(algebra, other, kept, factors_of(mask))
    if added is None:
        return algebra.mul(_not(algebra, mask), other) if kept is algebra.zero else algebra.call("where", (mask, kept, other))
    return algebra.add(other, algebra.mul(mask, added))


def added_to(algebra: Algebra, other: Expr, kept: Expr, masks: Sequence[Expr]) -> Expr | None:
    """What is added to ``other`` where it becomes ``kept``: the rest of that, or all, where ``other`` is zero under a mask."""
    below, terms = (Counter(e.args if e.kind == "add" else () if e is algebra.zero else (e,)) for e in (other, kept))
    if below <= terms:
        return algebra.add(*(terms - below).elements())
    return kept if all(_is_apart(term, masks) for term in below) else None


def elsewhere(algebra: Algebra, e: Expr, mask: Expr) -> Expr:
    """``e`` where a mask is 0: terms that the masks of others bracket are zero where it is 1."""
    terms = Counter(e.args if e.kind == "add" else (e,))
    apart = [term for term in terms.elements() if _is_apart(term, factors_of(mask))]
    return algebra.add(*apart, algebra.mul(opposite(algebra, mask), algebra.add(*(terms - Counter(apart)).elements())))


def _is_apart(term: Expr, masks: Sequence[Expr]) -> bool:
    """True if one of a term's factors says of an id what is not so where one of the masks is 1."""
    return any(differ(f, m) for f in factors_of(term) for m in masks)


def _not(algebra: Algebra, mask: Expr) -> Expr:
    if is_bound(mask):
        atom, first, end = interval_of(mask)
        return algebra.between((atom, -math.inf, first) if end == math.inf else (atom, end, math.inf))
    marks = factors_of(mask)
    numbers = [f.args[1] if f.kind == "cast" and f.args[0] == torch.bool and is_integer(f.args[1]) else f for f in marks]
    return opposite(algebra, mask) if numbers == [*marks] else algebra.eq(algebra.mul(*numbers), algebra.zero)


def threshold(algebra: Algebra, name: str, args: list[Expr]) -> Expr | None:
    """The comparison of a mask, or of how many elements of one are true, with a number, as a mask; None if it is none."""
    if name not in _COMPARISONS or args[1].kind != "const" or args[1].args[0] not in _EXACT:
        return None
    e, number = args[0], args[1].args[0]
    compare = getattr(operator, name)
    if is_indicator(e):
        of_zero, of_one = compare(0, number), compare(1, number)
        if of_zero == of_one:
            return algebra.const(int(of_zero))
        return e if of_one else opposite(algebra, e)
    if e.kind == "sum" and is_indicator(e.args[1]) and (name, number) in (("gt", 0), ("ne", 0), ("ge", 1)):
        return algebra.any(*algebra.open(e))
    return None


def opposite(algebra: Algebra, mask: Expr) -> Expr:
    """1 where a mask is 0, and 0 where it is 1."""
    masks = complement_of(mask)
    return algebra.mul(*masks) if masks else algebra.add(algebra.one, algebra.mul(algebra.const(-1), mask))
