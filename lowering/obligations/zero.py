"""What is zero where a condition is false: comparisons under a mask, and the sizes of what the mask selects.

    any(ids == e) is false      ->  [ids[t, k] = e] is 0 for all t, k;  nonzero(ids == e) has 0 rows
    any(ids[:, 0] == e)         ->  [ids[t, 0] = e] is 0, [ids[t, 1] = e] is not known
    counts[e] < 2               ->  nothing is: there may be one
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from moeblaze_ops.lowering.evaluate.groups import written_out
from moeblaze_ops.lowering.facts.zero_stops_gradient import fades
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.index_notation.expr import (
    BINDERS,
    CHOSEN,
    Expr,
    complement_of,
    factors_of,
    split_number,
    subexpressions,
)
from moeblaze_ops.lowering.index_notation.indicators import LARGEST_EXACT, is_count, is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.pointwise import opposite

_WRAPPING = frozenset((torch.uint8, torch.int8, torch.int16, torch.uint16))
"""Dtypes in which a count that is not zero may become zero."""

_SMALLEST = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
"""The least factor by which one is not zero in any dtype of weights."""

_RELATIONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def zero_where(algebra: Algebra, e: Expr, truth: bool) -> list[Expr]:
    """What is zero, and never negative, where ``e`` is ``truth``; nothing if that is not known of anything."""
    e = _unwrapped(e)
    if e.kind == "call" and e.args[0] == "not":
        return zero_where(algebra, e.args[1][0], not truth)
    if complement_of(e):  # counts[e] != 0, which is 1 - [counts[e] = 0]
        return zero_where(algebra, opposite(algebra, e), not truth)
    name, sides = ("eq", e.args) if e.kind == "eq" else (e.args[0], e.args[1]) if e.kind == "call" else ("", ())
    if name in _RELATIONS:
        (one, of_one), (other, of_other) = (summed(algebra, side) for side in sides)
        both = of_one.keys() & of_other.keys()
        rounds = any(not is_count(term) or of_one[term] % 1 or of_other[term] % 1 for term in both)  # weight * 1.001 > weight
        of_one.subtract(of_other)
        known = [] if rounds else all_zero(getattr(operator, name), one - other, of_one, truth)
        return known or ([] if truth else [e])
    found = all_zero(operator.ne, *summed(algebra, e), truth)
    return [zero for term in found for zero in ([e] if term is e else zero_where(algebra, term, False))]


def summed(algebra: Algebra, e: Expr) -> tuple[float, Counter[Expr]]:
    """A sum as a number, and how often each of its other terms is added to it; as itself, once, where that may round.

        count + 1       is 1 and the count
        count + 1e9     is itself: of fp32 it is 1e9 where there is one
    """
    constant, terms = 0, Counter[Expr]()
    for number, factors in map(split_number, written_out(algebra, e)):
        if factors:
            terms[algebra.mul(*factors)] += number
        else:
            constant += number
    is_exact = not constant or (constant % 1 == 0 and abs(constant) < LARGEST_EXACT[torch.bfloat16] and all(map(is_count, terms)))
    return (constant, terms) if is_exact or not terms else (0, Counter({e: 1}))


def all_zero(compare: Callable[[Any, Any], Any], constant: Any, terms: Mapping[Any, Any], truth: bool) -> list[Any]:
    """The terms of a sum, counts and weights, if all are zero wherever a comparison of it with zero is ``truth``; else none.

    Sizes of what a mask selects, which are no expressions, are counts.

        count == 0 is true              ->  yes
        count - 2 > 0 is false          ->  no: it may be two
        weight - 1 < 0 is true          ->  no: it may be a half
    """
    numbers = {term: times for term, times in terms.items() if times}
    counts = [not isinstance(term, Expr) or is_count(_unwrapped(term)) for term in numbers]
    natural = all(is_one or fades(term) for is_one, term in zip(counts, numbers, strict=True))
    if not natural or len({times > 0 for times in numbers.values()}) != 1:
        return []
    step = min(numbers.values(), key=abs)
    is_flag = len(numbers) == 1 and all(isinstance(term, Expr) and is_indicator(term) for term in numbers)
    tested = [step] if is_flag else [step, 2 * step, 3 * step, 2**40 * step, *([] if all(counts) else [math.ulp(0.0) * step])]
    are_others = all(bool(compare(constant + number, 0)) is not truth for number in tested)
    known = are_others and abs(step) >= _SMALLEST and bool(compare(constant, 0)) is truth
    return [_unwrapped(term) if isinstance(term, Expr) else term for term in numbers] if known else []


def _unwrapped(e: Expr) -> Expr:
    """A count without a cast that leaves it zero only where it is."""
    return e.args[1] if e.kind == "cast" and e.args[0] not in _WRAPPING and is_count(e.args[1]) else e


class Zeros:
    """Expressions and sizes that are zero under a condition."""

    def __init__(self, algebra: Algebra, masks_of: Callable[[Size], Iterable[Expr]]) -> None:
        """``masks_of``: any elements of masks, of which a size is the number of true elements."""
        self.algebra, self.masks_of = algebra, masks_of
        self.beside: Zeros | None = None  # of the same condition, in a view of the graph that says more of sizes
        self._sizes: dict[Size, bool] = {}
        self._zeros: set[Expr] = set()
        self._patterns: list[tuple[frozenset[Expr], list[Expr]]] = []  # products, and their variables
        self._memo: dict[Expr, Expr] = {}
        self._opened = 0

    def add_size(self, size: Size) -> None:
        """Take nothing to be as long as ``size``."""
        self._sizes[size] = True
        self._memo.clear()

    def is_zero_size(self, size: Size) -> bool:
        """True if nothing is as long as ``size``: no element is true of a mask that selects as many."""
        if isinstance(size, int):
            return size == 0
        if size not in self._sizes:
            self._sizes[size] = False
            known = any(self.without(element) is self.algebra.zero for element in self.masks_of(size))
            self._sizes[size] = known or (self.beside is not None and self.beside.is_zero_size(size))
        return self._sizes[size]

    def add(self, e: Expr, variables: frozenset[Expr] = frozenset()) -> None:
        """Take a sum of what is never negative for zero, whatever ``variables`` in it are."""
        if e.kind in ("sum", "any"):
            self._zeros.add(e)
            variable, body = self.algebra.open(e)
            fresh = self.algebra.var(5000 + len(variables), *variable.args[1:])
            self.add(self.algebra.substitute(body, {variable: fresh}), variables | {fresh})
        elif e.kind == "add":
            for term in () if is_indicator(e) else e.args:  # where 1 - mask is zero the mask is not
                self.add(term, variables)
        else:
            factors = [f for f in factors_of(e) if f.kind not in ("distinct", "const")]
            if not factors:
                return  # that a number is zero says nothing of what is no number: `counts[0] = 0`, `if counts[0] > 0:`
            bound = variables
            if len(factors) == 1 and factors[0].kind == "call" and factors[0].args[0] == "ge":
                self._patterns.append((bound, [self.algebra.eq(*factors[0].args[1])]))  # what is below a number is not that
            for inner in factors if len(factors) == 1 else []:
                if inner.kind in ("any", "sum"):
                    return self.add(inner, bound)
                if inner.kind == "call" and inner.args[0] == CHOSEN:
                    (number,) = inner.args[1]
                    self.add(number, bound)  # what is not chosen is zero
            self._patterns.append((bound, factors))
        self._memo.clear()

    def without(self, e: Expr) -> Expr:
        """``e`` with zeros for what is zero."""
        found = self._memo.get(e)
        if found is None:
            found = self._memo[e] = self._visit(e)
        return found

    def _visit(self, e: Expr) -> Expr:
        algebra = self.algebra
        if e in self._zeros:
            return algebra.zero
        if e.kind in BINDERS and e.kind != "group" and self.is_zero_size(e.args[0].args[1]):
            return algebra.zero
        if is_indicator(e) or e.kind in ("mul", "sum", "any"):
            of = [e] if e.kind in ("sum", "any") else list(self._factors(e))
            if any(self._is_product(bound, factors, of) for bound, factors in self._patterns):
                return algebra.zero
        return algebra._rebuild(e, self.without)

    def _factors(self, e: Expr) -> Iterator[Expr]:
        """The factors of a product, those of sums in it that each of their terms has, too.

            room[t] * sum_k [ids[t, k] = e] * w[t, k]       room[t], [ids[t, k] = e], w[t, k] for some k, and the sum
        """
        for f in factors_of(e):
            yield f
            if f.kind in ("sum", "any"):
                variable, body = self.algebra.open(f)
                self._opened += 1
                fresh = self.algebra.var(6000 + self._opened, *variable.args[1:])
                yield from self._factors(self.algebra.substitute(body, {variable: fresh}))

    def _is_product(self, bound: frozenset[Expr], factors: list[Expr], of: Iterable[Expr]) -> bool:
        """True if all ``factors`` are among those of a product, for some values of the bound variables: for any that it tries."""
        known = set(of)
        used = bound & frozenset().union(*(factor.free for factor in factors))
        own, read = ([*_leaves(each)] for each in (factors, known))
        own = [leaf for leaf in own if not used.isdisjoint(leaf.free)]
        if not {leaf.args[0] for leaf in own} <= {leaf.args[0] for leaf in read}:
            return False
        # The number of an expert is compared with ids, and need not be where anything is read.
        numbers = {side for each in known for hit in subexpressions(each, lambda e: e.kind == "eq") for side in hit.args}
        for found in self._values(own, read, used, {}):
            others = [var for var in used if var not in found]
            for chosen in product(numbers, repeat=len(others)):
                fits = all(self.algebra.fits(*pair) for pair in zip(chosen, (var.args[1] for var in others), strict=True))
                values = found | dict(zip(others, chosen, strict=True))
                if fits and all(self.algebra.substitute(factor, values) in known for factor in factors):
                    return True
        return False

    def _values(
        self, patterns: list[Expr], leaves: list[Expr], bound: frozenset[Expr], values: dict[Expr, Expr]
    ) -> Iterator[dict[Expr, Expr]]:
        """Values of bound variables at which the elements ``patterns`` are some of the ``leaves``."""
        if not patterns:
            yield values
            return
        first, *others = patterns
        for leaf in leaves:
            if leaf.args[0] is first.args[0]:
                found = dict(self._read_at(first, leaf, bound))
                if all(values.get(var, value) is value for var, value in found.items()):
                    yield from self._values(others, leaves, bound, values | found)

    def _read_at(self, pattern: Expr, leaf: Expr, bound: frozenset[Expr]) -> Iterator[tuple[Expr, Expr]]:
        """What the variables in the indices of an element are where it is another element of that tensor."""
        shape, indices, at = pattern.args[0].shape, pattern.args[1], leaf.args[1]
        if (flat := self._of_flat(indices, at, shape)) is not None and flat[0] in bound:
            yield flat
            return
        for p, a, size in zip(indices, at, shape, strict=True):
            if p in bound and not same_size(p.args[1], size) and self.algebra.fits(a, p.args[1]):
                yield p, a
            yield from self._parts(p, a, size, bound)

    def _parts(self, p: Expr, a: Expr, size: Size, bound: frozenset[Expr]) -> list[tuple[Expr, Expr]]:
        """What the variables of an index that goes through a whole axis are, where it is ``a``.

            t       of an axis of T:        t is a
            S * b + s   of one of B * S:    s is a % S, b is a // S
        """
        if p in bound and same_size(p.args[1], size):
            return [(p, a)]
        if p.kind != "linear" or p.args[0] != 0:
            return []
        terms = sorted(p.args[1], key=lambda term: term[0] != 1)
        if len(terms) != 2 or terms[0][0] != 1 or not all(atom in bound for _, atom in terms):
            return []
        (_, inner), (stride, outer) = terms
        whole = same_size(stride, inner.args[1]) and same_size(stride * outer.args[1], size)
        return [(inner, self.algebra.mod(a, stride)), (outer, self.algebra.div(a, stride))] if whole else []

    def _of_flat(self, indices: tuple[Expr, ...], values: tuple[Expr, ...], shape: tuple[Size, ...]) -> tuple[Expr, Expr] | None:
        """A flat position through all of a tensor whose quotient and remainder are read, and what it is.

            x.t().flatten()[s]      ->  x[s % T, s // T]
        """
        if len(indices) != 2 or {index.kind for index in indices} != {"div", "mod"} or indices[0].args != indices[1].args:
            return None
        flat, size = indices[0].args
        (inner, outer) = (0, 1) if indices[0].kind == "mod" else (1, 0)
        if not same_size(size, shape[inner]) or not same_size(self.algebra.extent(flat) or -1, shape[0] * shape[1]):
            return None
        return flat, self.algebra.linear(0, [(1, values[inner]), (size, values[outer])])


def _leaves(of: Iterable[Expr]) -> Iterator[Expr]:
    """The elements of tensors that expressions are made of, those that they are indexed by among them."""
    for e in of:
        for leaf in subexpressions(e, lambda inner: inner.kind == "leaf"):
            yield leaf
            yield from _leaves(leaf.args[1])
