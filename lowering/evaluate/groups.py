"""Elements of products of row groups, and which group a row is in.

Groups stand one behind another and are given by where each ends, a running count of ids, or by the two bounds of a slice
that are sums of the first counts. In what was sorted by these ids, the group of a row is the row's id.

    rows[starts[e] : starts[e] + counts[e]]     the rows of group e, where starts[e] = counts[0] + ... + counts[e - 1]
    rows[starts[e] : starts[e] + counts[e] + 1]     one row too many: no group
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moeblaze_ops.lowering.evaluate.counted_numbers import count_of_any
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, factors_of, key_and_number, split_number
from moeblaze_ops.lowering.index_notation.indicators import is_count, is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative


class GroupRules:
    """Rules of `searched`, `between` and `grouped_mm`; mixed into `Evaluator`, as those of `RunRules` and `IndexingRules`."""

    algebra: Algebra
    element: Callable[..., Expr]
    _bind: Callable[..., Expr]
    _runs: "dict[Value, Run | None]"
    _first_of: "dict[tuple[Run, tuple[Size, ...]], Value]"

    def _element_searched(self, value: Value, indices: Indices, depth: int) -> Expr:
        ends, x = value.args
        row = self.element(x, indices, depth)
        group = self._group(ends, ends.shape[0], row, indices, depth)
        return self.algebra.leaf(value, indices) if group is None else group

    def _element_between(self, value: Value, indices: Indices, depth: int) -> Expr:
        run = self.run(value)
        if run is None:
            return self.algebra.leaf(value, indices)
        return self.algebra.eq(self.algebra.group(run.var, run.counts, indices[0]), self.algebra.const(run.number))

    def run(self, mask: Value) -> "Run | None":
        """Which group of rows a mask of the rows between two bounds selects, None where it may be another."""
        if mask not in self._runs:
            self._runs[mask] = None  # of bounds that this mask is a part of
            self._runs[mask] = self._find_run(mask)
        return self._runs[mask]

    def same_rows(self, mask: Value) -> Value:
        """The first of the masks that select the rows of the same group.

            torch.cat([f(rows[:a]), f(rows[a:b])])      its second part is ``rows[a:b]``, by the lengths of its parts
        """
        run = self.run(mask) if mask.op == "between" else None
        return mask if run is None else self._first_of.setdefault((run, mask.shape), mask)

    def selected(self, mask: Value) -> Expr | None:
        """How many rows a mask between two bounds selects, where none of them is behind the last row."""
        run = self.run(mask)
        within = run is not None and rows_counted(self.algebra, run.var, run.counts, mask.shape[0])
        return self.in_group(mask) if within else None

    def in_group(self, mask: Value) -> Expr | None:
        """How many rows at most a mask between two bounds selects."""
        run = self.run(mask)
        return None if run is None else self.algebra.substitute(run.counts, {run.var: self.algebra.const(run.number)})

    def _find_run(self, mask: Value) -> "Run | None":
        (start, lower), (end, upper) = (self._terms_of(bound) for bound in mask.args)
        if None in (lower, upper) or start != 0 or -lower:
            return None
        to_the_end = not upper and same_size(end, mask.shape[0])
        counted = list((upper - lower).elements()) if end == 0 and not -upper else []
        sample = counted[0] if len(counted) == 1 else next(iter(lower), None) if to_the_end else None
        if sample is None or not (found := self.numbered(sample)):
            return None
        var, counts = found.var, found.counts
        number, before = 0, lower
        while before and before <= lower:
            term = self.algebra.substitute(counts, {var: self.algebra.const(number)})
            if before[term] != 1:
                return None
            before, number = before - Counter([term]), number + 1
        if to_the_end:
            alone = rows_counted(self.algebra, var, counts, mask.shape[0], number + 1)
        else:
            alone = counted[0] is self.algebra.substitute(counts, {var: self.algebra.const(number)}) and not lower - upper
        return Run(var, counts, number) if alone else None

    def _terms_of(self, bound: tuple) -> tuple[Size, Counter | None]:
        """What a bound has beside what tensors hold, and the terms of that, running sums written out; None if not known."""
        known, values = bound
        terms: Counter = Counter()
        for value, times in values:
            for term in written_out(self.algebra, self.element(value, ())):
                terms[term] += times
        return known, None if any(term.kind == "const" for term in terms) else Counter({t: n for t, n in terms.items() if n})

    def numbered(self, count: Expr) -> "Run | None":
        """A count of one number as that of any, with a variable in its place."""
        if (found := count_of_any(self.algebra, count)) is None:
            return None
        var, counts, number = found
        alike = is_count(counts) and self.algebra.substitute(counts, {var: self.algebra.const(number)}) is count
        return Run(var, counts, number) if alike else None

    def _group(self, ends: Value, num_groups: Size, row: Expr, indices: Indices, depth: int) -> Expr | None:
        """The group in which a row stands, where the ends of the groups are running counts."""
        number = self.algebra.fresh(indices, num_groups)
        end = self.element(ends, (number,), depth)
        running = end.kind == "prefix" and end.args[2] is number
        return self.algebra.group(*self.algebra.open(end), row) if running else None

    def _element_grouped_mm(self, value: Value, indices: Indices, depth: int) -> Expr:
        rows, weights, offsets = value.args
        row, column = indices
        group = self._group(offsets, weights.shape[0], row, indices, depth)
        if group is None:
            return self.algebra.leaf(value, indices)
        width = self.algebra.fresh(indices, rows.shape[1], "d")
        row_element = self._with_number(self.element(rows, (row, width), depth + 1), (width,))
        product = self.algebra.mul(row_element, self.element(weights, (group, width, column), depth + 1))
        return self.algebra.sum(width, product)

    def _with_number(self, e: Expr, features: Indices) -> Expr:
        """The element of a projection's input; a number that it is multiplied by stays a part of it, or of its scale."""
        number, others = split_number(e)
        kept = [f for f in others if not is_indicator(f) and f.free.isdisjoint(features)] or [
            f for f in others if not f.free.isdisjoint(features)
        ]
        if number == 1 or e.has_dot or not kept:
            return e
        rest = [*others]
        rest.remove(kept[0])  # once, of a square
        return self.algebra.mul(self.algebra.scaled(number, kept[0]), *rest)

    def _resolve_group(self, group: Expr) -> Expr:
        """The expert of a row that a sort by expert put in place, as the sorted key itself, or of one that was taken by it."""
        row = group.args[2]
        if row is self.algebra.zero:  # where there is one row in all its key is counted alone
            number, counts = self.algebra.open(group)
            key, axes = keys_counted(self.algebra, number, counts) or (group, [])
            return group if axes or number in key.free else key
        if row.kind == "nonzero":
            return self._group_taken(group, row.args[0]) or group
        if row.kind != "inverse" or row.args[0].op != "argsort":
            return group
        keys = row.args[0].args[0]
        return self.element(keys, (row.args[1],)) if self._counts(*self.algebra.open(group), keys) else group

    def _group_taken(self, group: Expr, mask: Value) -> Expr | None:
        """The number that the groups of all rows of ``mask`` were compared with.

            joined = torch.cat([f(p) for p in rows.split(counts)])
            parts = joined.split(counts)        parts[e] has rows of group e, and those alone
            parts = joined.split(counts[::-1])  parts[e] may have rows of any group
        """
        row = self.algebra.fresh((), mask.shape[0])
        hits = self.element(mask, (row,)) if len(mask.shape) == 1 else row
        key, number = key_and_number(hits)
        return number if key is not None and key.kind == "group" and key.args == (*group.args[:2], row) else None

    def _counts(self, number: Expr, counts: Expr, keys: Value) -> bool:
        """True if ``counts`` is how many of the keys equal ``number``, summed over the axes that the keys had once.

        Keys below all numbers would stand in front of the first group.
        """
        slot = self.algebra.fresh((), keys.shape[0])
        key = self.element(keys, (slot,))
        if not never_negative(key):
            return False
        if key.kind == "nonzero" and key.args[2] is slot and self.counts_true(number, counts, *key.args[:2]):
            return True
        own, axes = keys_counted(self.algebra, number, counts) or (None, [])
        sizes = [var.args[1] for var in axes]
        return same_size(math.prod(sizes), keys.shape[0]) and self.element(keys, (self.algebra.position(sizes, axes),)) is own

    def key_in_run(self, read: Expr, row: Expr) -> Expr | None:
        """The number of the group of a row, of which ``read`` is what it has at its place in the order that made the groups."""
        run = self.run(row.args[0]) if row.kind == "nonzero" and row.args[0].op == "between" else None
        if run is None:
            return None
        order = read.args[0]
        if read.kind == "nonzero":
            return self.algebra.true_place(order, row)[0] if self.counts_true(run.var, run.counts, order, 0) else None
        return self.element(order.args[0], (read,)) if self._counts(run.var, run.counts, order.args[0]) else None

    def counts_true(self, number: Expr, counts: Expr, mask: Value, dim: int) -> bool:
        """True if ``counts`` is how many true elements of a mask have ``number`` as their index of one axis, of all of it."""
        return same_size(number.args[1], mask.shape[dim]) and counts is self.true_at(mask, dim, number)

    def true_at(self, mask: Value, dim: int, number: Expr) -> Expr:
        """How many true elements of a mask have ``number`` as their index of one axis."""
        sizes = [*mask.shape[:dim], *mask.shape[dim + 1 :]]
        return self._bind((number,), sizes, lambda at: self.element(mask, (*at[:dim], number, *at[dim:])), "r" * len(sizes))

    def learn_largest(self, numbers: Mapping[Size, Value]) -> None:
        """Tell the algebra which of the numbers that tensors hold are the largest of some counts.

            capacity = counts.max().item()      but not  counts[:-1].max().item(), counts.max().item() - 1
        """
        for size, held in numbers.items():
            e = self.element(held, ()) if not held.shape else None
            if e is not None and e.kind == "leaf" and e.args[0].op == "largest_of_all" and len(e.args[0].args[0].shape) == 1:
                (counts,) = e.args[0].args
                number = self.algebra.fresh((), counts.shape[0])
                self.algebra.largest[size] = e, number, self.element(counts, (number,))


