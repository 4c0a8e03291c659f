"""What one element of a canonical value is: `Evaluator.element(value, indices)`.

Each value kind of `canonical` has one rule here. Gathers compose indices; scatters and boolean selections become sums
over what lands on an element, so that a sorted, a masked and a looped spelling of one layer give one expression.
Evaluation stops (a leaf) at operators without canonical form, and where `depth` says so.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import torch

from moeblaze_ops.lowering.evaluate.depth import MAX_PROJECTIONS, Depth, partial_sums
from moeblaze_ops.lowering.evaluate.groups import Run
from moeblaze_ops.lowering.evaluate.indexing import IndexingRules
from moeblaze_ops.lowering.evaluate.projections import is_mask, is_weight, letters_of_choices, moves_with_token
from moeblaze_ops.lowering.facts.zero_stops_gradient import chosen
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.graph.stored_numbers import stored_number
from moeblaze_ops.lowering.index_notation.expr import (
    DROPOUT,
    Expr,
    Indices,
    TooLarge,
    factors_of,
    is_hidden,
    key_and_number,
    linear_parts,
    split_number,
    subexpressions,
)
from moeblaze_ops.lowering.index_notation.indicators import LARGEST_EXACT, holds_count, is_count, is_indicator, most_counted
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.number_ranges import holds, is_whole, never_negative
from moeblaze_ops.lowering.index_notation.pointwise import apply_pointwise, threshold
from moeblaze_ops.lowering.index_notation.reshape_index import Groups, common_groups

_MAX_UNROLLED = 1024
_LANE = -50  # levels of slices under vmap go down from here, far from those of bound variables and of indices


class Unroll(Exception):
    """The element at a symbolic index has no closed form; its binder must take every index in turn."""

    def __init__(self, var: Expr):
        self.var = var


class Evaluator(IndexingRules):
    """Elements of the values of one graph; it does not look into those that are ``opaque``."""

    def __init__(self, opaque: frozenset[Value] = frozenset()) -> None:
        self._opaque = opaque
        self.algebra = Algebra(self._resolve_group)
        self._memo: dict[tuple[Value, Indices, int], Expr] = {}
        self._runs: dict[Value, Run | None] = {}
        self._numbers_true: dict[Value, set[Size]] = defaultdict(set)  # of a mask, that of its true elements, by any name
        self._rows_stored = {}
        self._first_of: dict[tuple[Run, tuple[Size, ...]], Value] = {}
        self._rules: dict[str, Callable[[Value, Indices, int], Expr]] = {
            name.removeprefix("_element_"): getattr(self, name) for name in dir(self) if name.startswith("_element_")
        }
        self._depth = Depth(self._rules)

    def element(self, value: Value, indices: Indices, depth: int = 0) -> Expr:
        """The element of ``value`` at ``indices``, inside ``depth`` projections."""
        assert len(indices) == len(value.shape), (value, indices)
        key = (value, indices, depth)
        found = self._memo.get(key)
        if found is None:
            for partial in partial_sums(value, lambda inner: (inner, indices, depth) in self._memo):
                self._memo[partial, indices, depth] = self._evaluate(partial, indices, depth)
            found = self._memo[key] = self._evaluate(value, indices, depth)
        return found

    def variables(self, value: Value) -> Indices:
        """Indices of any element of a value."""
        sizes = enumerate(value.shape)
        return tuple(self.algebra.var(axis, size, "r") if size != 1 else self.algebra.zero for axis, size in sizes)

    def of_token(self, value: Value) -> tuple[Indices, Expr]:
        """Indices of any token, and any feature, of a value ``[..., D]``."""
        *sizes, width = value.shape
        tokens = tuple(self.algebra.zero if n == 1 else self.algebra.var(i, n, "t") for i, n in enumerate(sizes))
        return tokens, self.algebra.var(len(sizes), width, "d")

    def try_element(self, value: Value, indices: Indices | None = None, depth: int = 0) -> Expr | None:
        """The element at ``indices``, or any; None where it is another formula for each number that an index may be."""
        try:
            return self.element(value, self.variables(value) if indices is None else indices, depth)
        except Unroll:
            return None

    def _evaluate(self, value: Value, indices: Indices, depth: int) -> Expr:
        rule = self._rules.get(value.op)
        if rule is None or value in self._opaque or self._depth.ends(value, depth):
            return self.algebra.leaf(value, indices)
        try:
            return rule(value, indices, depth)
        except TooLarge:
            return self.algebra.leaf(value, indices)

    def _sum(self, var: Expr, body: Callable[[Expr], Expr]) -> Expr:
        try:
            return self.algebra.sum(var, body(var))
        except Unroll as unroll:
            extent = var.args[1] if var.kind == "var" else None
            if unroll.var.kind == "div" and unroll.var.args[0] is var:  # over E C rows: over C rows, for each of E parts
                size = unroll.var.args[1]
                inner = self.algebra.var(var.args[0], size, "r")
                parts = [lambda i, n=n: body(self.algebra.linear(n * size, [(1, i)])) for n in range(extent // size)]
                return self.algebra.add(*(self._sum(inner, part) for part in parts))
            if unroll.var is not var or not isinstance(extent, int) or extent > _MAX_UNROLLED:
                raise
            return self.algebra.add(*(body(self.algebra.const(i)) for i in range(extent)))

    # Views.

    def _element_reshape(self, value: Value, indices: Indices, depth: int) -> Expr:
        (x,) = value.args
        for outer_axes, inner_axes in _groups(value.shape, x.shape):
            merged = (len(outer_axes), len(inner_axes)) != (1, 1)
            if merged and any(self.may_be_outside(indices[a], value.shape[a]) for a in outer_axes):
                return self.algebra.leaf(value, indices)
        return self.element(x, self.reshape_indices(value.shape, x.shape, indices), depth)

    def reshape_indices(self, outer: tuple[Size, ...], inner: tuple[Size, ...], indices: Indices) -> Indices:
        """Indices into ``inner`` of the row-major position that ``indices`` have in ``outer``."""
        if (only := next(filter(_is_only_feature, indices), None)) is not None:
            found = self.reshape_indices(outer, inner, tuple(self.algebra.zero if i is only else i for i in indices))
            return self.with_only_feature(inner, found, indices)
        result: list[Expr] = []
        for outer_axes, inner_axes in _groups(outer, inner):
            rest = self.algebra.position([outer[a] for a in outer_axes], [indices[a] for a in outer_axes])
            group: list[Expr] = []
            for i, a in enumerate(reversed(inner_axes)):
                last = i == len(inner_axes) - 1
                group.append(rest if last else self.algebra.mod(rest, inner[a]))
                rest = rest if last else self.algebra.div(rest, inner[a])
            result += reversed(group)
        return tuple(result)

    def with_only_feature(self, sizes: tuple[Size, ...], indices: Indices, given: Indices) -> Indices:
        """Indices with the only feature, if it is one of ``given``, at the last axis of one element, of which it is any index."""
        only = next(filter(_is_only_feature, given), None)
        ones = [a for a, (size, i) in enumerate(zip(sizes, indices, strict=True)) if size == 1 and i is self.algebra.zero]
        found = only is None or only in indices
        return indices if found else tuple(only if a in ones[-1:] else i for a, i in enumerate(indices))

    def _element_permute(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dims = value.args
        return self.element(x, tuple(indices[dims.index(dim)] for dim in range(len(dims))), depth)

    def _element_slice(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dim, start, step = value.args
        if self.may_be_outside(indices[dim], value.shape[dim]):
            return self.algebra.leaf(value, indices)
        if x.op == "true_first" and start == 0 and step == 1:
            return self.first_true(x, value.shape[0], indices[0])
        one_of_many = _is_only_feature(indices[dim]) and x.shape[dim] != 1
        index = self.algebra.linear(start, [] if one_of_many else [(step, indices[dim])])
        return self.element(x, (*indices[:dim], index, *indices[dim + 1 :]), depth)

    def may_be_outside(self, index: Expr, size: Size) -> bool:
        """True if an index is a number that data give, for which a subscript counts from the end or raises an error."""
        given = index.kind == "nonzero" or (index.kind == "leaf" and not index.args[0].is_permutation)
        return given and not self.algebra.fits(index, size)

    def _element_select(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dim, index = value.args
        return self.element(x, (*indices[:dim], self.algebra.const(index), *indices[dim:]), depth)

    def _element_expand(self, value: Value, indices: Indices, depth: int) -> Expr:
        return self._broadcast(value.args[0], value.shape, indices, depth)

    def _broadcast(self, x: Value, shape: tuple[Size, ...], indices: Indices, depth: int) -> Expr:
        ones = (self.algebra.zero,) * (len(x.shape) - len(indices))  # leading axes that a write by subscript may have
        tail = (*ones, *indices[max(0, len(indices) - len(x.shape)) :])
        read = (size != 1 or _is_only_feature(i) for size, i in zip(x.shape, tail, strict=True))
        own = tuple(i if is_read else self.algebra.zero for i, is_read in zip(tail, read, strict=True))
        return self.element(x, own, depth)

    def _element_stack(self, value: Value, indices: Indices, depth: int) -> Expr:
        xs, dim = value.args
        return self.one_of(value, indices, indices[dim], (*indices[:dim], *indices[dim + 1 :]), depth)

    def one_of(self, value: Value, indices: Indices, at: Expr, rest: Indices, depth: int) -> Expr:
        """The element of ``value`` at ``indices``: that of its part ``at`` at ``rest``."""
        xs = value.args[0]
        if at.kind == "const" and self.algebra.fits(at, len(xs)):
            return self.element(xs[at.args[0]], rest, depth)
        if at.kind == "var" and at.args[2] == "r":  # of a sum, and not any token
            raise Unroll(at)
        if at.kind == "div" and at.args[0].kind == "var" and at.args[0].args[1:] == (len(xs) * at.args[1], "r"):
            raise Unroll(at)
        extent = self.algebra.extent(at)
        digits = [atom for _, atom in at.args[1]] if at.kind == "linear" else [at]
        known = isinstance(extent, int) and extent <= min(len(xs), _MAX_UNROLLED)
        if not known or any(digit.kind != "leaf" for digit in digits) or depth or all(is_weight(x, gathered=False) for x in xs):
            return self.algebra.leaf(value, indices)
        parts = ((self.algebra.const(i), self.element(x, rest, depth)) for i, x in enumerate(xs[:extent]))
        return self.algebra.add(*(self.algebra.mul(self.algebra.eq(at, n), self.algebra.counted(e, at, n)) for n, e in parts))

    # Slices under `torch.vmap`.

    def _element_lane(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dim, level = value.args
        return self.element(x, (*indices[:dim], self.algebra.var(_LANE - level, x.shape[dim], "r"), *indices[dim:]), depth)

    def _element_lanes(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, level, dim = value.args
        if indices[dim].height or self.may_be_outside(indices[dim], value.shape[dim]):
            return self.algebra.leaf(value, indices)
        inner = self.element(x, (*indices[:dim], *indices[dim + 1 :]), depth)
        return self.algebra.substitute(inner, {self.algebra.var(_LANE - level, value.shape[dim], "r"): indices[dim]})

    # Numbers.

    def _element_full(self, value: Value, indices: Indices, depth: int) -> Expr:
        return self.algebra.const(value.args[0])

    def _element_arange(self, value: Value, indices: Indices, depth: int) -> Expr:
        start, step = value.args
        e = self.algebra.linear(start, [(step, indices[0])])
        outside = self.may_be_outside(indices[0], value.shape[0]) or not holds(value.dtype, e)
        return self.algebra.leaf(value, indices) if outside else e

    def _element_cast(self, value: Value, indices: Indices, depth: int) -> Expr:
        (x,) = value.args
        e = self.element(x, indices, depth)
        if e.kind == "const":
            stored = stored_number(e.args[0], value.dtype)
            return self.algebra.leaf(value, indices) if stored is None else self.algebra.const(stored)
        if not x.dtype.is_floating_point or not value.dtype.is_floating_point:
            if value.dtype == torch.bool:
                return self._not_zero(e) or self.algebra.cast(value.dtype, e)
            whole = (not x.dtype.is_floating_point or is_whole(e)) and value.dtype in _EXACT_INTEGERS
            counted = is_count(e) and holds_count(value.dtype, e)
            if whole and not holds(value.dtype, e):
                return self.algebra.leaf(value, indices)
            return e if whole or x.dtype == torch.bool or counted else self.algebra.cast(value.dtype, e)
        # Along the experts' path the fused kernels keep at least this precision; the matcher checks the dtypes.
        if depth < MAX_PROJECTIONS and is_hidden(e):
            return e
        if depth == MAX_PROJECTIONS and e.kind == "mul":
            vector = [f for f in e.args if any(v.args[2] == "d" for v in f.free)]
            scale = [f for f in e.args if f not in vector]
            if any(f.kind != "const" for f in scale):  # a routing weight, by which the kernels multiply behind the projection
                return self.algebra.mul(self.algebra.cast(value.dtype, self.algebra.mul(*vector)), *scale)
        return self.algebra.cast(value.dtype, e)

    def _above_zero(self, e: Expr) -> Expr | None:
        """1 where ``e`` is not zero, if it is known not to be negative."""
        return threshold(self.algebra, "ne", [e, self.algebra.zero]) or chosen(self.algebra, e)

    def _not_zero(self, e: Expr) -> Expr | None:
        """1 where ``e`` is not zero, as far as counts tell; a factor that is none may be any number."""
        if (mask := self._above_zero(e)) is not None or e.kind != "mul":
            return mask
        counts = [self._above_zero(f) for f in e.args if is_count(f)]
        rest = self.algebra.mul(*(f for f in e.args if not is_count(f)))
        if not counts or None in counts or (rest.kind == "const" and rest is not self.algebra.one):
            return None
        return self.algebra.mul(*counts, self._not_zero(rest) or self.algebra.cast(torch.bool, rest))

    def _element_pointwise(self, value: Value, indices: Indices, depth: int) -> Expr:
        name, xs, params = value.args
        if value.dtype in LARGEST_EXACT and not value.dtype.is_floating_point:
            return self.algebra.leaf(value, indices)  # it may wrap around
        args = [self._broadcast(x, value.shape, indices, depth) for x in xs]
        mask = threshold(self.algebra, name, args)
        if mask is None and name in ("gt", "ne") and args[1] is self.algebra.zero:
            mask = chosen(self.algebra, args[0]) if name == "gt" else self._not_zero(args[0])
        if mask is not None:
            return mask
        e = apply_pointwise(self.algebra, name, args, params, integers=not value.dtype.is_floating_point)
        e = self._in_dtype(value.dtype, e) if value.dtype.is_floating_point else e
        return e if holds(value.dtype, e) else self.algebra.leaf(value, indices)

    def _in_dtype(self, dtype: torch.dtype, e: Expr) -> Expr:
        """``e``; if it is a number beside marks, that number as a dtype holds it: a third of bf16 is 0.333984375 in fp32, too."""
        number, marks = split_number(e)
        held = stored_number(number, dtype) if isinstance(number, int | float) and all(map(is_indicator, marks)) else None
        return e if held is None else self.algebra.mul(self.algebra.const(held), *marks)

    def _element_dropout(self, value: Value, indices: Indices, depth: int) -> Expr:
        """An element of an expert, if no other element of ``value`` is the same one and has another number drawn."""
        x, *drawn = value.args
        e = self.element(x, indices, depth)
        outside = [f for f in factors_of(e) if f.free.isdisjoint(indices[-1].free)]
        inside = self.algebra.mul(*(f for f in factors_of(e) if f not in outside))
        if not inside.has_dot or any(True for _ in subexpressions(inside, lambda s: s.kind in ("eq", "any"))):
            return self.algebra.leaf(value, indices)
        told = [i for leaf in subexpressions(e, lambda s: s.kind == "leaf") for i in leaf.args[1]] + [*self._of_true_elements(e)]
        if not all(self.algebra.tells(told, var) for index in indices for var in index.free):
            return self.algebra.leaf(value, indices)
        places = tuple(index.args[0] for index in indices if index.kind == "const")  # of one expression two have two draws
        return self.algebra.mul(*outside, self.algebra.call(DROPOUT, (inside,), *drawn, places))

    def _of_true_elements(self, e: Expr) -> Iterator[Expr]:
        """What is one number for all true elements of a mask, such as the ids of the rows of one expert; of masks in ``e``."""
        for read in subexpressions(e, lambda s: s.kind == "nonzero" or (s.kind == "leaf" and s.args[0].op == "argsort")):
            row = read.args[2] if read.kind == "nonzero" else read.args[1][0]
            if (key := self.key_in_run(read, row)) is not None:
                yield key
            elif read.kind == "nonzero":
                hits = factors_of(self.element(read.args[0], tuple(self.algebra.true_place(read.args[0], row))))
                yield from (key for key, _ in map(key_and_number, hits) if key is not None)
            yield from self._of_true_elements(row)

    # Reductions.

    def _bind(self, used: Indices, sizes: list[Size], body: Callable[[Indices], Expr], tags: Sequence[str]) -> Expr:
        if not sizes:
            return body(())
        var = self.algebra.fresh(used, sizes[0], tags[0])
        return self._sum(var, lambda i: self._bind((*used, var), sizes[1:], lambda rest: body((i, *rest)), tags[1:]))

    def _reduced_indices(self, value: Value, indices: Indices, bound: Indices) -> Indices:
        x, dims, keepdim = value.args
        own, kept = iter(bound), (i for a, i in enumerate(indices) if not (keepdim and a in dims))
        return tuple(next(own if a in dims else kept) for a in range(len(x.shape)))

    def _element_sum(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dims, _ = value.args
        if x.op == "between" and (selected := self.selected(x)) is not None:
            return selected

        def body(bound: Indices) -> Expr:
            return self.element(x, self._reduced_indices(value, indices, bound), depth)

        return self._counted(value, indices, self._bind(indices, [x.shape[d] for d in dims], body, "r" * len(dims)))

    def _counted(self, value: Value, indices: Indices, e: Expr) -> Expr:
        """``e``, a sum, unless it may be too large for the dtype of ``value``, of which it is an element.

            (ids == e).sum(-1, dtype=torch.int64)       but not  (ids == e).sum(-1, dtype=torch.bool), which is 1 for 2 as well
        """
        narrow = value.dtype == torch.bool or (value.dtype in LARGEST_EXACT and not value.dtype.is_floating_point)
        held = holds_count(value.dtype, e) if is_count(e) else (not narrow and holds(value.dtype, e)) or e.kind == "const"
        return self._in_dtype(value.dtype, e) if held else self.algebra.leaf(value, indices)

    def _element_any(self, value: Value, indices: Indices, depth: int) -> Expr:
        x, dims, _ = value.args
        bound: list[Expr] = []
        for dim in dims:
            bound.append(self.algebra.fresh((*indices, *bound), x.shape[dim]))
        body = self.element(x, self._reduced_indices(value, indices, tuple(bound)), depth)
        if not is_indicator(body):
            return self.algebra.leaf(value, indices)
        for var in reversed([var for var in bound if var.kind == "var"]):
            body = self.algebra.any(var, body)
        return body

    def _element_largest_of_all(self, value: Value, indices: Indices, depth: int) -> Expr:
        (x,) = value.args
        if is_count(count := self.element(x, self.variables(x))):
            value.bound = most_counted(count) + 1
        return self.algebra.leaf(value, indices)

    def _element_largest(self, value: Value, indices: Indices, depth: int) -> Expr:
        """A number and the sum of what comparisons bracket, of which one holds at most, if that is not negative.

            max over k of [ids[t, k] = e] * count[t, k] - 1         of ids that differ
        """
        x, (dim,), _ = value.args
        var = self.algebra.fresh(indices, x.shape[dim])
        body = self.element(x, self._reduced_indices(value, indices, (var,)), depth)
        if var not in body.free:
            return body
        constant, terms = linear_parts(body)
        factors = factors_of(terms[0][1])
        ids = [side for f in factors if f.kind == "eq" for side, other in (f.args, f.args[::-1]) if var not in other.free]
        once = next((side for side in ids if side is var or self.algebra.tells([side], var)), None)
        if len(terms) > 1 or terms[0][0] != 1 or once is None or not all(map(never_negative, factors)):
            return self.algebra.leaf(value, indices)
        mark = self.algebra.one if once is var else self.algebra.distinct(once, var)
        return self.algebra.linear(constant, [(1, self.algebra.sum(var, self.algebra.mul(mark, *factors)))])

    def _element_prefix(self, value: Value, indices: Indices, depth: int) -> Expr:
        """The running sum; of what stands behind zeros it is that up to a place before: ``F.pad(mask, (1, 0)).cumsum(0)``."""
        x, dim = value.args
        at = indices[dim]
        if x.op == "cat" and x.args[1] == dim and len(x.args[0]) == 2 and x.args[0][0].op == "full" and x.args[0][0].args == (0,):
            zeros, x = x.args[0]
            at = self.algebra.linear(-zeros.shape[dim], [(1, at)])
        var = self.algebra.fresh(indices, x.shape[dim])
        body = self.element(x, (*indices[:dim], var, *indices[dim + 1 :]), depth)
        if var.kind == "const":
            return body if self.algebra.fits(at, 1) else self.algebra.leaf(value, indices)
        return self._counted(value, indices, self.algebra.prefix(var, body, at))

    def _element_contract(self, value: Value, indices: Indices, depth: int) -> Expr:
        xs, labels, out = value.args
        of = dict(zip(out, indices, strict=True))
        pairs = [pair for x, label in zip(xs, labels, strict=True) for pair in zip(label, x.shape, strict=True)]
        sizes = {letter: size for letter, size in pairs if same_size(size, 1)}
        sizes |= {letter: size for letter, size in pairs if not same_size(size, 1)}  # axes of size 1 are broadcast
        per_token = [any(moves_with_token(of[letter]) for letter in label if letter in of) for label in labels]
        weights = [is_weight(x, gathered=gathered) for x, gathered in zip(xs, per_token, strict=True)]
        projects = any(weights)
        inner = depth + projects

        def factors(index: dict[str, Expr]) -> list[Expr]:
            found = []
            for x, label in zip(xs, labels, strict=True):
                spread = (same_size(n, 1) and not _is_only_feature(index[c]) for c, n in zip(label, x.shape, strict=True))
                at = (self.algebra.zero if is_spread else index[c] for c, is_spread in zip(label, spread, strict=True))
                # What tells tokens apart is looked into however deep it stands.
                found.append(self.element(x, tuple(at), 0 if depth >= MAX_PROJECTIONS and is_mask(x) else inner))
            return found

        def rolled_up(index: dict[str, Expr]) -> list[Expr]:
            try:
                return factors({**of, **index})
            except Unroll:
                return []

        def body(vars: Indices) -> Expr:
            found = factors({**of, **dict(zip(bound, vars, strict=True))})
            if projects:
                features = tuple(var for var, c in zip(vars, bound, strict=True) if c not in chosen)
                found = [f if weight else self._with_number(f, features) for f, weight in zip(found, weights, strict=True)]
            return self.algebra.mul(*found)

        # Outermost are experts and slots, of these first the letters that the output of an expert has.
        bound = sorted((c for c in sizes if c not in of), key=lambda c: all({c, out[-1:]} - set(label) for label in labels))
        chosen = letters_of_choices(self.algebra, bound, sizes, indices, rolled_up) if projects else set(bound)
        bound.sort(key=lambda c: c not in chosen)
        e = self._bind(indices, [sizes[c] for c in bound], body, ["r" if c in chosen else "d" for c in bound])
        return self._counted(value, indices, e)


@lru_cache(maxsize=1 << 12)
def _groups(outer: tuple[Size, ...], inner: tuple[Size, ...]) -> Groups:
    """Groups of axes of one size each, of two shapes of one size."""
    groups, whole = common_groups(outer, inner), (range(len(outer)), range(len(inner)))
    covered = [list(chain(*axes)) for axes in zip(*groups, strict=True)] == [*map(list, whole)]
    alike = (same_size(math.prod(outer[a] for a in own), math.prod(inner[a] for a in others)) for own, others in groups)
    return groups if covered and all(alike) else (whole,)


def _is_only_feature(index: Expr) -> bool:
    """True if an index is the feature of an output that has one."""
    return index.kind == "var" and index.args[1:] == (1, "d")


_EXACT_INTEGERS = (torch.int32, torch.int64, torch.float32, torch.float64)
