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
from dataclasses import dataclass, field, replace

import torch

from moeblaze_ops.lowering.evaluate.groups import largest_of
from moeblaze_ops.lowering.facts.zero_stops_gradient import fades
from moeblaze_ops.lowering.graph.sizes import same_size
from moeblaze_ops.lowering.index_notation.expr import CHOSEN, DROPOUT, Expr, factors_of, split_number, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_below, is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm


def without_padding(algebra: Algebra, expert: ExpertTerm, token: Expr) -> ExpertTerm:
    """An expert of tokens instead of places, if its rows are proven to be theirs; else the same."""
    number, rows = split_number(expert.x)
    if [factor.kind for factor in rows] != ["sum"] or expert.scale:
        return expert
    row, body = algebra.open(rows[0])
    tokens = [var for var in token.free - body.free if same_size(row.args[1], var.args[1])]
    if len(tokens) != 1:
        return expert
    (token,) = tokens
    x = algebra.mul(algebra.const(number), *(f for f in factors_of(body) if expert.feature_in in f.free))
    dispatch = algebra.substitute(algebra.mul(*(f for f in factors_of(body) if expert.feature_in not in f.free)), {row: token})
    combine = algebra.mul(*expert.routing)
    for place in expert.binders:
        if place not in dispatch.free or place in x.free:
            continue
        for placed in _placed(algebra, combine, place):
            if (count := _takes_only(algebra, dispatch, combine, placed, place, token)) is not None:
                return replace(
                    expert,
                    x=algebra.substitute(x, {row: token}),
                    routing=tuple(f for f in factors_of(placed.without_place(algebra)) if f not in count.always),
                    binders=tuple(binder for binder in expert.binders if binder is not place),
                )
    return expert


def written(algebra: Algebra, formulas: Formulas, expert: ExpertTerm, activation: Expr) -> Expr:
    """The term that is read as ``expert``; ``activation`` is its own, in the symbols of ``formulas``."""
    halves = []
    for projection in expert.up:
        h = algebra.mul(*expert.scale, algebra.sum(expert.feature_in, algebra.mul(expert.x, projection.weight)))
        halves.append(h if projection.bias is None else algebra.add(h, projection.bias))
    symbols = dict(zip((formulas.gate, formulas.up), halves, strict=False))
    symbols |= dict(zip(formulas.parameters, expert.parameters, strict=False))
    hidden = _dropped(algebra, algebra.substitute(activation, symbols), expert.dropout[0])
    term = algebra.sum(expert.width, algebra.mul(hidden, expert.down.weight))
    term = term if expert.down.bias is None else algebra.add(term, expert.down.bias)
    term = algebra.mul(*expert.routing, _dropped(algebra, term, expert.dropout[1]))
    for binder in reversed(expert.binders):
        term = algebra.sum(binder, term)
    return term


def _dropped(algebra: Algebra, e: Expr, p: float) -> Expr:
    """``e`` with dropout, whichever call of it that is."""
    return algebra.call(DROPOUT, (e,), p) if p else e


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

    def without_place(self, algebra: Algebra) -> Expr:
        """The sum over all places."""
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


def _takes_only(
    algebra: Algebra, dispatch: Expr, combine: Expr, placed: _Placed, place: Expr, token: Expr
) -> "_Position | None":
    """The position of a slot, if ``dispatch`` is 1 wherever ``combine`` is not zero, and zero for others at the same place."""
    count = _position(algebra, placed, place, token)
    if count is None:
        return None
    if (number := _not_zero(dispatch)) is not None:
        # Where the weight itself is zero the row is none, and no gradient tells.
        parts = number.args if number.kind == "add" else (number,)
        own = [part for part in parts if Counter(split_number(part)[1]) <= Counter(factors_of(combine))]
        if len(own) != 1 or not (fades(number) or all(map(is_indicator, parts))):
            return None
        for part in parts:
            found = [_position(algebra, other, place, token) for other in _placed(algebra, part, place)]
            if not (count in found if part is own[0] else any(map(count.is_apart, found))):
                return None
        return count
    for other in _placed(algebra, dispatch, place):
        own = list(other.all_factors)
        if placed.slot is not None and other.slot is not None:
            hit, *own = (algebra.substitute(f, {other.slot: placed.slot}) for f in (other.hit, *own))
            other = replace(other, slot=placed.slot, hit=hit, factors=tuple(own), around=())
        marks = [f for f in own if not _is_chosen_weight(f, placed)]
        implied = all(map(is_indicator, marks)) and set(marks) <= set(placed.all_factors)
        if implied and _position(algebra, other, place, token) == count:
            return count
    return None


def _is_chosen_weight(mark: Expr, placed: _Placed) -> bool:
    """True if a mark is 1 wherever the weight at a place is not zero, since it says that of factors of it: [w != 0] w = w."""
    number = _not_zero(mark)
    return number is not None and fades(number) and Counter(split_number(number)[1]) <= Counter(placed.all_factors)


def _not_zero(e: Expr) -> Expr | None:
    """The number of which an expression says whether it is zero."""
    if e.kind == "cast" and e.args[0] == torch.bool:
        return e.args[1]
    return e.args[1][0] if e.kind == "call" and e.args[0] == CHOSEN else None


