"""Experts that read their tokens from places, ``[E, C, D]``: each place has one token, so its row is that of the token.

    combine[t, e, c] = weight[t, e] * (position[t] == c)         # position: a running count of the tokens of the expert
    rows[e, c] = sum over t of (combine[t, e, c] != 0) * x[t]
    out[t] = sum over e, c of combine[t, e, c] * expert(e, rows[e, c])

Two tokens of one expert have different running counts. So where ``combine`` is not zero at (t, e, c), no other token is in the
place (e, c), its row is ``x[t]``, and the sum over the places is the weight, or zero for a token behind the last place.

    position = one_hot(ids, E).cumsum(0).sub(1).gather(1, ids)               but not  torch.arange(T) % C
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moeblaze_ops.lowering.facts.zero_stops_gradient import fades
from moeblaze_ops.lowering.index_notation.expr import CHOSEN, Expr, factors_of, same_size
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm


def without_padding(algebra: Algebra, expert: ExpertTerm, token: Expr) -> ExpertTerm:
    """An expert of tokens instead of places, if its rows are proven to be theirs; else the same."""
    if expert.x.kind != "sum" or expert.scale or token.kind != "var":
        return expert
    row, body = algebra.open(expert.x)
    if not same_size(row.args[1], token.args[1]):
        return expert
    x = algebra.mul(*(f for f in factors_of(body) if expert.feature_in in f.free))
    dispatch = algebra.substitute(algebra.mul(*(f for f in factors_of(body) if expert.feature_in not in f.free)), {row: token})
    combine = algebra.mul(*expert.routing)
    for place in expert.binders:
        if place not in dispatch.free or place in x.free:
            continue
        for placed in _placed(algebra, combine, place):
            if _takes_only(algebra, dispatch, combine, placed, place, token):
                return replace(
                    expert,
                    x=algebra.substitute(x, {row: token}),
                    routing=factors_of(placed.without_place(algebra, place)),
                    binders=tuple(binder for binder in expert.binders if binder is not place),
                )
    return expert


@dataclass(frozen=True)
class _Placed:
    """``around * sum over slot of [position = place] * factors``; the factors are not zero only if the slot is the expert's."""

    around: tuple[Expr, ...]
    slot: Expr | None
    hit: Expr
    factors: tuple[Expr, ...]
    expert: tuple[Expr, Expr] | None  # the id of the slot, and the number that it is compared with

    @property
    def all_factors(self) -> tuple[Expr, ...]:
        return (*self.around, *self.factors)

    def without_place(self, algebra: Algebra, place: Expr) -> Expr:
        inside = algebra.mul(*self.factors)
        return algebra.mul(*self.around, inside if self.slot is None else algebra.sum(self.slot, inside))


def _placed(algebra: Algebra, e: Expr, place: Expr) -> Iterator[_Placed]:
    """Every way to read an expression as something at a place."""
    for whole in factors_of(e):
        if place not in whole.free:
            continue
        around = tuple(f for f in factors_of(e) if f is not whole)
        if whole.kind == "eq" and place in whole.args:
            yield from _of_experts(None, whole, around, ())
        elif whole.kind in ("sum", "any") and whole.args[0].args[2] == "r":
            slot, body = algebra.open(whole)
            hits = [f for f in factors_of(body) if f.kind == "eq" and place in f.args]
            if len(hits) == 1:
                yield from _of_experts(slot, hits[0], around, tuple(f for f in factors_of(body) if f is not hits[0]))


def _of_experts(slot: Expr | None, hit: Expr, around: tuple[Expr, ...], factors: tuple[Expr, ...]) -> Iterator[_Placed]:
    yield _Placed(around, slot, hit, factors, None)
    for f in (*around, *factors):
        for ids, number in (f.args, f.args[::-1]) if f.kind == "eq" else ():
            if ids.kind == "leaf" and number.kind in ("var", "const"):
                yield _Placed(around, slot, hit, factors, (ids, number))


