"""Canonical forms of rows between bounds that only the data tell: slices, splits, and what is concatenated of them.

    number = counts[e].item()                   a symbol wherever it is a bound or a size; `GraphView.numbers` has its value
    part = rows[start:end]                      rows[where(start <= row < end)]
    parts = rows.split(sizes)                   parts[i] is rows[where(sum(sizes[:i]) <= row < sum(sizes[: i + 1]))]
    y = torch.cat([f(p) for p in parts])        y[where(the same)] = f(parts[i])

A ``between`` value (lower, upper) is the mask of the rows that a slice with these bounds takes of an axis of its length.
Each bound is a sum of numbers: one that does not depend on data, and a set of pairs of a value and how often it is added.
Which expert has these rows is for `evaluate.groups` to say.
"""

import math
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves, tree_map

from moeblaze_ops.lowering.forms.views import axis, concatenated, form, full, output_shape, pieces, require, reshaped, tensor
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import Size, size_of

Number = tuple[Size, frozenset[tuple[Value, int]]]


@form("item", "wrapped_item")
def _item(view: GraphView, x: Any) -> Any:
    number = view.opaque(view._node)
    fake = fake_of(view._node)
    whole = isinstance(fake, torch.SymInt | torch.SymBool)  # no symbol of a float is the size of anything
    symbols = fake.node.expr.free_symbols if isinstance(fake, torch.SymBool) else {number} if whole else ()
    if isinstance(x, Value) and len(symbols) == 1 and isinstance(symbol := next(iter(symbols)), sympy.Symbol):
        view.numbers.setdefault(symbol, reshaped(view, x, ()))
    return number


@form("rows_between")
def _rows_between(view: GraphView, x: Any, start: Any, stop: Any, size: Any) -> Value:
    """What `markers.rows_between` gives, a slice in a graph that is captured with such numbers."""
    return _rows(view, tensor(x), 0, _mask(view, x.shape[0], slice(start, stop)), size)


@form("split", "split_with_sizes")
def _split(view: GraphView, x: Any, sizes: Any = None, dim: int = 0, **kwargs: Any) -> tuple[Value, ...]:
    d = axis(tensor(x), dim)
    lengths = [size_of(piece.shape[d]) for piece in fake_of(view._node)]
    if any(map(_is_of_data, lengths)):
        view.splits.append((lengths, x.shape[d]))
    if d or not any(map(_is_of_data, lengths)):
        return pieces(view, x, sizes, dim)
    masks = _runs(view, lengths, x.shape[0])
    return tuple(_rows(view, x, 0, mask, length) for mask, length in zip(masks, lengths, strict=True))


@form("cat", "concat", "concatenate")
def _cat(view: GraphView, xs: Any, dim: int = 0) -> Value:
    d = axis(tensor(xs[0]), dim)
    lengths = [tensor(x).shape[d] for x in xs]
    alike = len({(x.shape[1:], x.dtype) for x in xs}) == 1
    of_data = set().union(*(free_unbacked_symbols(length) for length in lengths if _is_of_data(length)))
    if d or not alike or not of_data or not of_data <= view.numbers.keys():
        return concatenated(view, xs, d)
    shape = output_shape(view)
    joined = full(view, 0, shape, xs[0].dtype)
    for x, mask in zip(xs, _runs(view, lengths, shape[0]), strict=True):
        index = (_positions(view, mask, x.shape[0]), *[None] * (len(shape) - 1))
        joined = view.make("put", joined, index, x, False, shape=shape, dtype=x.dtype)
    return joined


@form("rows_joined")
def _rows_joined(view: GraphView, xs: Any, size: Any) -> Value:
    """What `markers.rows_joined` gives, a concatenation in a graph that is captured with such numbers."""
    return _cat(view, xs)


def is_between_numbers(part: Any) -> bool:
    """True if a part of a subscript is a slice with a bound that only the data tell."""
    return isinstance(part, slice) and (_is_of_data(part.start) or _is_of_data(part.stop))


def slice_between(view: GraphView, x: Value, dim: int, part: slice, written: tuple[Size, ...] | None = None) -> Value:
    """``x[start:stop]`` along one axis, with bounds that only the data tell; ``written``: the shape of what is stored there."""
    mask, shape = _mask(view, x.shape[dim], part), output_shape(view) if written is None else written
    length = shape[dim] if len(shape) == len(x.shape) else 1
    if x.op == "true_first" and written is None and _counts_all(mask, x.args[0]):
        return _positions(view, x.args[0], length)
    if written is not None and not _is_of_data(length):
        require(mask in view.lengths, "a slice that is read, too")
        length = view.lengths[mask][0]
    return _rows(view, x, dim, mask, length)


