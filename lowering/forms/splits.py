"""Canonical forms of rows that are split by counts on the host, as gathers, and of what is concatenated of them, as stores.

    sizes = counts.tolist()                     sizes[i] is the size of group i wherever it is an axis
    parts = rows.split(sizes)                   parts[i] is rows[where(group of row == i)]
    y = torch.cat([f(p) for p in parts])        y[where(group of row == i)] = f(parts[i])

Both sides are the same where the sizes are not negative and add up to the number of rows; a split raises an error otherwise.
"""

from typing import Any

import torch

from moeblaze_ops.lowering.forms.views import axis, concatenated, form, full, pieces, tensor
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, fake_of
from moeblaze_ops.lowering.index_notation.expr import Size, same_size, size_of


@form("split", "split_with_sizes")
def _split(view: GraphView, x: Any, sizes: Any = None, dim: int = 0, **kwargs: Any) -> tuple[Value, ...]:
    d = axis(tensor(x), dim)
    lengths = [size_of(piece.shape[d]) for piece in fake_of(view._node)]
    rows = split_rows(view, x, lengths) if d == 0 else None
    return pieces(view, x, sizes, dim) if rows is None else rows


@form("cat", "concat", "concatenate")
def _cat(view: GraphView, xs: Any, dim: int = 0) -> Value:
    d = axis(tensor(xs[0]), dim)
    joined = joined_rows(view, tuple(map(tensor, xs))) if d == 0 else None
    return concatenated(view, xs, d) if joined is None else joined


@form("item")
def _item(view: GraphView, x: Any) -> Any:
    number = view.opaque(view._node)
    if isinstance(x, Value) and x.op == "select" and isinstance(fake_of(view._node), torch.SymInt):
        counts, axis, index = x.args
        if axis == 0 and len(counts.shape) == 1:
            view.items.setdefault(number, (counts, index))
    return number


def counts_of(view: GraphView, sizes: list[Size]) -> Value | None:
    """The tensor that ``sizes`` are all elements of, in order."""
    if not sizes or any(isinstance(size, int) or size not in view.items for size in sizes):
        return None
    tensors = {view.items[size][0] for size in sizes}
    numbers = [view.items[size][1] for size in sizes]
    if len(tensors) != 1 or numbers != list(range(len(sizes))) or len(set(sizes)) != len(sizes):
        return None
    (counts,) = tensors
    return counts if same_size(counts.shape[0], len(sizes)) else None


def split_rows(view: GraphView, x: Value, sizes: list[Size]) -> tuple[Value, ...] | None:
    """``x`` in groups of these sizes, if they are all counts that one tensor has."""
    counts = counts_of(view, sizes)
    if counts is None:
        return None
    parts = []
    for i, size in enumerate(sizes):
        index = (_rows_of_group(view, counts, i, size, x.shape[0]), *[None] * (len(x.shape) - 1))
        parts.append(view.make("index", x, index, 0, shape=(size, *x.shape[1:]), dtype=x.dtype))
    return tuple(parts)


def joined_rows(view: GraphView, xs: tuple[Value, ...]) -> Value | None:
    """The concatenation of one part for each group, if they are as large as all counts that one tensor has."""
    counts = counts_of(view, [x.shape[0] for x in xs])
    if counts is None or len({(x.shape[1:], x.dtype) for x in xs}) != 1:
        return None
    shape = tuple(map(size_of, fake_of(view._node).shape))
    joined = full(view, 0, shape, xs[0].dtype)
    for i, x in enumerate(xs):
        index = (_rows_of_group(view, counts, i, x.shape[0], shape[0]), *[None] * (len(shape) - 1))
        joined = view.make("put", joined, index, 0, x, False, shape=shape, dtype=x.dtype)
    return joined


def _rows_of_group(view: GraphView, counts: Value, group: int, size: Size, num_rows: Size) -> Value:
    ends = view.make("prefix", counts, 0, shape=counts.shape, dtype=torch.int64)
    rows = view.make("arange", 0, 1, shape=(num_rows,), dtype=torch.int64)
    found = view.make("searched", ends, rows, shape=rows.shape, dtype=torch.int64)
    number = full(view, group, (), torch.int64)
    mask = view.make("pointwise", "eq", (found, number), (), shape=rows.shape, dtype=torch.bool)
    return view.make("nonzero", mask, 0, shape=(size,), dtype=torch.int64)
