"""Comparisons of zeros and ones, and of counts, with a number: what is true of which."""

import operator

from moeblaze_ops.lowering.index_notation.expr import Expr, complement_of
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra

_EXACT = (0, 0.5, 1)
"""Numbers that every dtype holds as they are, beside zeros and ones."""
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


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
