"""The layer that the operators compute, stated of the operands of a match alone:

    out[t, d] = sum over e of share(t, e) * expert_e(x[t])[d]
    share(t, e) = sum over k of [ids[t, k] = e] * weights[t, k] * scales
    expert_e(x)[d] = sum over f of down[e, d, f] * act(h_f) + b_down[e, d]
    h_f = sum over i of up[e, f, i] * x[i] + b_up[e, f]

One function has several sums: over experts in turn or by a bound number, over slots inside of the share or around the expert.
``Form`` says which one is written; they differ by the distributive law alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias, get_args

import torch

from moeblaze_ops.kernels.formulas.named import is_gated, is_zero_at_zero
from moeblaze_ops.lowering.evaluate.depth import MAX_PROJECTIONS
from moeblaze_ops.lowering.evaluate.evaluator import Unroll
from moeblaze_ops.lowering.index_notation.expr import DROPOUT, Expr, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.pointwise import opposite
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.find_scales import Scale
from moeblaze_ops.lowering.match.operands.low_rank import Factors
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm, Projection
from moeblaze_ops.lowering.match.terms.padding import written
from moeblaze_ops.lowering.statement.operands import Elements

_LEVEL = 100
"""Bound variables of a statement are numbered from here until they are bound: above those of tokens and features."""

Experts: TypeAlias = Literal["listed", "summed", "indexed"]
Slots: TypeAlias = Literal["inside", "around", "listed"]


@dataclass(frozen=True)
class Form:
    """How the sum over experts and slots is written.

    ``experts``: one term each, a sum over their numbers, or by the ids as subscripts. ``slots``: summed inside of the share,
    around the expert, or one term each. ``masked``: the expert's output is zero for tokens without it; otherwise its input is.
    """

    experts: Experts
    slots: Slots
    masked: bool = True


class Statement:
    """What a match says that its layer computes."""

    def __init__(self, match: MoEMatch, elements: Elements, formulas: Formulas, feature: Expr):
        self._match, self._elements, self._formulas, self._feature = match, elements, formulas, feature
        self._algebra = elements.algebra
        self._f = self._algebra.var(_LEVEL, match.F, "d")
        self._in = self._algebra.var(_LEVEL + 1, match.D, "d")
        self._gated = is_gated(match.activation)
        self._depth = MAX_PROJECTIONS if match.weights_on_input else 0
        of_slots = (match.experts, match.weights, *(scale.operand for scale in match.scales if scale.width is not None))
        self._slots_apart = match.experts is not None and any(operand is not None and operand.rest for operand in of_slots)

    def forms(self, num_terms: int) -> Iterator[Form]:
        """The ways to write the layer with so many terms of experts."""
        match = self._match
        if match.numbers not in ((), tuple(range(match.E))) and self._reads_by_id():
            return
        if any(match.dropout) and match.experts is not None and not self._has_one_slot_each():
            return  # an output of two slots is dropped for both
        apart = any(view.apart for view in match.views)
        for experts, slots in product(get_args(Experts), get_args(Slots)):
            if (experts != "listed" and (apart or match.numbers)) or (experts == "indexed" and slots == "inside"):
                continue
            if (self._slots_apart and slots == "around") or (match.experts is None and slots != "inside"):
                continue
            if match.weights_on_input and slots == "inside" and not self._has_one_slot_each():
                continue
            if num_terms != (match.E if experts == "listed" else 1) * (match.K if slots == "listed" else 1):
                continue
            if experts == "listed" and match.K != 1 and self._most_of_one_draw() * match.E > num_terms:
                continue  # two slots of a token have the same elements dropped
            yield Form(experts, slots)
            if match.weights_on_input and is_zero_at_zero(match.activation) and not match.b_up and match.b_down is None:
                yield Form(experts, slots, masked=False)

    def _most_of_one_draw(self) -> int:
        """How many terms of experts one call of dropout is part of, at most."""
        drawn = (set(_draws(term)) for term, _ in self._match.reading.experts)
        return max(Counter(call for calls in drawn for call in calls).values(), default=0)

    def _reads_by_id(self) -> bool:
        """True if operators read something of experts at the ids of a token, which are no places among the experts then."""
        match = self._match
        gathered = match.weights is not None and match.weights.gathered
        return match.kept is not None or gathered or any(scale.width is None for scale in match.scales)

    def _has_one_slot_each(self) -> bool:
        """True if no two slots of a token have one expert, which makes something else of a sum of weights than of each."""
        slot = self._slot()
        try:
            return slot is self._algebra.zero or (not self._slots_apart and self._algebra.tells([self._id(slot)], slot))
        except Unroll:  # ids that were written to have a formula of their own for each slot
            return False

    def terms(self, form: Form, activation: Expr) -> Iterator[Expr]:
        """The terms of the sum; ``activation`` is that of the match in the symbols of ``formulas``."""
        algebra, match = self._algebra, self._match
        around = self._slot() if form.slots == "around" else None
        slots = [algebra.const(k) for k in range(match.K)] if form.slots == "listed" else [around]
        for k in slots:
            for number in self._numbers(form):
                term = (self._indexed if form.experts == "indexed" else self._term)(form, activation, number, k)
                if form.experts == "summed":
                    term = algebra.sum(number, term)
                yield term if around is None else algebra.sum(around, term)
        yield from self._without_projections(slots if form.slots == "listed" else [None])

    def _indexed(self, form: Form, activation: Expr, number: Expr, k: Expr) -> Expr:
        """The term of a slot, whose id is in range: that of any expert, at its id."""
        try:
            return self._algebra.substitute(self._term(form, activation, number, k), {number: self._id(k)})
        except Unroll:  # experts that were stacked have a formula of its own each, and none at an index but what is stacked
            return self._term(form, activation, self._id(k), k)

    def _numbers(self, form: Form) -> list[Expr]:
        """The number of the expert of each term: its place among the weights."""
        if form.experts == "listed":
            return [self._algebra.const(e) for e in range(self._match.E)]
        return [self._algebra.var(_LEVEL + 3, self._match.E, "r")]

    def _term(self, form: Form, activation: Expr, number: Expr, k: Expr | None) -> Expr:
        algebra, named = self._algebra, self._named(number)
        if form.experts == "indexed":
            weight = self._weight(number, k, self._depth)
        elif self._match.experts is None:
            weight = self._scored(number)
        else:
            weight = self._share(number, named, k, self._depth)
        if self._match.kept is not None and not self._match.kept.of_slots:
            weight = algebra.mul(weight, self._mark(self._elements.of_token(self._match.kept, number, self._match.E)))
        if not self._match.weights_on_input:
            return algebra.mul(weight, self._expert(number, activation, None))
        inside = self._expert(number, activation, weight)
        if form.experts == "indexed" or not form.masked:
            return inside
        return algebra.mul(self._over_slots(lambda k: algebra.eq(self._id(k), named), k), inside)

    def _share(self, number: Expr, named: Expr, k: Expr | None, depth: int) -> Expr:
        """What a token gets of the expert with the id ``named``: by its slot ``k``, or by all of them."""

        def of_slot(k: Expr) -> Expr:
            return self._algebra.mul(self._algebra.eq(self._id(k), named), self._weight(number, k, depth))

        return self._over_slots(of_slot, k)

    def _over_slots(self, body: Callable[[Expr], Expr], k: Expr | None) -> Expr:
        if k is not None:
            return body(k)
        if self._slots_apart:
            return self._algebra.add(*(body(self._algebra.const(k)) for k in range(self._match.K)))
        return self._algebra.sum(self._slot(), body(self._slot()))

    def _slot(self) -> Expr:
        return self._algebra.zero if self._match.K == 1 else self._algebra.var(_LEVEL + 2, self._match.K, "r")

    def _named(self, number: Expr) -> Expr:
        """The id of an expert."""
        return self._algebra.const(self._match.numbers[number.args[0]]) if self._match.numbers else number

    def _id(self, k: Expr) -> Expr:
        return self._elements.of_token(self._match.experts, k, self._match.K)

    def _weight(self, number: Expr, k: Expr, depth: int) -> Expr:
        """The routing weight of a slot, which has the expert ``number``."""
        match, weights = self._match, self._match.weights
        if weights is None:
            own = self._algebra.one
        elif weights.gathered:
            own = self._elements.of_token(weights, number, match.E, depth=depth)
        else:
            own = self._elements.of_token(weights, k, match.K, depth=depth)
        if match.kept is not None and match.kept.of_slots:
            kept = self._elements.of_token(match.kept, number, match.E, slot=(match.K, k))
            own = self._algebra.mul(own, self._mark(kept))
        return self._algebra.mul(own, *(self._scale(scale, number, k, depth) for scale in match.scales))

    def _scale(self, scale: Scale, number: Expr, k: Expr | None, depth: int) -> Expr:
        if scale.width is None:
            return self._elements.of_expert(scale.operand, number, self._match.E)
        column = self._algebra.zero if scale.width == 1 else number if k is None else k
        e = self._elements.of_token(scale.operand, column, scale.width, depth=depth)
        e = self._mark(e) if scale.is_mask else e
        return opposite(self._algebra, e) if scale.is_negated else e

    def _mark(self, e: Expr) -> Expr:
        """What operators read of a number that they compare with zero."""
        return e if is_indicator(e) else self._algebra.cast(torch.bool, e)

    def _scored(self, number: Expr) -> Expr:
        """The share of a layer whose tokens may go to every expert."""
        match, algebra = self._match, self._algebra
        own = algebra.one if match.weights is None else self._elements.of_token(match.weights, number, match.E)
        share = algebra.mul(own, *(self._scale(scale, number, None, 0) for scale in match.scales))
        if (named := match.named) is None:
            return share
        place = algebra.zero if named.C == 1 else algebra.var(_LEVEL + 2, named.C, "r")
        sizes = (named.sequences, match.E, named.C)
        token = algebra.mod(self._elements.token, self._elements.num_tokens // named.sequences)
        hit = algebra.eq(self._elements.of_place(named.tokens, number, place, sizes), token)
        weight = algebra.one if named.weights is None else self._elements.of_place(named.weights, number, place, sizes)
        placed = algebra.mul(hit, weight)
        return algebra.mul(share, algebra.sum(place, placed))

    def _expert(self, number: Expr, activation: Expr, scale: Expr | None) -> Expr:
        """What an expert makes of the token, whose products with the up weights are multiplied by ``scale``."""
        match, elements = self._match, self._elements
        down = elements.of_weight(match.w_down, number, self._f, self._feature)
        down = self._with_low_rank(down, match.low_rank_down, number, self._feature, self._f)
        bias = None if match.b_down is None else elements.of_weight(match.b_down, number, self._feature)
        expert = ExpertTerm(
            binders=(), routing=(), x=elements.of_input(match.x, self._in), scale=() if scale is None else (scale,),
            up=tuple(self._half(number, g) for g in range(1 + self._gated)), down=Projection(down, bias),
            activation=match.activation, width=self._f, feature_in=self._in, dropout=match.dropout,
            parameters=tuple(elements.of_expert(parameter, number, match.E) for parameter in match.parameters),
        )  # fmt: skip
        return written(self._algebra, self._formulas, expert, activation)

    def _half(self, number: Expr, g: int) -> Projection:
        match = self._match
        low_rank = match.low_rank_up[g] if match.low_rank_up else ()
        weight = self._of_half(match.w_up, number, g, self._f, self._in)
        bias = self._of_half(match.b_up, number, g, self._f) if match.b_up else None
        return Projection(self._with_low_rank(weight, low_rank, number, self._f, self._in), bias)

    def _of_half(self, views: tuple[WeightView, ...], number: Expr, g: int, *features: Expr) -> Expr:
        view, half = (views[g], self._algebra.zero) if len(views) == 2 else (views[0], self._algebra.const(g))
        return self._elements.of_weight(view, number, half, *features)

    def _with_low_rank(self, weight: Expr, factors: tuple[Factors, ...], number: Expr, output: Expr, feature: Expr) -> Expr:
        """An expert's weight with what adapters add to it."""
        return self._algebra.add(weight, *(self._low_rank(own, number, output, feature) for own in factors))

    def _low_rank(self, factors: Factors, number: Expr, output: Expr, feature: Expr) -> Expr:
        algebra = self._algebra
        rank = algebra.zero if factors.rank == 1 else algebra.var(_LEVEL + 4, factors.rank, "d")
        a = self._elements.of_weight(factors.a, number, rank, feature)
        b = self._elements.of_weight(factors.b, number, output, rank)
        summed = algebra.sum(rank, algebra.mul(a, b))
        own = algebra.one if factors.scale_E is None else self._elements.of_weight(factors.scale_E, number)
        return algebra.mul(algebra.const(factors.scale), own, summed)

    def _without_projections(self, slots: list[Expr | None]) -> Iterator[Expr]:
        """What zero-computation experts add, of the slots that have a term of their own or of all of them."""
        algebra, match = self._algebra, self._match
        for own in match.zero_computation:
            if own.is_constant:
                vector = self._elements.of_vector(own.vector, self._feature)
            else:
                vector = self._elements.of_token(own.vector, self._feature, match.out_width)
            of_token = algebra.one if own.of_token is None else self._elements.of_token(own.of_token, algebra.zero, 1)
            for number, k in product(map(algebra.const, own.numbers), slots):
                share = self._share(number, number, k, 0)
                yield algebra.mul(algebra.const(own.factor), of_token, share, vector)


def _draws(e: Expr) -> Iterator[Expr]:
    """The calls of dropout in an expression, those inside of others too."""
    for call in subexpressions(e, lambda e: e.kind == "call" and e.args[0] == DROPOUT):
        yield call
        yield from _draws(call.args[1][0])
