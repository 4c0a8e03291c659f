"""Expressions that count: sums and products of comparisons, which are exact in every dtype that is wide enough."""

import math

import torch

from moeblaze_ops.lowering.graph.sizes import Size, exact_quotient, is_at_most
from moeblaze_ops.lowering.index_notation.expr import CHOSEN, Expr, complement_of, factors_of


def is_count(e: Expr) -> bool:
    """Built from comparisons by sums and products only: a small integer whatever its dtype."""
    if e.kind in ("sum", "prefix"):
        return is_count(e.args[1])
    return is_indicator(e) or (e.kind == "mul" and all(map(is_count, e.args)))


LARGEST_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.int8: 2**7 - 1, torch.uint8: 2**8 - 1, torch.int16: 2**15 - 1}
"""The largest number up to which a narrow dtype holds every one."""


def holds_count(dtype: torch.dtype, count: Expr) -> bool:
    if dtype == torch.bool:
        return is_indicator(count)
    most = most_counted(count)
    return dtype not in LARGEST_EXACT or (isinstance(most, int) and most <= LARGEST_EXACT[dtype])


def most_counted(count: Expr) -> Size:
    """An upper bound of a count."""
    if count.kind in ("sum", "prefix") and not is_indicator(count):
        row, body = count.args[:2]
        rows = [row.args[1], *(most for f in factors_of(body) if (most := _most_marked(f, row)) is not None)]
        return min((n for n in rows if isinstance(n, int)), default=rows[-1]) * most_counted(body)
    return math.prod(map(most_counted, count.args)) if count.kind == "mul" else 1


def _most_marked(mark: Expr, row: Expr) -> Size | None:
    """How many rows a mark is 1 for at most: of which each is named by a number, or by a token that has an id once.

        torch.zeros_like(scores).scatter(0, scores.topk(capacity, dim=0).indices, 1)        capacity
        scores.topk(K).indices.flatten() == e                                               as many as tokens
    """
    if mark.kind in ("sum", "any") and is_indicator(mark):
        hits = [f.args for f in factors_of(mark.args[1]) if f.kind == "eq" and row in f.args]
        return mark.args[0].args[1] if any(row not in side.free for own in hits for side in own if side is not row) else None
    for ids, other in (mark.args, mark.args[::-1]) if mark.kind == "eq" else ():
        slot = slot_of(ids)
        if slot is not None and slot.kind in ("div", "mod") and slot.args[0] is row and row not in other.free:
            others = [i for i in ids.args[1] if row in i.free]
            others.remove(slot)
            if all(i is not slot and i.args == slot.args for i in others):
                return slot.args[1] if slot.kind == "div" else exact_quotient(row.args[1], slot.args[1])
    return None


def slot_of(e: Expr) -> Expr | None:
    """The slot of an id, of which each has another id."""
    axis = e.args[0].choices_along if e.kind == "leaf" and 0 not in e.args[0].shape else None
    return None if axis is None else e.args[1][axis]


_ORDERS = frozenset(("lt", "le", "gt", "ge"))
_MARKS = frozenset((CHOSEN, "eq", "ne", "or"))


def is_order(e: Expr) -> bool:
    """True if ``e`` says which of two numbers is less."""
    return e.kind == "call" and e.args[0] in _ORDERS


def is_below(mark: Expr, number: Expr, bound: Size) -> bool:
    """True if a mark says that an integer is below a bound."""
    if not is_order(mark) or mark.args[0] not in ("lt", "le") or mark.args[1][0] is not number:
        return False
    limit = mark.args[1][1]
    return limit.kind == "const" and is_at_most(limit.args[0] + int(mark.args[0] == "le"), bound)


def is_choice(e: Expr) -> bool:
    """True if ``e`` is one of two numbers, as a mask says."""
    return e.kind == "call" and e.args[0] == "where"


def is_indicator(e: Expr) -> bool:
    """True if ``e`` is 0 or 1, as a comparison is, or 1 - comparison."""
    marks = e.kind in ("eq", "any", "distinct") or is_order(e) or (e.kind == "call" and e.args[0] in _MARKS)
    marks = marks or (e.kind == "leaf" and e.args[0].dtype == torch.bool) or (e.kind == "cast" and e.args[0] == torch.bool)
    marks = marks or (e.kind == "mul" and all(map(is_indicator, e.args))) or (e.kind == "sum" and _has_one_term(*e.args))
    return marks or (e.kind == "add" and bool(masks := complement_of(e)) and all(map(is_indicator, masks)))


def _has_one_term(var: Expr, body: Expr) -> bool:
    """True if a sum of comparisons has one term that is not zero at most, as where ids that differ are compared with a number.

        sum_k [ids[t, k] = e]       of ids that were stored for each k, one over another; not of those of which the sum was taken
    """
    factors = factors_of(body)
    distinct = {f.args[0] for f in factors if f.kind == "distinct" and f.args[1] is var}
    others = [f for f in factors if f.kind != "distinct"]
    hits = (f.args for f in others if f.kind == "eq")
    once = any(a in distinct and var not in b.free or b in distinct and var not in a.free for a, b in hits)
    return once and all(map(is_indicator, others))