def _takes_only(algebra: Algebra, dispatch: Expr, combine: Expr, placed: _Placed, place: Expr, token: Expr) -> bool:
    """Whether ``dispatch`` is 1 wherever ``combine`` is not zero, and zero for any other token at the same place."""
    position = _position(algebra, placed, place, token)
    if position is None:
        return False
    if (number := _not_zero(dispatch)) is not None:
        # Where the weight itself is zero the row is none, and no gradient tells.
        whole = Counter(factors_of(number)) - Counter(f for f in factors_of(number) if f.kind == "const")
        if not fades(number) or not whole <= Counter(factors_of(combine)):
            return False
        return any(_position(algebra, other, place, token) is position for other in _placed(algebra, number, place))
    for other in _placed(algebra, dispatch, place):
        own = other.all_factors
        if placed.slot is not None and other.slot is not None:
            hit, *own = (algebra.substitute(f, {other.slot: placed.slot}) for f in (other.hit, *own))
            other = replace(other, slot=placed.slot, hit=hit, factors=tuple(own), around=())
        implied = all(map(is_indicator, own)) and set(own) <= set(placed.all_factors)
        if implied and _position(algebra, other, place, token) is position:
            return True
    return False


def _not_zero(e: Expr) -> Expr | None:
    """The number of which an expression says whether it is zero."""
    if e.kind == "cast" and e.args[0] == torch.bool:
        return e.args[1]
    return e.args[1][0] if e.kind == "call" and e.args[0] == CHOSEN else None


def _position(algebra: Algebra, placed: _Placed, place: Expr, token: Expr) -> Expr | None:
    """The running count of the expert's slots that a place is compared with; None if it is another number.

    It is at least zero, and below the number of places.
    """
    known, chosen = (dict([placed.expert]), algebra.eq(*placed.expert)) if placed.expert else ({}, None)
    marks = {f if f is chosen else algebra.substitute(f, known) for f in placed.all_factors if is_indicator(f)}
    position = algebra.substitute(next(side for side in placed.hit.args if side is not place), known)
    position = _under(algebra, position, marks)
    count = _running_count(position)
    if count is None or not _is_own(algebra, count, marks, placed, token):
        return None
    places = place.args[1]
    most = count.args[0].args[1]
    has_room = isinstance(places, int) and isinstance(most, int) and most <= places
    kept = any(_is_below(mark, position, places) for mark in marks)
    return position if kept or has_room else None


def _under(algebra: Algebra, position: Expr, marks: set[Expr]) -> Expr:
    """A number where all marks are 1."""
    while True:
        if position.kind == "mul":
            factors = [f for f in position.args if f not in marks]
            if len(factors) == len(position.args):
                return position
            position = algebra.mul(*factors)
        elif position.kind == "call" and position.args[0] == "where" and position.args[1][0] in marks:
            position = position.args[1][1]
        elif position.kind == "call" and position.args[0] == "clamp" and _clamps_nothing(position, marks):
            (position,) = position.args[1]
        else:
            return position


def _clamps_nothing(clamped: Expr, marks: set[Expr]) -> bool:
    (number,), (lower, upper) = clamped.args[1:]
    below = upper is None or any(_is_below(mark, number, upper + 1) for mark in marks)
    return below and (lower is None or lower <= 0)


def _is_below(mark: Expr, number: Expr, bound: object) -> bool:
    """Whether a mark says that an integer is below a bound."""
    if mark.kind != "call" or mark.args[0] not in ("lt", "le") or mark.args[1][0] is not number:
        return False
    limit = mark.args[1][1]
    return limit.kind == "const" and isinstance(bound, int) and limit.args[0] + (mark.args[0] == "le") <= bound


def _running_count(position: Expr) -> Expr | None:
    """The count in ``count - 1``."""
    one_less = position.kind == "linear" and position.args[0] == -1 and len(position.args[1]) == 1
    if not one_less or position.args[1][0][0] != 1:
        return None
    count = position.args[1][0][1]
    return count if count.kind == "prefix" and is_indicator(count.args[1]) else None


def _is_own(algebra: Algebra, count: Expr, marks: set[Expr], placed: _Placed, token: Expr) -> bool:
    """Whether a running count, up to the slot itself, is of slots that have the marks, and no two slots end it at the same."""
    upto = count.args[2]
    row, body = algebra.open(count)
    here = algebra.substitute(body, {row: upto})
    if not set(factors_of(here)) <= marks:
        return False
    if placed.slot is None:
        return upto is token
    T, K = token.args[1], placed.slot.args[1]
    orders = (((1, token), (T, placed.slot)), ((K, token), (1, placed.slot)))
    return any(upto is algebra.linear(0, order) for order in orders) and same_size(row.args[1], T * K)
