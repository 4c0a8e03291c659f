"""Elements of concatenations, and of what is scattered or reordered by one.

A loop over experts that keeps a list of the rows of each and of their outputs, and joins both at the end, has the rows
of an expert in one run. How long a run is only the data tell, so that it starts at a symbolic row.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

from moeblaze_ops.lowering.evaluate.groups import GroupRules
from moeblaze_ops.lowering.evaluate.joined_rows import joined_sizes
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, key_and_number, subexpressions
from moeblaze_ops.lowering.index_notation.number_ranges import may_be_negative

Runs = list[tuple[Size, Size]]
"""Where runs of rows start, and how long they are."""


class RunRules(GroupRules):
    """Rules of `cat` and `argsort`."""

    _land: Callable[..., Any]
    one_of: Callable[..., Expr]

    def _element_cat(self, value: Value, indices: Indices, depth: int) -> Expr:
        xs, dim = value.args
        at = indices[dim]
        offset = at.args[0] if at.kind == "linear" else 0
        for x, start in zip(xs, _starts(tuple(x.shape[dim] for x in xs)), strict=True):
            if isinstance(start, int) or start == offset:
                local = self.algebra.linear(-start, [(1, at)])
                if self.algebra.fits(local, x.shape[dim]):
                    return self.element(x, (*indices[:dim], local, *indices[dim + 1 :]), depth)
        size = xs[0].shape[dim]
        if isinstance(size, int) and size > 1 and all(x.shape == xs[0].shape for x in xs):  # E parts of C rows: E x C rows
            rest = (*indices[:dim], self.algebra.mod(at, size), *indices[dim + 1 :])
            return self.one_of(value, indices, self.algebra.div(at, size), rest, depth)
        return self.algebra.leaf(value, indices)

    def runs(self, index: Value, stored: Value) -> Runs:
        """Those of the rows of ``index``, or of what is stored, one behind another."""
        sizes = joined_sizes(index, stored)
        whole = same_size(sum(sizes), index.shape[0]) and not any(map(may_be_negative, sizes))
        sizes = sizes if whole else index.shape[:1]
        return list(zip(_starts(sizes), sizes, strict=True))

    def _element_argsort(self, value: Value, indices: Indices, depth: int) -> Expr:
        (keys,) = value.args
        if keys.op == "cat" and self.partitioned(keys) is not None:
            return self.algebra.inverse(keys, indices[0])
        return self.algebra.leaf(value, indices)

    def coordinates(self, key: Expr) -> list[Expr] | None:
        """The coordinates of a mask's true elements, of which ``key`` is the position, in row-major order."""
        true = next(subexpressions(key, lambda e: e.kind == "nonzero"), None)
        place = [] if true is None else self.algebra.true_place(*true.args[::2])
        whole = key.kind == "linear" or len(place) == 1
        return place if place and whole and self.algebra.position(true.args[0].shape, place) is key else None

    def partitioned(self, joined: Value) -> Size | None:
        """How many rows there are, where ``joined`` has the positions of each expert's, expert by expert, and so all of them."""
        keys: set[Expr] = set()
        numbers, sizes = [], []
        for part in joined.args[0] if joined.op == "cat" and len(joined.shape) == 1 else ():
            row = self.algebra.fresh((), part.shape[0])
            coordinates = self.coordinates(self.element(part, (row,)))
            if coordinates is None or coordinates[0].args[2] is not row:
                return None
            mask = coordinates[0].args[0]
            hits = self.element(mask, tuple(self.algebra.var(i, size, "r") for i, size in enumerate(mask.shape)))
            key, number = key_and_number(hits)
            if key is None:
                return None
            keys.add(key)
            numbers.append(number.args[0])
            sizes.append(mask.shape)
        if len(keys) != 1 or len(set(sizes)) != 1 or sorted(numbers) != list(range(len(sizes))):
            return None
        (key,) = keys
        bound = self.algebra.extent(key)
        return math.prod(sizes[0]) if isinstance(bound, int) and bound <= len(sizes) else None

    def reordered(self, x: Value, own: Indices, depth: int) -> Expr | None:
        """The element of ``x`` at the row that ``own`` has of a concatenation of all rows: a sum over its runs."""
        if not own or own[0].kind != "inverse" or own[0].args[0].op != "cat":
            return None
        joined, index = own[0].args
        count = self.partitioned(joined)
        total = []
        for start, size in self.runs(joined, joined):
            row = self.algebra.fresh((index, *own[1:]), size)
            at = self.algebra.linear(start, [(1, row)])
            body = self.element(x, (at, *own[1:]), depth)
            landed = self._land(row, [self.element(joined, (at,), depth)], (index,), (count,), body, depth)
            total.append(landed.total(self.algebra))
        return self.algebra.add(*total)


@lru_cache(maxsize=1 << 12)
def _starts(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Where parts of these sizes start, one behind another."""
    return tuple(accumulate(sizes, initial=0))[:-1]
