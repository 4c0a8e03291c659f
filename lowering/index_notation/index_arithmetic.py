"""Indices and elements: what reads no sum, in one pool of interned expressions."""

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from moeblaze_ops.lowering.graph.sizes import Size, exact_quotient, is_at_most, same_size, size_of
from moeblaze_ops.lowering.index_notation.expr import Expr, linear_parts
from moeblaze_ops.lowering.index_notation.indicators import is_below, is_choice
from moeblaze_ops.lowering.index_notation.number_ranges import extent, lower_bound, never_negative


class IndexArithmetic:
    """Constructors of numbers, variables, elements and linear forms."""

    def __init__(self) -> None:
        self._pool: dict[tuple, Expr] = {}
        self.zero = self.const(0)
        self.one = self.const(1)

    def _intern(self, kind: str, *args: Any) -> Expr:
        key = (kind, args)
        found = self._pool.get(key)
        if found is None:
            found = self._pool[key] = Expr(kind, args, len(self._pool))
        return found

    def const(self, value: float) -> Expr:
        """A number; a whole one is an int in whatever type it came, since equal numbers are one expression."""
        if isinstance(value, bool | float) and abs(value) < 2**53 and value == int(value):
            value = int(value)
        return self._intern("const", value)

    def var(self, level: int, extent: Size, tag: str) -> Expr:
        return self._intern("var", level, extent, tag)

    def fresh(self, used: Iterable[Expr], extent: Size, tag: str = "r") -> Expr:
        """A variable numbered above each that is free in ``used``, and above bound ones; zero where it has one value."""
        if extent == 1:
            return self.zero
        levels = [v.args[0] for e in used for v in e.free]
        return self.var(max([-1, *levels]) + 1, extent, tag)

    def leaf(self, value: Any, indices: tuple[Expr, ...]) -> Expr:
        if value.is_permutation and indices[0].kind == "inverse" and indices[0].args[0] is value:
            return indices[0].args[1]
        return self._intern("leaf", value, indices)

    def nonzero(self, mask: Any, axis: int, row: Expr, extent: Size) -> Expr:
        return self._intern("nonzero", mask, axis, row, extent)

    def true_place(self, mask: Any, row: Expr) -> list[Expr]:
        """The indices of the true element of a mask that comes ``row``-th in row-major order."""
        return [self.nonzero(mask, axis, row, extent) for axis, extent in enumerate(mask.shape)]

    def distinct(self, e: Expr, var: Expr) -> Expr:
        return self._intern("distinct", e, var)

    def inverse(self, permutation: Any, index: Expr) -> Expr:
        if index.kind == "leaf" and index.args[0] is permutation:
            return index.args[1][0]
        return self._intern("inverse", permutation, index)

    # Index arithmetic.

    extent = staticmethod(extent)

    def fits(self, e: Expr, size: Size, marks: Collection[Expr] = ()) -> bool:
        """True if an index expression is from 0 on and stays below ``size``, where all marks are 1."""
        if is_choice(e):
            return all(self.fits(side, size, marks) for side in e.args[1][1:])
        floors = dict.fromkeys(marks, 1)
        bound = self.extent(e, floors)
        below = any(is_below(mark, e, size) for mark in marks) and never_negative(e, floors)
        return below or (bound is not None and is_at_most(bound, size))

    def linear(self, constant: Size, terms: Iterable[tuple[Size, Expr]]) -> Expr:
        """``constant + sum(coefficient * expr)`` over integers."""
        sums: dict[Expr, Size] = {}

        def collect(coefficient: Size, e: Expr) -> None:
            nonlocal constant
            own, parts = linear_parts(e)
            constant = constant + coefficient * own
            for inner, atom in parts:
                sums[atom] = sums.get(atom, 0) + coefficient * inner

        for coefficient, e in terms:
            collect(coefficient, e)
        for atom in list(sums):  # size * (e // size) + e % size == e
            if atom.kind == "mod" and atom in sums:
                quotient = self._intern("div", *atom.args)
                scale = sums[atom]
                if quotient in sums and same_size(sums[quotient], scale * atom.args[1]):
                    del sums[atom], sums[quotient]
                    collect(scale, atom.args[0])
        constant = size_of(constant)
        ordered = tuple(sorted(((c, a) for a, c in sums.items() if c != 0), key=lambda term: term[1].uid))
        if not ordered:
            return self.const(constant)
        if constant == 0 and len(ordered) == 1 and ordered[0][0] == 1:
            return ordered[0][1]
        return self._intern("linear", constant, ordered)

    def position(self, sizes: Sequence[Size], indices: Sequence[Expr]) -> Expr:
        """The row-major position of an element among those of a tensor."""
        strides = accumulate(reversed(sizes[1:]), operator.mul, initial=1)
        return self.linear(0, zip(strides, reversed(indices), strict=False))

    def _split(self, e: Expr, size: Size) -> tuple[Expr, Expr] | None:
        """Quotient and remainder of ``e`` by ``size`` where the linear form shows them."""
        if size == 0:
            return None  # an index into nothing
        if e.kind == "const" and isinstance(size, int):
            return self.const(e.args[0] // size), self.const(e.args[0] % size)
        if self.fits(e, size):
            return self.zero, e
        constant, terms = linear_parts(e)
        whole: list[tuple[Size, Expr]] = []
        rest: list[tuple[Size, Expr]] = []
        for coefficient, atom in terms:
            quotient = exact_quotient(coefficient, size)
            if quotient is None:
                rest.append((coefficient, atom))
            else:
                whole.append((quotient, atom))
        first = lower_bound(self.linear(0, rest))  # of C e + p - 1, where p is no less than 1, the remainder is p - 1
        known = all(isinstance(number, int) for number in (constant, size, first))
        base = (constant + first) // size if known else exact_quotient(constant, size) or 0
        remainder = self.linear(constant - base * size, rest)
        return (self.linear(base, whole), remainder) if (whole or base) and self.fits(remainder, size) else None

    def div(self, e: Expr, size: Size) -> Expr:
        split = self._split(e, size)
        return split[0] if split else self._intern("div", e, size)

    def mod(self, e: Expr, size: Size) -> Expr:
        split = self._split(e, size)
        return split[1] if split else self._intern("mod", e, size)