@dataclass(frozen=True)
class Run:
    """The rows of group ``number``, where group ``var`` has as many as ``counts`` says."""

    var: Expr
    counts: Expr
    number: int


def rows_counted(algebra: Algebra, number: Expr, counts: Expr, num_rows: Size, num_groups: Size | None = None) -> bool:
    """True if ``counts`` of all numbers add up to at most ``num_rows``, of those below ``num_groups`` to as many, if given."""
    return (most := sum_of_counts(algebra, number, counts, num_groups)) is not None and same_size(most, num_rows)


def sum_of_counts(algebra: Algebra, number: Expr, counts: Expr, num_groups: Size | None = None) -> Size | None:
    """What ``counts`` of all numbers add up to at most, of those below ``num_groups`` exactly, if given; None if not known."""
    counted = keys_counted(algebra, number, counts)
    if counted is None:
        return None
    key, axes = counted
    if num_groups is not None:
        bound = algebra.extent(key)
        if not (isinstance(bound, int) and isinstance(num_groups, int) and bound <= num_groups):
            return None
    return math.prod(axis.args[1] for axis in axes)


def keys_counted(algebra: Algebra, number: Expr, counts: Expr) -> tuple[Expr, list[Expr]] | None:
    """The key of which ``counts`` says how often it is ``number``, for each token once, and its axes; None for anything else.

        sum_t sum_k [ids[t, k] = e]         ids[t, k], and t and k
    """
    axes: list[Expr] = []
    while counts.kind == "sum":
        axis, counts = algebra.open(counts)
        axes.append(axis)
    hits = [e for e in factors_of(counts) if e.kind == "eq"]
    keys = [side for hit in hits for side in hit.args if side is not number]
    if len(hits) != 1 or len(keys) != 1:
        return None
    exact = counts is hits[0]
    if axes and not exact:
        once = algebra.mul(hits[0], algebra.distinct(keys[0], axes[-1]))
        exact = counts is once and algebra.tells(keys, axes[-1])
    return (keys[0], axes) if exact else None