@dataclass(frozen=True)
class _Position:
    """``count - 1``, of a running count behind all of some others: no two slots of one expert are at the same place."""

    number: Expr
    count: Expr
    behind: frozenset[Expr]
    total: Expr  # what the running count ends at
    slot: Expr | None = None  # the count is that of the one slot that a comparison is true of, or zero
    hit: Expr | None = None
    always: frozenset[Expr] = field(default=frozenset(), compare=False)  # marks that are 1 for every slot
    kept: frozenset[Expr] = frozenset()  # how many slots are below a bound that this one is below

    def is_apart(self, other: "_Position | None") -> bool:
        """True if the slots that another one counts have other places."""
        orders = () if other is None else ((self, other), (other, self))
        return any(one.behind < one.behind | {end} <= two.behind for one, two in orders for end in (one.total, *one.kept))


def _position(algebra: Algebra, placed: _Placed, place: Expr, token: Expr) -> _Position | None:
    """What a place is compared with; None if it is no running count of the expert's slots, or may be behind the last place."""
    known, chosen = (dict([placed.expert]), algebra.eq(*placed.expert)) if placed.expert else ({}, None)
    marks = {f if f is chosen else algebra.substitute(f, known) for f in placed.all_factors if is_indicator(f)}
    marks |= {algebra.substitute(mark, dict.fromkeys(marks - {mark}, algebra.one)) for mark in marks}
    number = algebra.substitute(next(side for side in placed.hit.args if side is not place), known)
    number = algebra.beside(number, marks)
    position, slot = _running_count(algebra, number), placed.slot
    if position is not None and position.hit is not None:  # it is no less than zero where a slot of the token has the expert
        if slot is not None or algebra.call("ge", (number, algebra.zero)) not in marks:
            return None
        slot, marks = position.slot, marks | {position.hit}
    if position is None or not _is_own(algebra, position, marks, slot, token):
        return None
    places = place.args[1]
    row, counted = algebra.open(position.count)
    if (most := largest_of(algebra, places, (position.total, *position.behind))) is not None:
        below = algebra.call("lt", (number, most))
        return replace(position, always=frozenset(f for f in placed.all_factors if algebra.substitute(f, known) is below))
    has_room = algebra.fits(algebra.linear(0, [(1, e) for e in (position.count, *position.behind)]), places + 1)
    limits = [mark for mark in marks if is_below(mark, number, places)]
    at = algebra.fresh((number, *marks), row.args[1])
    there = {row: at, position.count: algebra.prefix(row, counted, at)}
    kept = (algebra.sum(at, algebra.mul(*(algebra.substitute(e, there) for e in (counted, mark)))) for mark in limits)
    return replace(position, kept=frozenset(kept)) if has_room or limits else None


def _running_count(algebra: Algebra, number: Expr) -> _Position | None:
    """A running count of ones, and counts of all ones of other sorts, less one."""
    if number.kind != "linear" or number.args[0] != -1 or any(coefficient != 1 for coefficient, _ in number.args[1]):
        return None
    if (of_slots := _of_slots(algebra, number)) is not None:
        return of_slots
    counts = [atom for _, atom in number.args[1] if atom.kind == "prefix"]
    behind = [atom for _, atom in number.args[1] if atom.kind == "sum"]
    alike = len(counts) == 1 and len(counts) + len(behind) == len(number.args[1])
    if not alike or not all(is_indicator(atom.args[1]) for atom in (*counts, *behind)):
        return None
    return _Position(number, counts[0], frozenset(behind), algebra.sum(*algebra.open(counts[0])))


def _of_slots(algebra: Algebra, number: Expr) -> _Position | None:
    """The running count of the slot of a token that has an expert, less one: -1 where none has it.

        (one_hot.cumsum(0) * one_hot - 1).view(K, T, E).max(dim=0).values        # ids of a topk differ: one slot at most
    """
    total = number.args[1][0][1]
    slot, body = algebra.open(total) if total.kind == "sum" else (None, total)
    parts = {f.kind: f for f in factors_of(body) if f.kind != "distinct"}
    if len(number.args[1]) > 1 or set(parts) != {"eq", "prefix"} or len(factors_of(body)) != (2 if slot is None else 3):
        return None
    count, hit = parts["prefix"], parts["eq"]
    once = slot is None or algebra.tells((), slot, [hit])
    if not once or not is_indicator(count.args[1]):
        return None
    return _Position(number, count, frozenset(), algebra.sum(*algebra.open(count)), slot, hit)


def _is_own(algebra: Algebra, position: _Position, marks: set[Expr], slot: Expr | None, token: Expr) -> bool:
    """True if a count of slots that have the marks, in whichever slot it is asked for, ends at this one, and at no other."""
    upto = position.count.args[2]
    row, body = algebra.open(position.count)
    others = body.free.union(*(count.free for count in position.behind))
    if token in others or slot in others or not set(factors_of(algebra.substitute(body, {row: upto}))) <= marks:
        return False
    own = next(subexpressions(upto, lambda e: reorders(e, token)), token)
    if slot is None:
        return upto is own
    T, K = token.args[1], slot.args[1]
    orders = (((1, own), (T, slot)), ((K, own), (1, slot)))
    return any(upto is algebra.linear(0, order) for order in orders) and same_size(row.args[1], T * K)


def reorders(e: Expr, token: Expr) -> bool:
    """True if ``e`` is the place of a token in another order of all, as that of their priorities."""
    order, at = e.args if e.kind in ("inverse", "leaf") else (None, None)
    return at in (token, (token,)) and order.is_permutation and same_size(order.shape[0], token.args[1])
