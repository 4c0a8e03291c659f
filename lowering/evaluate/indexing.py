"""Elements of gathers, scatters, boolean selections and sorts.

What is scattered by rows ``u`` with keys ``key(u)`` reads, at index ``i``, the sum over all u with key(u) = i. Where
the rows come from a sort or from a boolean mask that sum is turned around into one over the slots of token i.
"""

import math
from collections.abc import Callable, Iterator

from moeblaze_ops.lowering.evaluate.groups import rows_counted
from moeblaze_ops.lowering.evaluate.runs import RunRules, Runs
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.selected_rows import before_rows
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.index_notation.expr import STORED, Expr, Indices, factors_of, is_hidden, key_and_number, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_choice, is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.number_ranges import is_whole, never_negative
from moeblaze_ops.lowering.index_notation.pointwise import added_to, apply_pointwise, elsewhere


class IndexingRules(RunRules):
    """Rules of the value kinds of `forms.indexing`."""

    _broadcast: Callable[..., Expr]
    reshape_indices: Callable[..., Indices]
    _numbers_true: dict[Value, set[Size]]
    _rows_stored: "dict[Expr, tuple[Expr, list[_Landed]]]"
    _counted: Callable[..., Expr]

    def _element_index(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, tensors, first = value.args
        rank = max(len(t.shape) for t in tensors if t is not None)
        gathered, shape = indices[first : first + rank], value.shape[first : first + rank]
        rest = iter((*indices[:first], *indices[first + rank :]))
        own = tuple(next(rest) if t is None else self._broadcast(t, shape, gathered, depth) for t in tensors)
        return self._read(value, indices, own, depth)

    def _read(self, value: Value, indices: Indices, own: Indices, depth: int) -> Expr:
        """The element of what a subscript reads at ``own``; at an index that is one of two, one of two elements.

            torch.cat([y, zeros])[torch.where(kept, slot, E * C)]           [kept] y[slot]
            torch.cat([x, zeros])[torch.full((E * C,), T).scatter(0, slots, tokens)[slot]]
        """
        x, tensors, _ = value.args

        def read(n: int, index: Expr) -> Expr:
            return self._read(value, indices, (*own[:n], index, *own[n + 1 :]), depth)

        for n, i in enumerate(own):
            base, rows = (i.args[1][2], [_Landed([], *i.args[1][:2])]) if is_choice(i) else self._rows_stored.get(i, (i, []))
            taken = any(not index.free.isdisjoint(landed.free) for landed in rows for index in own)
            if tensors[n] is not None and rows and not taken and read(n, base) is self.algebra.zero:
                there = ((r, self.algebra.beside(read(n, r.body), factors_of(r.hits))) for r in rows)
                return self.algebra.add(*(r.total(self.algebra, e) for r, e in there))
        # From its end a tensor is read by w[2:][ids - 2] and rows[T:][token - T], not by w[2:][ids + 1] and w[E - 1 - ids].
        if not all(t is None or never_negative(i) for t, i in zip(tensors, own, strict=False)):
            return self.algebra.leaf(value, indices)
        e = self.reordered(x, own, depth) or self.element(x, own, depth)
        nonzeros = [i for i in own if i.kind == "nonzero"]
        given = {e for index in indices if nonzeros for e in subexpressions(index, lambda e: e.kind == "nonzero")}
        for mask, row in dict.fromkeys((i.args[0], i.args[2]) for i in nonzeros if i not in given):
            at = {i.args[1]: i for i in nonzeros if i.args[0] is mask and i.args[2] is row}
            if len(at) == len(mask.shape) and is_indicator(hit := self.element(mask, tuple(at[dim] for dim in sorted(at)))):
                e = self.algebra.substitute(e, {hit: self.algebra.one})  # a mask is 1 at each of its own true elements
        return e

    def _element_take(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dim, index = value.args
        return self.element(x, (*indices[:dim], self.element(index, indices, depth), *indices[dim + 1 :]), depth)

    def _element_nonzero(self, value: Value, indices: Indices, depth: int) -> Expr:
        mask, dim = value.args
        (row,) = indices
        self._numbers_true[mask].add(value.shape[0])
        if (before := before_rows(mask)) is not None and self._is_any(row, mask.shape[0]):
            return self._true_element(before[0], dim, row) if dim else row  # as many as there are rows: one of each
        if self._is_any(row, value.shape[0]):
            return self._true_element(mask, dim, row)
        return self.algebra.leaf(value, indices)

    def _is_any(self, row: Expr, rows: Size) -> bool:
        """True if an index may be any of so many, as far as it says which ones it may be; the only one of one is 0."""
        if _is_permuted(row) or row.kind == "var":
            return same_size(self.algebra.extent(row), rows)
        return row.kind != "const" or same_size(rows, 1)

    def _true_element(self, mask: Value, dim: int, row: Expr) -> Expr:
        if mask.op != "reshape" or len(mask.shape) != 1:
            return self.algebra.nonzero(self.same_rows(mask), dim, row, mask.shape[dim])
        (whole,) = mask.args
        return self.algebra.position(whole.shape, self.algebra.true_place(whole, row))

    def first_true(self, order: Value, rows: Size, row: Expr) -> Expr:
        """Any of the first ``rows`` places in an order in which true elements come first: of them, where they are as many.

            chosen_ET.reshape(-1).argsort(descending=True, stable=True)[: T * K]        but not  [: T * K - 1]
        """
        (mask,) = order.args
        whole = mask.args[0] if mask.op == "reshape" else mask
        for dim, groups in enumerate(whole.shape if self._is_any(row, rows) else ()):
            number = self.algebra.fresh((), groups)
            if number.kind == "var" and rows_counted(self.algebra, number, self.true_at(whole, dim, number), rows, groups):
                return self._true_element(mask, 0, row)
        return self.algebra.leaf(order, (row,))

    def _element_inverse(self, value: Value, indices: Indices, depth: int) -> Expr:
        return self.algebra.inverse(value.args[0], indices[0])

    def _element_put(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, tensors, values, accumulate = value.args
        keyed = [i for i, t in enumerate(tensors) if t is not None]
        if any(len(tensors[i].shape) != 1 for i in keyed) or keyed != list(range(len(keyed))):
            return self.algebra.leaf(value, indices)
        if self._inverts(value, tensors[0], values):
            return self.algebra.inverse(tensors[0], indices[0])
        rows, rest = tensors[0].shape[0], indices[len(keyed) :]
        joined, part = (None, values) if accumulate else _joined_to_rows(x, tensors, values)

        def row_at(index: Expr) -> tuple[list[Expr], Expr]:
            body = self._broadcast(part, (rows, *value.shape[len(keyed) :]), (index, *rest), depth)
            return [self.element(tensors[i], (index,), depth) for i in keyed], body

        runs = [(0, rows)] if joined else self.runs(tensors[0], part)
        return self._stored(value, indices, slice(0, len(keyed)), runs, row_at, depth, joined)

    def _inverts(self, value: Value, index: Value, stored: Value) -> bool:
        """True if ``value`` is a vector in which rows 0, 1, ... are stored at the places of a permutation of all its rows."""
        counts_up = len(value.shape) == 1 and not value.args[-1] and stored.op == "arange" and stored.args == (0, 1)
        if not counts_up or not same_size(stored.shape[0], value.shape[0]):
            return False
        return same_size(index.shape[0], value.shape[0]) if index.is_permutation else self.partitioned(index) is not None

    def _element_scatter(self, value: Value, indices: Indices, depth: int) -> Expr:
        _, dim, index, source, _ = value.args
        if self._inverts(value, index, source):
            return self.algebra.inverse(index, indices[0])

        def row_at(row: Expr) -> tuple[list[Expr], Expr]:
            at = (*indices[:dim], row, *indices[dim + 1 :])
            return [self.element(index, at, depth)], self.element(source, at, depth)

        runs = [(0, index.shape[dim])] if dim else self.runs(index, source)
        return self._stored(value, indices, slice(dim, dim + 1), runs, row_at, depth)

    def _stored(
        self, value: Value, indices: Indices, axes: slice, runs: Runs, row_at: Callable, depth: int, joined: str | None = None
    ) -> Expr:
        """The element of a put or a scatter, after one run of rows after another was added or stored.

        ``row_at`` gives a row's keys, into ``axes``, and what it has; ``joined`` is a function of what was there and of that.
        """
        x, accumulate, at, sizes = value.args[0], value.args[-1], indices[axes], value.shape[axes.start :]
        element = self.element(x, indices, depth)
        for start, size in runs:
            row = self.algebra.fresh(indices, size)
            keys, body = row_at(self.algebra.linear(start, [(1, row)]))
            given = any(self.algebra.extent(key) is None for key in keys if key.kind == "leaf" and len(keys) > 1)
            from_end = value.op == "put" and not all(map(never_negative, keys))  # a scatter at -1 raises an error
            if given or from_end:
                return self.algebra.leaf(value, indices)
            landed = self._land(row, keys, at, sizes, body, depth)
            if accumulate:
                element = self.algebra.add(element, landed.total(self.algebra))
            elif joined is None:
                element = landed.replaces(self.algebra, element) or self._index_over(landed, element)
            else:
                added = landed.once(self.algebra)
                element = added and apply_pointwise(self.algebra, joined, [element, added], (), integers=False)
            if element is None:
                return self.algebra.leaf(value, indices)
        return self._counted(value, indices, element) if accumulate else element

    def _index_over(self, landed: "_Landed", base: Expr) -> Expr | None:
        """An index where at most one row is stored over a number, or over that and rows that are stored elsewhere."""
        number, before = self._rows_stored.get(base, (base, []))
        hits, zero = factors_of(landed.hits), self.algebra.zero
        apart = landed.apart and all(self.algebra.met(r.free[0], factors_of(r.hits), hits) is zero for r in before)
        if not apart or number.kind != "const" or not is_whole(number) or not is_whole(landed.body):
            return None
        stored = landed.total(self.algebra, self.algebra.linear(0, [(1, landed.body), (-1, number)]))
        e = self.algebra.linear(0, [(1, base), (1, stored)])
        self._rows_stored[e] = number, [*before, landed]
        return e

    def _land(self, row: Expr, keys: list[Expr], at: Indices, sizes: tuple[Size, ...], body: Expr, depth: int) -> "_Landed":
        """The rows u with ``keys(u) == at``, an index into axes of these sizes."""
        coordinates = self.coordinates(keys[0]) if len(keys) == 1 else None
        if coordinates is not None and same_size(math.prod(shape := coordinates[0].args[0].shape), sizes[0]):
            keys, at, sizes = coordinates, self.reshape_indices(sizes[:1], shape, at), (*shape, *sizes[1:])
        if (landed := self._land_slots(row, keys, at, sizes, body, depth)) is not None:
            return landed
        rows, keys, body, kept = self._of_all_elements(row, keys, at, sizes, body, depth)
        hits = self.algebra.mul(kept, *(self.algebra.eq(key, i) for key, i in zip(keys, at, strict=True) if key is not i))
        # Where a row lands on a token, what is read at its key is read at the token: [key = t] x[key] = [key = t] x[t].
        known = {key: i for key, i in zip(keys, at, strict=True) if key.kind == "leaf" and _is_token(i)}
        stored = self.algebra.call(STORED, (self.algebra.substitute(body, known),))
        product, free = self.algebra.mul(hits, stored), list[Expr]()
        for own in rows:
            other, product = self.algebra.only_terms(own, product) or (own, product)
            free += [other] if other.kind == "var" else []
        stored = next((f for f in factors_of(product) if f.kind == "call" and f.args[0] == STORED), stored)
        hits = self.algebra.mul(*(f for f in factors_of(product) if f is not stored))
        counts = any(True for _ in subexpressions(hits, lambda e: e.kind == "prefix"))
        # buffer[ids, one_hot(ids, E).cumsum(0)[rows, ids] - 1] = x       but not  buffer[ids, rows % capacity] = x
        apart = counts and free == rows and len(rows) == 1 and self.algebra.tells((), rows[0], factors_of(hits))
        apart = apart and all(self.algebra.fits(key, n, factors_of(kept)) for key, n in zip(keys, sizes, strict=False))
        return _Landed(free, hits, *stored.args[1], apart=apart)

    def _of_all_elements(
        self, row: Expr, keys: list[Expr], at: Indices, sizes: tuple[Size, ...], body: Expr, depth: int, kept: Expr | None = None
    ) -> tuple[list[Expr], list[Expr], Expr, Expr]:
        """The true elements of a mask, in whatever order, as all its elements, those at ``at`` where that is their coordinates.

            order[kept][torch.where(ids[order][kept] == e)]         of rows that are ``kept`` those that another mask selects

        What these are numbered by, their keys, their body, and 1 where one is true.
        """
        same = [row] if row.kind == "var" else [], keys, body, self.algebra.one if kept is None else kept
        true = (e for key in keys for e in subexpressions(key, lambda e: e.kind == "nonzero" and _is_row(e.args[2], row)))
        if (selected := next(true, None)) is None:
            return same
        mask, _, order, _ = selected.args
        if order is not row and (row.kind != "var" or not self._is_any(order, row.args[1])):
            return same
        if kept is not None and row.args[1] not in self._numbers_true[mask]:
            return same
        unordered = {} if order is row else {row: self.algebra.inverse(order.args[0], row)}
        *keys, body, marks = (self.algebra.substitute(e, unordered) for e in (*keys, body, same[-1]))
        places: dict[Expr, Expr] = {}
        free: list[Expr] = []
        for place in self.algebra.true_place(mask, row):
            landed = (i for key, i, size in zip(keys, at, sizes, strict=False) if key is place and same_size(size, place.args[3]))
            if (index := next(landed, None)) is None:
                index = self.algebra.fresh((row, *at, *free), place.args[3])
                free += [index] if index.kind == "var" else []
            places[place] = index
        first = next(iter(places.values()))
        replace = places | dict.fromkeys(self._groups_of_true_elements(row, mask, body), first)
        *keys, body, marks = (self.algebra.substitute(e, replace) for e in (*keys, body, marks))
        if any(row in e.free for e in (*keys, body, marks)):
            return same
        marks = self.algebra.mul(marks, self.element(mask, tuple(places.values()), depth))
        if len(free) != 1:
            return free, keys, body, marks
        return self._of_all_elements(free[0], keys, at, sizes, body, depth, marks)

    def _groups_of_true_elements(self, row: Expr, mask: Value, body: Expr) -> Iterator[Expr]:
        """Groups of rows in ``body`` that are as large as the rows of a mask have true elements: they are these rows.

            _, token = chosen_TE.T.nonzero(as_tuple=True)
            grouped_mm(x[token], weights, offs=chosen_TE.sum(0).cumsum(0))      but not  chosen_TE.sum(1).cumsum(0)
        """
        for group in subexpressions(body, lambda e: e.kind == "group" and e.args[2] is row):
            number, counts = self.algebra.open(group)
            if self.counts_true(number, counts, mask, 0):
                yield group

    def _land_slots(
        self, row: Expr, keys: list[Expr], at: Indices, sizes: tuple[Size, ...], body: Expr, depth: int
    ) -> "_Landed | None":
        """Keys are tokens with any true slot, and ``body`` goes through the slots: the same rows if a token has one of them."""
        mask = keys[0].args[0] if keys[0].kind == "nonzero" else None
        if mask is None or mask.op != "any" or keys != self.algebra.true_place(mask, row):
            return None
        slots, dims, keepdim = mask.args
        dim = len(slots.shape) - 1
        if dims != (dim,) or keepdim or not all(map(same_size, mask.shape, sizes)):
            return None  # their true elements are not in the order of tokens, or none of all that is stored to
        slot = self.algebra.fresh((row, *at), slots.shape[dim])
        coordinates = (*at[:dim], slot, *at[dim:])
        hits = self.element(slots, coordinates, depth)
        ids, _ = key_and_number(hits)
        if ids is None or not slot.free <= ids.free:
            return None
        of_row = dict(zip(self.algebra.true_place(mask, row), at, strict=True))
        of_slot = dict(zip(self.algebra.true_place(slots, row), coordinates, strict=True))
        of_slot |= {e: slot for e, true in self._first_true(body, slot, depth) if self.algebra.substitute(true, of_row) is hits}
        if not any(True for _ in subexpressions(body, of_slot.__contains__)):
            return None
        replace = {**of_row, **of_slot}
        free = [slot] if slot.kind == "var" else []
        once = self.algebra.mul(*(self.algebra.distinct(ids, var) for var in free))
        return _Landed(free, self.algebra.mul(hits, once), self.algebra.substitute(body, replace))

    def _first_true(self, body: Expr, slot: Expr, depth: int) -> Iterator[tuple[Expr, Expr]]:
        """Places of the largest of an axis in ``body``, and what is at ``slot`` of that axis: of a mask, its true element."""
        for first in subexpressions(body, lambda e: e.kind == "leaf" and e.args[0].op == "argmax"):
            x, dim, keepdim = first.args[0].args
            if dim is not None:
                at, dim = list(first.args[1]), dim % len(x.shape)
                at[dim : dim + keepdim] = [slot]
                yield first, self.element(x, tuple(at), depth)


class _Landed:
    """Rows that land on one index: ``sum over free of hits * body``. No two of them do where they are ``apart``."""

    def __init__(self, free: list[Expr], hits: Expr, body: Expr, *, apart: bool = False):
        self.free, self.hits, self.body, self.apart = free, hits, body, apart

    def total(self, algebra: Algebra, body: Expr | None = None) -> Expr:
        e = algebra.mul(self.hits, body or self.body)
        for var in reversed(self.free):
            e = algebra.sum(var, e)
        return e

    def replaces(self, algebra: Algebra, base: Expr) -> Expr | None:
        """The element after rows were stored over ``base``, when at most one row lands; None if it has no sum form."""
        if self.hits is algebra.zero:
            return base
        if not self.free and self.hits is algebra.one:
            return self.body
        if not self.free and all(self.hits in factors_of(term) for term in (base.args if base.kind == "add" else (base,))):
            return algebra.mul(self.hits, self.body)  # nothing of the base is elsewhere
        added = added_to(algebra, base, self.body, () if self.free else factors_of(self.hits))
        if added is None and not self.free and is_hidden(self.body):
            return algebra.add(elsewhere(algebra, base, self.hits), algebra.mul(self.hits, self.body))
        once = added and _Landed(self.free, self.hits, added, apart=self.apart).once(algebra)
        return once and algebra.add(base, once)

    def once(self, algebra: Algebra) -> Expr | None:
        """The row that lands, zero if none does, when at most one does; None if that has no sum form."""
        if self.hits is algebra.zero:
            return algebra.zero
        if not self.free or self.apart:
            return self.total(algebra)
        (row, *others), hits = self.free, [f for f in factors_of(self.hits) if f.kind == "eq"]
        keys = [key for hit in hits for key in hit.args if row in key.free] or hits[:1]  # the last one is no proof for any row
        once = None if others or len(keys) != 1 else algebra.distinct(keys[0], row)
        return once and self.total(algebra, algebra.mul(once, self.body))


def _is_permuted(index: Expr) -> bool:
    return index.kind == "leaf" and index.args[0].is_permutation


def _is_row(index: Expr, row: Expr) -> bool:
    """True if an index is a row, or the place of one in an order of all rows."""
    return index is row or (_is_permuted(index) and index.args[1] == (row,))


def _is_token(index: Expr) -> bool:
    return index.height == 0 and bool(index.free) and all(var.args[2] == "t" for var in index.free)


def _joined_to_rows(x: Value, tensors: tuple[Value | None, ...], values: Value) -> tuple[str | None, Value]:
    """The function by which values are joined to rows of ``x`` where these were read, and the values; else what is stored.

        x[rows] += values, mask[rows] |= values         but not  x[rows] = x[others] + values
    """
    name, xs, params = values.args if values.op == "pointwise" else ("", (), ())
    others = [v for v in xs if v.op != "index" or v.args != (x, tensors, 0)]
    joins = name == "or" or (name == "add" and not params and values.dtype.is_floating_point)
    alone = joins and len(others) == 1 < len(xs) and others[0].dtype == values.dtype
    return (name, others[0]) if alone else (None, values)
