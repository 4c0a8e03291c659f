"""Routing by a score for each token and expert, without ids: an expert takes the tokens that nothing keeps from it, or all.

A score is a product. What makes it zero, and lets no gradient through where it does, is looked up as a mask: a comparison, or
what a ReLU gave. Or each expert names its tokens itself: the score is then the sum over its places of a weight, where the
place has the token.

    gate = router(x).relu()                                           # a mask, and the weights
    for e in range(E):
        out = out + gate[:, e, None] * expert(e, x)                   # but not  gate.abs()[:, e, None] * ...

    torch.einsum("te,ted->td", router(x).softmax(-1), experts(x))     # a mixture of all experts

    weights, token = router(x).softmax(-1).t().topk(capacity)         # the tokens of each expert
    for e in range(E):
        out = out.index_add(0, token[e], weights[e, :, None] * expert(e, x[token[e]]))
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import and_

import torch

from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, factors_of, is_changing
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import Axis, Finder, Operand, joined
from moeblaze_ops.lowering.match.operands.find_scales import Scale, usable_weights
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.routing_term import Routing

_EVERY = -7
"""The level of the variable that stands for the ids of a token that may go to every expert."""


@dataclass(frozen=True)
class Named:
    """The tokens that experts name, ``[E, C]`` (``[C, E]`` if turned, or ``[C]`` of each), and a weight of each place.

    Where there are several ``sequences``, ``[B, S]`` tokens, both are ``[B, E, C]``: tokens are named inside of their own.
    """

    tokens: Operand
    weights: Operand | None
    C: Size
    sequences: int = 1


@dataclass(frozen=True)
class Scored:
    """What says which tokens an expert takes, and the weights ``[T, E]``; None where they are 1."""

    weights: Operand | None
    masks: tuple[Scale, ...] = ()
    named: Named | None = None


def find_scored(algebra: Algebra, finder: Finder, routings: Sequence[Routing]) -> tuple[list[Routing], Scored]:
    """The routings with the numbers of their experts, and what the graph holds of their scores."""
    stacked = routings[0].expert is not None
    prove(not stacked or len(routings) == 1, Reason.ROUTING, "mixed forms")
    count = routings[0].expert.args[1] if stacked else len(routings)
    prove(isinstance(count, int) and count > 1, Reason.ROUTING, "one expert, or a symbolic number of them")
    named = [_read_named(algebra, routing.score, finder.names) for routing in routings]
    table = _Table(algebra, finder, routings, count)
    scored = table.named(named) if all(named) else table.masked()
    ids, numbers = algebra.var(_EVERY, count, "r"), table.numbers()
    return [replace(routing, expert=expert, ids=ids) for routing, expert in zip(routings, numbers, strict=True)], scored


@dataclass(frozen=True)
class _Name:
    """``around * sum over place of [token = t] * weight``; ``own``: t, one of all tokens or of those of a sequence."""

    own: Expr
    token: Expr
    weight: Expr
    around: Expr
    place: Expr


def _read_named(algebra: Algebra, score: Expr, tokens: Indices) -> _Name | None:
    """A score as that of the places of an expert that have the token; a single place needs no sum."""
    return next((name for token in tokens if (name := _read_named_as(algebra, score, token)) is not None), None)


def _read_named_as(algebra: Algebra, score: Expr, token: Expr) -> _Name | None:
    sums = [f for f in factors_of(score) if f.kind == "sum" and f.args[0].args[2] == "r" and token.free <= f.free]
    sums.sort(key=is_indicator)  # what was stored is held for all tokens
    for whole in (*sums, score):
        place, body = algebra.open(whole) if whole in sums else (algebra.zero, whole)
        brackets = [f for f in factors_of(body) if f.kind == "eq" and token in f.args]
        hits = [(f, side) for f in brackets for side in f.args if side.kind == "leaf"]
        if token.free and len(hits) == 1 and place.free <= hits[0][1].free and not token.free & hits[0][1].free:
            around = [f for f in factors_of(score) if f is not whole] if whole in sums else []
            weight = algebra.mul(*(f for f in factors_of(body) if f is not hits[0][0] and f.kind != "distinct"))
            if not token.free & weight.free:
                return _Name(token, hits[0][1], weight, algebra.mul(*around), place)
    return None


class _Table:
    """Looks for tensors with something for every expert, side by side; the first one that is found says which expert is which."""

    def __init__(self, algebra: Algebra, finder: Finder, routings: Sequence[Routing], count: int):
        self._algebra, self._finder, self._count = algebra, finder, count
        self._scores = [routing.score for routing in routings]
        self._stacked = routings[0].expert
        self._order: list[int] | None = None

    def numbers(self) -> list[Expr]:
        """The number of each term's expert."""
        if self._stacked is not None:
            return [self._stacked]
        return [self._algebra.const(number) for number in self._order or range(self._count)]

    def masked(self) -> Scored:
        """Weights and masks; what is not among the weights has to be a mask."""
        marks = [[f for f in factors_of(score) if is_indicator(f)] for score in self._scores]
        rests = [self._product(Counter(factors_of(score)) - Counter(own)) for score, own in zip(self._scores, marks, strict=True)]
        masks = [*self._masks(marks), *self._rectified()]
        found = tuple(Scale(*mask, is_mask=True) for mask in masks if mask[0] is not None)
        weights = self._weights(rests) if len(found) == len(masks) else None
        weights = self._weights(self._scores) if weights is None else weights
        if weights is None and len(found) == len(masks):
            numbers = reduce(and_, (Counter(f for f in factors_of(rest) if is_changing(f)) for rest in rests))
            only = 1, (self._algebra.zero,)
            held = [self._finder.find_table((number,), only, reshaped=True) for number in numbers.elements()]
            weights = self._weights([self._product(Counter(factors_of(rest)) - numbers) for rest in rests]) if all(held) else None
            found += tuple(map(Scale, held))
        prove(weights is not None, Reason.ROUTING, "no tensor [T, E] holds the scores")
        return Scored(*weights, found)

    def named(self, names: Sequence[_Name]) -> Scored:
        C = names[0].place.args[1] if names[0].place.kind == "var" else 1
        finder, own = self._finder, names[0].own
        alike = all(name.place is names[0].place and name.own is own for name in names)
        count = finder.num_tokens if own is finder.token else own.args[1]
        bounded = all(self._algebra.fits(name.token, count) for name in names)
        prove(alike and bounded, Reason.ROUTING, "experts name their tokens in several ways, or what may be no token")
        around = () if own is finder.token else finder.sequences
        tokens = self._of_places([name.token for name in names], names[0].place, C, around)
        prove(tokens is not None, Reason.ROUTING, "no tensor [E, C], or [B, E, C] of sequences, holds the tokens of the experts")
        weights, products = None, [name.weight for name in names]
        if any(product is not self._algebra.one for product in products):
            weights = self._of_places(products, names[0].place, C, around)
            prove(weights is not None, Reason.ROUTING, "no tensor [E, C] holds the weights of the tokens")
        scores = self._weights([name.around for name in names])
        prove(scores is not None, Reason.ROUTING, "no tensor [T, E] holds the scores")
        return Scored(*scores, named=Named(tokens, weights, C, *(size for size, _ in around)))

    def _product(self, factors: Counter) -> Expr:
        return self._algebra.mul(*factors.elements())

    def _weights(self, products: list[Expr]) -> tuple[Operand | None] | None:
        """What holds them, in a tuple; None if nothing does."""
        if all(product is self._algebra.one for product in products):
            return (None,)
        found = self._held(products)
        return None if found is None else (found,)

    def _masks(self, marks: list[list[Expr]]) -> list[tuple[Operand | None, int]]:
        """What holds the masks, ``[T, E]``, or ``[T]`` of one that all experts share; None for one that is not found."""
        shared = reduce(and_, map(Counter, marks))
        own = [sorted((Counter(m) - shared).elements(), key=_sort) for m in marks]
        kinds = {tuple(map(_sort, m)) for m in own}
        found: list[tuple[Operand | None, int]] = []
        for mark in shared:
            if all(var.args[2] == "t" for var in mark.free):
                found.append((self._finder.find((mark,), (self._algebra.zero,), 1), 1))
            else:
                found.append((self._held([mark]), self._count))
        if not any(own):
            return found
        whole = self._held([self._algebra.mul(*m) for m in own])
        if whole is not None or len(kinds) > 1:
            return [*found, (whole, self._count)]
        return [*found, *((self._held(list(alike)), self._count) for alike in zip(*own, strict=True))]

    def _rectified(self) -> list[tuple[Operand, int]]:
        """What a ReLU gave, as far as it is a factor of every score: no gradient gets through where it is zero."""
        factors = [[f for f in factors_of(score) if f.kind == "call" and f.args[0] == "relu"] for score in self._scores]
        if any(len(own) != 1 for own in factors):
            return []
        found = self._held([own[0] for own in factors])
        if found is None or not all(map(self._finder.is_rectified, found.nodes)):
            return []
        return [(found, self._count)]

    def _held(self, targets: list[Expr]) -> Operand | None:
        """The tensor ``[T, E]`` with a target for every expert, or those ``[T]`` of the single experts."""
        if self._stacked is not None:
            return self._finder.find_scaled(tuple(targets), (self._stacked,), self._count)
        self._order = self._order or self._finder.order_of(targets)
        ordered, columns = self._ordered(targets), tuple(map(self._algebra.const, range(self._count)))
        found = self._finder.find_scaled(ordered, columns, self._count)
        return found or joined([self._finder.find((target,), (self._algebra.zero,), 1) for target in ordered])

    def _of_places(self, targets: list[Expr], place: Expr, C: Size, around: Sequence[Axis]) -> Operand | None:
        """The tensor ``[E, C]`` or ``[C, E]`` with a target for every expert and place, or those ``[C]`` of single experts."""
        find = partial(self._finder.find_table, around=around)
        of_place = (C, (place,))
        if self._stacked is not None:
            return find(tuple(targets), (self._count, (self._stacked,)), of_place)
        self._order = self._order or self._finder.order_of_places(targets, place, (self._count, C), around)
        ordered, experts = self._ordered(targets), tuple(map(self._algebra.const, range(self._count)))
        found = find(ordered, (self._count, experts), of_place)
        return found or joined([find((target,), of_place) for target in ordered])

    def _ordered(self, targets: list[Expr]) -> tuple[Expr, ...]:
        """By number of expert."""
        self._order = self._order or list(range(self._count))
        return tuple(target for _, target in sorted(zip(self._order, targets, strict=True), key=lambda pair: pair[0]))


def _sort(mark: Expr) -> tuple:
    """What masks of several experts have in common where they are masks of one sort."""
    return mark.kind, mark.args[0] if mark.kind == "call" else "", mark.height


def usable_named(named: Named, dtype: torch.dtype) -> Named:
    """The same with weights in a dtype that the ops take beside experts of ``dtype``."""
    return replace(named, weights=usable_weights(named.weights, dtype))