def written_out(algebra: Algebra, e: Expr) -> list[Expr]:
    """The terms of a sum: of running sums one by one, of sums over something term by term."""
    if e.kind == "add":
        return [term for inner in e.args for term in written_out(algebra, inner)]
    if e.kind == "linear" and e.args[0] == 0 and all(type(times) is int and times > 0 for times, _ in e.args[1]):
        return [term for times, inner in e.args[1] for term in written_out(algebra, inner) * times]
    if e.kind == "prefix" and e.args[2].kind == "const":
        var, body = algebra.open(e)
        return [algebra.substitute(body, {var: algebra.const(i)}) for i in range(e.args[2].args[0] + 1)]
    if e.kind == "sum":
        var, body = algebra.open(e)
        if isinstance(var.args[1], int) and keys_counted(algebra, var, body):  # counts[:e].sum()
            return [algebra.substitute(body, {var: algebra.const(i)}) for i in range(var.args[1])]
        return [algebra.sum(var, part) for part in written_out(algebra, body)]
    return [] if e is algebra.zero else [e]


def largest_of(algebra: Algebra, size: Size, parts: Sequence[Expr]) -> Expr | None:
    """The number that a size is, if it is the largest of counts, of which one counts ``parts`` and what is not below zero."""
    most, number, counts = algebra.largest.get(size, (None, algebra.zero, algebra.zero))
    numbers = [*parts[0].free, *map(algebra.const, range(number.args[1]) if number.kind == "var" else ())]
    counted = [written_out(algebra, algebra.substitute(counts, {number: n})) for n in numbers]
    wholes = [Counter((first, *parts[1:])) for first in (parts[0], _over_slots_first(algebra, parts[0]))]
    return most if any(whole <= Counter(own) and all(map(is_count, own)) for whole in wholes for own in counted) else None


def _over_slots_first(algebra: Algebra, count: Expr) -> Expr:
    """A count over two axes, summed in the other order."""
    outer, body = algebra.open(count) if count.kind == "sum" else (None, count)
    if outer is None or body.kind != "sum":
        return count
    inner, body = algebra.open(body)
    return algebra.sum(inner, algebra.sum(outer, body))
