"""What is zero where a condition is false: comparisons under a mask, and the sizes of what the mask selects.

    any(ids == e) is false      ->  [ids[t, k] = e] is 0 for all t, k;  nonzero(ids == e) has 0 rows
    any(ids[:, 0] == e)         ->  [ids[t, 0] = e] is 0, [ids[t, 1] = e] is not known
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sympy
import torch

from moeblaze_ops.lowering.facts.unique_ids import are_distinct
from moeblaze_ops.lowering.facts.zero_stops_gradient import fades
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.index_notation.expr import BINDERS, CHOSEN, Expr, factors_of
from moeblaze_ops.lowering.index_notation.indicators import is_count, is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra

_IS_ZERO_IF = {
    ("eq", 0): True, ("ne", 0): False, ("gt", 0): False, ("le", 0): True, ("lt", 1): True, ("ge", 1): False,
}  # fmt: skip
"""Comparisons with a number of what is no less than zero, and whether it is zero where they are true."""


_WRAPPING = frozenset((torch.uint8, torch.int8, torch.int16))
"""Dtypes in which a count that is not zero may become zero."""


def zero_if(algebra: Algebra, e: Expr, truth: bool) -> Expr | None:
    """What is zero where ``e`` is ``truth``, a sum of what is never negative; None if nothing is known to be."""
    if e.kind == "cast" and e.args[0] not in _WRAPPING:
        e = e.args[1]
    if e.kind == "call" or e.kind == "eq":
        name, (a, b) = ("eq", e.args) if e.kind == "eq" else (e.args[0], e.args[1] if len(e.args[1]) == 2 else (e, e))
        if a.kind == "const" and name == "eq":
            a, b = b, a
        if b.kind == "const" and _IS_ZERO_IF.get((name, b.args[0])) is truth and _is_count(a):
            return a
        if name == "not":
            return zero_if(algebra, e.args[1][0], not truth)
    if not truth:
        return e if _is_count(e) else None
    terms = e.args if e.kind == "add" else [e]
    negated = algebra.add(algebra.one, *(algebra.mul(algebra.const(-1), term) for term in terms))
    return zero_if(algebra, negated, False)


def _is_count(e: Expr) -> bool:
    """Whether an expression is a sum of products of zeros, ones and weights, which is zero only where all of them are."""
    if e.kind == "add":
        return all(map(_is_count, e.args))
    return is_count(e) or fades(e) or (e.kind == "const" and e.args[0] >= 0)


def is_zero_at(condition: sympy.Basic, size: sympy.Symbol, truth: bool, *, is_flag: bool) -> bool:
    """Whether ``size``, no less than zero, is zero wherever a comparison of it with a number is ``truth``.

        u == 0 is true                  ->  yes
        u > 2 is false                  ->  no: it may be two
    """
    tested = (0, 1) if is_flag else (0, 1, 2, 3, 2**40)
    if not isinstance(condition, sympy.core.relational.Relational):
        condition = sympy.Ne(condition, 0)
    difference = sympy.expand(condition.lhs - condition.rhs)
    is_linear = difference.is_polynomial(size) and sympy.degree(difference, size) == 1  # not min(8, u)
    if difference.free_symbols != {size} or not is_linear:
        return False
    return [condition.subs(size, number) == sympy.true for number in tested] == [truth, *[not truth] * (len(tested) - 1)]


_NOT_UNIFIED = frozenset(("const", "var", "nonzero", "group", "inverse", "distinct"))
"""Kinds of expressions that are the same object, or another one."""


class Zeros:
    """Expressions and sizes that are zero under a condition."""

    def __init__(self, algebra: Algebra, masks_of: Callable[[Size], Iterable[Expr]]) -> None:
        """``masks_of``: any elements of masks, of which a size is the number of true elements."""
        self.algebra, self.masks_of = algebra, masks_of
        self.beside: Zeros | None = None  # of the same condition, in a view of the graph that says more of sizes
        self._sizes: dict[Size, bool] = {}
        self._patterns: list[tuple[frozenset[Expr], list[Expr]]] = []  # products, and their variables
        self._memo: dict[Expr, Expr] = {}
        self._opened = 0

    def add_size(self, size: Size) -> None:
        """Take nothing to be as long as ``size``."""
        self._sizes[size] = True
        self._memo.clear()

    def is_zero_size(self, size: Size) -> bool:
        """Whether nothing is as long as ``size``: no element is true of a mask that selects as many."""
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
        """Whether all ``factors`` are among those of a product, for some values of the bound variables."""

        def choose(rest: list[Expr], binding: dict[Expr, Expr]) -> bool:
            if not rest:
                return True
            for candidate in of:
                extended = dict(binding)
                if self._unify(rest[0], candidate, bound, extended) and choose(rest[1:], extended):
                    return True
            return False

        return choose(factors, {})

    def _unify(self, pattern: Any, e: Any, bound: frozenset[Expr], binding: dict[Expr, Expr]) -> bool:
        """True if an argument of an expression is the pattern's for some values of the bound variables, noted in ``binding``."""
        if isinstance(pattern, tuple):
            return len(pattern) == len(e) and all(self._unify(p, a, bound, binding) for p, a in zip(pattern, e, strict=True))
        if not isinstance(pattern, Expr):
            return pattern == e
        if pattern in bound:
            return self.algebra.fits(e, pattern.args[1]) and binding.setdefault(pattern, e) is e
        if pattern is e:
            return True
        if pattern.kind == e.kind == "distinct":
            return all(are_distinct(self.algebra, *d.args) for d in (pattern, e))
        if pattern.kind != e.kind or pattern.kind in _NOT_UNIFIED or pattern.free.isdisjoint(bound):
            return False
        parts, others = pattern.args, e.args
        if pattern.kind in ("eq", "add", "mul"):
            return self._unify_in_any_order(parts, others, bound, binding)
        if pattern.kind == "linear":
            return parts[0] == others[0] and self._unify_in_any_order(parts[1], others[1], bound, binding)
        if pattern.kind == "leaf":
            return parts[0] is others[0] and self._unify_indices(pattern, e, bound, binding)
        if pattern.kind not in BINDERS:
            return self._unify(parts, others, bound, binding)
        (inner, body), (variable, other) = self.algebra.open(pattern), self.algebra.open(e)
        same = inner is variable and self._unify((body, *parts[2:]), (other, *others[2:]), bound, binding)
        return same and not any(variable in value.free for value in binding.values())

    def _unify_in_any_order(self, patterns: tuple, terms: tuple, bound: frozenset[Expr], binding: dict[Expr, Expr]) -> bool:
        """Terms, factors or sides, each of which is one of the pattern's.

            where((ids >= 2) * (ids < 5), ids - 2, E) == e          holds for no token of expert e, whatever t and k are
        """
        if len(patterns) != len(terms) or not patterns:
            return len(patterns) == len(terms)
        for number, term in enumerate(terms):
            trial, others = dict(binding), terms[:number] + terms[number + 1 :]
            if self._unify(patterns[0], term, bound, trial) and self._unify_in_any_order(patterns[1:], others, bound, trial):
                binding.update(trial)
                return True
        return False

    def _unify_indices(self, pattern: Expr, e: Expr, bound: frozenset[Expr], binding: dict[Expr, Expr]) -> bool:
        """Indices of one tensor: a variable as long as the axis stands for whatever is read there."""
        shape, indices = pattern.args[0].shape, pattern.args[1]
        if (flat := self._of_flat(indices, e.args[1], shape)) is not None:
            (position, value) = flat
            return position in bound and binding.setdefault(position, value) is value
        for axis, (p, a) in enumerate(zip(indices, e.args[1], strict=True)):
            parts = self._parts(p, a, shape[axis], bound)
            for part, value in parts:
                if binding.setdefault(part, value) is not value:
                    return False
            if not parts and not self._unify(p, a, bound, binding):
                return False
        return True

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
