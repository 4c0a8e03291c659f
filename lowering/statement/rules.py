"""Equalities that hold for layers: most of them where the ids of a token differ.

They bring what a graph computes and what a match states to one form, in which equal sums are the same object. What is rounded on
the way is no part of that form, and subscripts that data give are in range there.
"""

from collections import Counter
from itertools import combinations

import torch

from moeblaze_ops.lowering.evaluate.depth import MAX_PROJECTIONS
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.facts.zero_stops_gradient import fades, is_rectified
from moeblaze_ops.lowering.graph.sizes import same_size
from moeblaze_ops.lowering.index_notation.distribution import factored, terms_of
from moeblaze_ops.lowering.index_notation.expr import CHOSEN, DROPOUT, Expr, factors_of, is_changing, split_number, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_indicator, is_order

_LEVEL = 150
"""Variables that stand for subscripts are numbered from here, above those of a statement."""


class LayerForm:
    """Expressions in the form that layers are compared in."""

    def __init__(self, evaluator: Evaluator):
        self._evaluator, self._algebra = evaluator, evaluator.algebra
        self._known: dict[Expr, Expr] = {}

    def of(self, e: Expr) -> Expr:
        found = self._known.get(e)
        if found is None:
            found = self._known[e] = self._of(e)
        return found

    def _of(self, e: Expr) -> Expr:
        algebra = self._algebra
        match e.kind:
            case "distinct" if algebra.tells(e.args[:1], e.args[1]):
                return algebra.one
            case "cast" if e.args[0].is_floating_point:
                return self.of(e.args[1])
            case "any" if self._is_once(e):
                var, body = algebra.open(e)
                return algebra.sum(var, self.of(body))
            case "sum":
                var, body = algebra.open(e)
                return self._summed(var, self.of(body))
            case "prefix":
                var, body = algebra.open(e)
                return algebra.prefix(var, self.of(body), self.of(e.args[2]))
            case "call" if e.args[0] == DROPOUT:
                return algebra.call(DROPOUT, (self.of(e.args[1][0]),), e.args[2][0])
            case "call" if (whole := algebra.unscaled(e)) is not e:
                return self.of(whole)
            case "leaf" if is_changing(e):
                return algebra.const(e.args[0].args[0].present)
            case "leaf" if e.args[0].op == "low_rank":
                base, added = (self._evaluator.element(part, e.args[1], 1) for part in e.args[0].args)
                terms = terms_of(algebra, self.of(added), lambda e: (f for f in factors_of(e) if f.kind == "add"))
                return self._sum([self.of(base), *terms])
            case "leaf":
                return self._subscripted(e)
            case "cast" if e.args[0] == torch.bool and all(map(_stops_gradient, factors_of(e.args[1]))):
                return algebra.call(CHOSEN, (self.of(e.args[1]),))
            case "add":
                return self._sum([self.of(term) for term in e.args])
            case "mul":
                return self._product([self.of(factor) for factor in e.args])
        return algebra._rebuild(e, self.of)

    def _summed(self, var: Expr, body: Expr) -> Expr:
        """A sum over ``var`` inside of another one, as far as that has factors that do not depend on it: sum_c sum_e g_e h_ec."""
        outer, inner = self._algebra.open(body) if body.kind == "sum" else (var, body)
        apart = [f for f in factors_of(inner) if var not in f.free]
        if outer is var or not apart:
            return self._algebra.sum(var, body)
        rest = self._algebra.mul(*(f for f in factors_of(inner) if f not in apart))
        return self._summed(outer, self._algebra.mul(*apart, self._algebra.sum(var, rest)))

    def _sum(self, terms: list[Expr]) -> Expr:
        """A sum in which a product stands once, with one number; what all of them have stands before the sum.

            a + a = 2 a        2 a + 2 b = 2 (a + b)        w a - w b = w (a - b)
        """
        algebra, numbers = self._algebra, dict[Expr, float]()
        whole = algebra.add(*terms)
        for term in whole.args if whole.kind == "add" else (whole,):
            number, factors = split_number(term)
            rest = algebra.mul(*factors)
            numbers[rest] = numbers.get(rest, 0) + number
        return factored(algebra, algebra.add(*(algebra.mul(algebra.const(number), rest) for rest, number in numbers.items())))

    def _product(self, factors: list[Expr]) -> Expr:
        """A product in which a mask stands once: it is 1 beside itself, and beside a sum of what it brackets.

            [m] f([m] x) = [m] f(x)        (sum_k [m_k]) (sum_k [m_k] w_k) = sum_k [m_k] w_k        [w != 0] w = w

        The last one holds where no gradient gets past a zero. Beside a comparison of an id with a number the id is that number.
        """
        algebra = self._algebra
        flat = Counter(part for part in self._merged([part for factor in factors for part in factors_of(factor)]))
        flat -= Counter({part: number - 1 for part, number in flat.items() if self._is_mask(part) or is_indicator(part)})
        whole = algebra.mul(*(f for f in flat.elements() if not any(self._absorbs(f, g) for g in flat)))
        if whole.kind != "mul":
            return whole
        sides = [(f, *own) for f in whole.args if f.kind == "eq" for own in (f.args, f.args[::-1])]
        told = [({ids: number}, [f]) for f, ids, number in sides if ids.kind == "leaf" and number.kind in ("const", "var")]
        marks = subexpressions(whole, lambda e: self._is_mask(e) or is_order(e) or (e.kind == "call" and e.args[0] == CHOSEN))
        told += [({mask: algebra.one}, [g for g in whole.args if g is mask or self._absorbs(mask, g)]) for mask in marks]
        for known, beside in told:
            if beside or algebra.mul(whole, *known) is whole:
                rest = (g if g in beside else algebra.substitute(g, known) for g in whole.args)
                if (less := algebra.mul(*rest)) is not whole:
                    return self.of(less)
        return whole

    def _merged(self, factors: list[Expr]) -> list[Expr]:
        """Factors of which no two are sums of what the same comparisons bracket, of which one holds at most.

            (sum_k [m_k] a_k) (sum_k [m_k] b_k) = sum_k [m_k] a_k b_k
        """
        for first, second in combinations([f for f in factors if f.kind == "sum"], 2):
            (slot, a), (other, b) = self._algebra.open(first), self._algebra.open(second)
            b = self._algebra.substitute(b, {other: slot}) if same_size(slot.args[1], other.args[1]) else b
            shared = [hit for hit in factors_of(a) if hit in factors_of(b) and self._is_mask(self._algebra.sum(slot, hit))]
            if shared and slot.args[2] == "r" and slot in shared[0].free:
                rest = list((Counter(factors) - Counter((first, second))).elements())
                return self._merged([*rest, self._algebra.sum(slot, self._algebra.mul(a, b))])
        return factors

    def _subscripted(self, leaf: Expr) -> Expr:
        """An element at subscripts that data give, which are in range: the same element as at any other index."""
        value, indices = leaf.args
        given = {
            self._algebra.var(_LEVEL + axis, size, "r"): index
            for axis, (index, size) in enumerate(zip(indices, value.shape, strict=True))
            if self._evaluator.may_be_outside(index, size)
        }
        if not given:
            return leaf
        of_index = {index: var for var, index in given.items()}
        anywhere = self._evaluator.try_element(value, tuple(of_index.get(index, index) for index in indices), MAX_PROJECTIONS)
        return leaf if anywhere is None else self._algebra.substitute(anywhere, given)

    def _is_mask(self, e: Expr) -> bool:
        """True if ``e`` is 0 or 1 by comparisons."""
        return e.kind == "eq" or (e.kind == "any" and e.args[1].kind == "eq") or (e.kind == "sum" and self._is_once(e))

    def _is_once(self, e: Expr) -> bool:
        """True if ``e`` binds a comparison of ids that differ, of which one is the expert's at most."""
        var, body = self._algebra.open(e)
        return body.kind == "eq" and self._algebra.tells((), var, [body])

    def _absorbs(self, mask: Expr, other: Expr) -> bool:
        """True if ``other`` is a sum of what comparisons bracket, term by term, of which ``mask`` says that one of them holds."""
        if mask.kind not in ("any", "sum") or not self._is_mask(mask) or other.kind != "sum" or other is mask:
            return False
        (var, hit), (slot, body) = self._algebra.open(mask), self._algebra.open(other)
        return self._algebra.substitute(hit, {var: slot}) in factors_of(body)


def _stops_gradient(e: Expr) -> bool:
    """True if no gradient gets past ``e`` where it is zero, as it is rounded.

        relu(scores), softmax(logits)         but not  scores: one of zero has a gradient
    """
    rectified = (e.kind == "call" and e.args[0] == "relu") or (e.kind == "leaf" and is_rectified(e.args[0]))
    return rectified or fades(e) or is_indicator(e) or (e.kind == "const" and e.args[0] != 0)