def _mask(view: GraphView, extent: Size, part: slice) -> Value:
    require(part.step in (None, 1), "one row after another")
    require(not _is_of_data(extent), "rows of which the data do not tell the number")
    stop = extent if part.stop is None else part.stop
    return _between(view, _number(view, part.start or 0), _number(view, stop), extent)


def _between(view: GraphView, lower: Number, upper: Number, extent: Size) -> Value:
    return view.make("between", lower, upper, shape=(extent,), dtype=torch.bool)


def _counts_all(first: Value, mask: Value) -> bool:
    """True if rows between two bounds are as many as a mask has true elements: [: map.sum(0).sum()] of map.T.reshape(-1)."""
    lower, (known, counts) = first.args
    return (*lower, known) == (0, frozenset(), 0) and [(_summed(n), times) for n, times in counts] == [(_summed(mask), 1)]


def _summed(x: Value) -> Value:
    """What ``x`` sums over some axes, exactly, in other shapes."""
    while x.op in ("reshape", "permute") or (x.op in ("sum", "cast") and x.dtype == torch.int64):
        (x, *_) = x.args
    return x


def _is_of_data(size: Any) -> bool:
    return isinstance(size, sympy.Expr) and bool(free_unbacked_symbols(size))


def _number(view: GraphView, size: Size) -> Number:
    """A size as a sum of numbers that tensors hold."""
    known = sympy.sympify(size)
    values: dict[Value, int] = {}
    for term, count in known.as_coefficients_dict().items():
        if _is_of_data(term):
            require(count.is_Integer and term in view.numbers, "a number that a tensor holds")
            known -= count * term
            values[view.numbers[term]] = values.get(view.numbers[term], 0) + int(count)
    return size_of(known), frozenset((value, count) for value, count in values.items() if count)


def _runs(view: GraphView, lengths: list[Size], extent: Size) -> list[Value]:
    """Masks of rows that stand one run behind another, for the length of each."""
    masks, start = [], 0
    for length in lengths:
        masks.append(_between(view, _number(view, start), _number(view, start + length), extent))
        start = start + length
    return masks


def _rows(view: GraphView, x: Value, dim: int, mask: Value, length: Size) -> Value:
    index: list[Value | None] = [None] * len(x.shape)
    index[dim] = _positions(view, mask, length)
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return view.make("index", x, tuple(index), dim, shape=shape, dtype=x.dtype)


def _positions(view: GraphView, mask: Value, length: Size) -> Value:
    lengths = view.lengths.setdefault(mask, [])
    if length not in lengths:
        lengths.append(length)
    if isinstance(length, sympy.Symbol) and length not in view.numbers:
        view.numbers[length] = view.make("sum", mask, (0,), False, shape=(), dtype=torch.int64)
    return view.make("nonzero", mask, 0, shape=(length,), dtype=torch.int64)


def first_rows(view: GraphView, x: Value, count: int, rows: Size) -> Value:
    """The first of the rows that a mask selects: ``where(mask)[0][:C]`` is ``where(mask & (mask.cumsum(0) <= C))[0]``."""
    shape = (rows, *x.shape[1:])
    if x.op == "nonzero":
        mask, flat = x.args[0], (math.prod(x.args[0].shape),)
        ones = view.make("cast", reshaped(view, mask, flat), shape=flat, dtype=torch.int64)
        number, limit = view.make("prefix", ones, 0, shape=flat, dtype=ones.dtype), full(view, count, (), ones.dtype)
        below = view.make("pointwise", "le", (number, limit), (), shape=flat, dtype=mask.dtype)
        kept = view.make("pointwise", "and", (mask, reshaped(view, below, mask.shape)), (), shape=mask.shape, dtype=mask.dtype)
        return view.make("nonzero", kept, x.args[1], shape=shape, dtype=x.dtype)
    at = {"reshape": 0, "stack": 0, "index": 1}.get(x.op)
    parts = [] if at is None else [part for part in tree_leaves(x.args[at]) if part is not None]
    alike = all(part.shape[:1] == x.shape[:1] for part in parts) and len({len(part.shape) for part in parts}) == 1
    require(alike and (x.op != "index" or x.args[2] == 0), "a slice of rows that a mask selects")
    cut = tree_map(lambda part: part and first_rows(view, part, count, rows), x.args[at])
    return view.make(x.op, *x.args[:at], cut, *x.args[at + 1 :], shape=shape, dtype=x.dtype)
