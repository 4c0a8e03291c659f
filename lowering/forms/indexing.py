"""Canonical forms of gathers, scatters, masks, sorts and counts; see `canonical` for how forms work.

    index (x, indices, first)       x with integer tensors at some axes; the gathered axes stand at axis `first`
    put (x, indices, values, accumulate)
    take (x, dim, index)            torch.gather
    scatter (x, dim, index, source, accumulate)
    nonzero (mask, axis)            one coordinate of the true elements
    argsort (keys)                  a permutation that sorts 1-D keys upwards
    true_first (mask)               the places of true elements of a 1-D mask, and behind them the others, each in order
    inverse (permutation)           grouped_mm (rows, weights, offsets)
    searched (ends, numbers)        how many of the ends, which never fall, are not above a number
    largest (x, (dim,), keepdim)    the largest integer along an axis       largest_of_all (x)
"""

import math
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.forms.pointwise import times
from moeblaze_ops.lowering.forms.splits import first_rows, is_between_numbers, slice_between
from moeblaze_ops.lowering.forms.views import (
    axis,
    cast,
    expanded,
    filled,
    form,
    full,
    output_dtype,
    output_shape,
    require,
    reshaped,
    selected,
    short_forms,
    sliced,
    tensor,
    tiled,
)
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.operators import GROUPED_PRODUCTS
from moeblaze_ops.lowering.graph.selected_rows import before_rows
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size, size_of


def coordinates(view: GraphView, mask: Value, rows: Size) -> tuple[Value, ...]:
    """Those of the true elements of a mask, of which there are ``rows``."""
    lengths = view.lengths.setdefault(cast(view, mask, torch.bool), [])
    if rows not in lengths:
        lengths.append(rows)
    return _places(view, mask, rows)


def _places(view: GraphView, mask: Value, rows: Size) -> tuple[Value, ...]:
    """The same, where ``rows`` may be one that stands for all."""
    mask = cast(view, mask, torch.bool)
    return tuple(
        view.make("nonzero", mask, dim, shape=(rows,), dtype=torch.int64) for dim in range(len(mask.shape))
    )


def _rows_of_mask(view: GraphView) -> Size:
    """The number of rows that a boolean index, beside other tensors, gives to this node's result."""
    fresh = [size_of(size) for size in fake_of(view._node).shape if free_unbacked_symbols(size)]
    require(len(fresh) > 0, "a data-dependent size")
    return fresh[0]


def _axes_of(item: Any) -> int:
    """How many axes an item of a subscript takes: a mask as many as it has."""
    return len(item.shape) if isinstance(item, Value) and item.dtype == torch.bool else int(item is not None)


def _basic_then_tensors(
    view: GraphView, x: Value, key: Any, written: Value | None = None
) -> tuple[Value, tuple[Value | None, ...]]:
    """Apply slices, None and lone ints of a subscript, which is read or ``written``; return the view, and its index per axis."""
    items = list(key) if isinstance(key, tuple) else [key]
    consumed = sum(map(_axes_of, items))
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(x.shape) - consumed + 1)
    tensors: list[Value | None] = []
    dim = 0
    for item in items:
        if item is None:
            x = reshaped(view, x, (*x.shape[:dim], 1, *x.shape[dim:]))
        elif isinstance(item, Value):
            if item.dtype == torch.bool:
                if written is not None:
                    require(len(written.shape) > 0, "one value per true element")
                    tensors += _places(view, item, written.shape[0])
                elif sum(isinstance(other, Value | list) for other in items) == 1:
                    tensors += coordinates(view, item, output_shape(view)[len(tensors)])
                else:
                    tensors += _places(view, item, _rows_of_mask(view))
                dim += len(item.shape)
                continue
            require(item.dtype in (torch.int64, torch.int32), "an integer index")
        elif is_between_numbers(item):
            require(all(isinstance(other, slice) for other in items[:dim]), "an axis that stays where it is")
            x = slice_between(view, x, dim, item, None if written is None else written.shape)
            item = None
        elif isinstance(item, slice):
            x = _slice(view, x, dim, item)
            item = None
        elif isinstance(item, list):
            item = _of_list(view, item, x.shape[dim])
        else:
            require(not isinstance(item, bool), "an integer")
            x = selected(view, x, dim, item)
            continue
        tensors.append(item)
        dim += 1
    tensors += [None] * (len(x.shape) - len(tensors))
    return x, tuple(tensors)


def _of_list(view: GraphView, numbers: list, extent: Size) -> Value:
    """The tensor that a list stands for in a subscript: ``x[:, [1, 0]]``, not a list of truth values, ``x[[True, False]]``."""
    known = isinstance(extent, int) and all(type(n) is int and -extent <= n < extent for n in numbers)
    require(known and len(numbers) > 0, "whole numbers in a list")
    numbers = [n % extent for n in numbers]
    start, step = numbers[0], (numbers[1] - numbers[0] if len(numbers) > 1 else 1)
    if numbers == [start + i * step for i in range(len(numbers))]:
        return view.make("arange", start, step, shape=(len(numbers),), dtype=torch.int64)
    elements = tuple(full(view, n, (), torch.int64) for n in numbers)
    return view.make("stack", elements, 0, shape=(len(numbers),), dtype=torch.int64)


def _slice(view: GraphView, x: Value, dim: int, item: slice) -> Value:
    extent, step = x.shape[dim], item.step or 1
    start = item.start or 0
    if not isinstance(extent, int):
        whole = item.stop is None or same_size(item.stop, extent)
        known = dim == 0 and isinstance(item.stop, int) and item.stop >= 0
        require(start == 0 and step == 1 and (whole or known), "static slice")
        return x if whole else first_rows(view, x, item.stop, output_shape(view)[0])
    require(isinstance(start, int) and isinstance(item.stop, (int, type(None))), "static slice")
    start, stop, step = item.indices(extent)
    return sliced(view, x, dim, start, step, max(0, -(-(stop - start) // step)))


@form("getitem", "__getitem__")
def _getitem(view: GraphView, x: Any, key: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return x[key]
    if isinstance(key, Value) and tensor(x).op == "index" and (before := before_rows(key)) is not None:
        whole, rows = before
        if x.args[1:] == ((rows, *[None] * (len(x.args[1]) - 1)), 0):
            x, key = x.args[0], whole
    x, indices = _basic_then_tensors(view, tensor(x), key)
    if all(index is None for index in indices):
        return x
    at = [i for i, index in enumerate(indices) if index is not None]
    return view.make("index", x, indices, at[0] if at == [*range(at[0], at[-1] + 1)] else 0)  # by numpy's rules


@form("masked_select")
def _masked_select(view: GraphView, x: Any, mask: Any) -> Any:
    require(same_shape(tensor(x).shape, tensor(mask).shape), "one shape")
    return _getitem(view, x, mask)


def _put(view: GraphView, x: Value, key: Any, values: Any, accumulate: bool) -> Value:
    """``x[key] = values``: what the subscript reads is another tensor, and so are those that it is a part of."""
    if isinstance(values, (int, float)):
        values = filled(view, values, (), x.dtype)
    part, indices = _basic_then_tensors(view, x, key, tensor(values))
    if all(index is None for index in indices):  # it is copied to, which casts
        written = cast(view, expanded(view, values, part.shape), x.dtype)
    else:
        written = _put_at(view, part, indices, values, accumulate)
    while part is not x:
        whole = view.with_part(part, written)
        require(whole is not None, "a part whose place is known")
        part, written = part.args[0], whole
    return written


def _put_at(view: GraphView, x: Value, tensors: tuple[Value | None, ...], values: Value, accumulate: bool) -> Value:
    indices = [index for index in tensors if index is not None]
    require(None not in tensors[: len(indices)], "tensors in front of slices")
    require(values.dtype == x.dtype, "numbers of the dtype that they are stored in")
    shape = _common_shape([index.shape for index in indices])
    if len(shape) != 1 or any(index.shape != shape for index in indices):
        rows, width = math.prod(shape), x.shape[len(indices) :]
        values = reshaped(view, expanded(view, values, (*shape, *width)), (rows, *width))
        indices = [reshaped(view, expanded(view, index, shape), (rows,)) for index in indices]
    at = (*indices, *tensors[len(indices) :])
    return view.make("put", x, at, values, accumulate, shape=x.shape, dtype=x.dtype)


def _common_shape(shapes: list[tuple[Size, ...]]) -> tuple[Size, ...]:
    """What shapes are broadcast to."""
    common = []
    for d in range(-max(map(len, shapes)), 0):
        sizes = [shape[d] for shape in shapes if len(shape) >= -d]
        size = next((size for size in sizes if not same_size(size, 1)), 1)
        require(all(same_size(other, size) or same_size(other, 1) for other in sizes), "sizes that are known to be the same")
        common.append(size)
    return tuple(common)


@form("index_select")
def _index_select(view: GraphView, x: Any, dim: int, index: Any) -> Value:
    indices: list[Value | None] = [None] * len(tensor(x).shape)
    indices[axis(x, dim)] = tensor(index)
    return view.make("index", x, tuple(indices), axis(x, dim))


@form("embedding")
def _embedding(
    view: GraphView, index: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Value:  # fmt: skip
    """Rows of a table, each with the gradient that a subscript gives it.

        F.embedding(token, x)           but not  F.embedding(token, x, padding_idx=0), whose first row has no gradient
    """
    require(tensor(index).dtype in (torch.int32, torch.int64), "ids first")
    require(padding_idx is None and max_norm is None, "rows that are all alike")
    require(not scale_grad_by_freq and not sparse, "the gradient of a subscript")
    return view.make("index", weight, (index, *[None] * (len(weight.shape) - 1)), 0)


@form("index_add")
def _index_add(view: GraphView, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Value:
    d = axis(tensor(x), dim)
    require(d == 0, "rows")
    indices = (tensor(index), *[None] * (len(x.shape) - 1))
    require(tensor(source).dtype == x.dtype, "rows of the dtype that they are added in")
    source = times(view, alpha, source)
    return view.make("put", x, indices, source, True, shape=x.shape, dtype=x.dtype)


@form("index_copy")
def _index_copy(view: GraphView, x: Any, dim: int, index: Any, source: Any) -> Value:
    require(axis(tensor(x), dim) == 0, "rows")
    require(same_size(tensor(index).shape[0], tensor(source).shape[0]), "a row for every index")
    return _put(view, x, index, source, False)


@form("take_along_dim")
def _take_along_dim(view: GraphView, x: Any, indices: Any, dim: int | None = None) -> Value:
    """A gather whose other axes are broadcast."""
    require(dim is not None, "an axis")
    d, shape = axis(tensor(x), dim), output_shape(view)
    rows = expanded(view, x, (*shape[:d], x.shape[d], *shape[d + 1 :]))
    return view.make("take", rows, d, expanded(view, tensor(indices), shape))


def _scatter(view: GraphView, x: Any, dim: int, index: Any, source: Any, accumulate: bool) -> Value:
    if isinstance(source, (int, float)):
        source = filled(view, source, (), tensor(x).dtype)
    source = cast(view, expanded(view, tensor(source), tensor(index).shape) if not source.shape else source, x.dtype)
    require(len(source.shape) == len(index.shape) == len(x.shape), "same rank")
    d = axis(x, dim)
    require(all(same_size(a, b) for a, b in zip(index.shape, source.shape, strict=True)), "a source of the index's shape")
    require(all(same_size(index.shape[i], x.shape[i]) for i in range(len(x.shape)) if i != d), "whole other axes")
    may_count = accumulate and len(x.shape) == 1 and not x.dtype.is_floating_point
    if may_count and (x, source) == (full(view, 0, x.shape, x.dtype), full(view, 1, source.shape, x.dtype)):
        return cast(view, counts_of(view, index, x.shape[0]), x.dtype)
    return view.make("scatter", x, d, index, source, accumulate, shape=x.shape, dtype=x.dtype)


@form("scatter_reduce")
def _scatter_reduce(
    view: GraphView, x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Value:
    require(reduce == "sum" and include_self, "a sum")
    return _scatter(view, x, dim, index, src, True)


# Masks.


@form("nonzero", "argwhere")
def _nonzero(view: GraphView, mask: Any, *, as_tuple: bool = False) -> Any:
    if as_tuple:
        return coordinates(view, tensor(mask), size_of(fake_of(view._node)[0].shape[0]))
    return view.make("stack", coordinates(view, tensor(mask), output_shape(view)[0]), 1)


@form("one_hot", "one_hot_below")
def _one_hot(view: GraphView, index: Any, num_classes: int = -1) -> Value:
    return _hits(view, tensor(index), output_shape(view)[-1], output_dtype(view))


def _hits(view: GraphView, ids: Value, num: Size, dtype: torch.dtype) -> Value:
    """1 where an id is each of the first numbers."""
    classes = view.make("arange", 0, 1, shape=(num,), dtype=ids.dtype)
    column = reshaped(view, ids, (*ids.shape, 1))
    return view.make("pointwise", "eq", (column, classes), (), shape=(*ids.shape, num), dtype=dtype)


# Sorts and counts.


def _permutation(view: GraphView, keys: Value, dim: int, descending: bool) -> Value:
    require(len(keys.shape) == 1 and axis(keys, dim) == 0 and not descending, "1-D keys, upwards")
    keys = _exact_integers(keys)
    if same_size(keys.shape[0], 1):
        return view.make("arange", 0, 1, shape=keys.shape, dtype=torch.int64)
    if keys.is_permutation:
        return view.make("inverse", keys, shape=keys.shape, dtype=torch.int64)
    return view.make("argsort", keys, shape=keys.shape, dtype=torch.int64)


def _exact_integers(x: Value) -> Value:
    """Integers below the float casts that hold them exactly.

        ids.float(), ids.float().long()         but not  (ids / 2).long(), which rounds
    """
    given = x
    while x.op == "cast" and x.dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        if x.args[0].dtype not in (torch.int32, torch.int64, torch.float32, torch.float64, torch.int16, torch.uint8):
            break
        x = x.args[0]
    return given if x.dtype.is_floating_point else x


@form("argsort")
def _argsort(view: GraphView, keys: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Value:
    if len(tensor(keys).shape) == 1 and keys.dtype == torch.bool and descending and stable:
        return view.make("true_first", keys, shape=keys.shape, dtype=torch.int64)
    if len(tensor(keys).shape) > 1:
        order = view.opaque(view._node)
        order.choices_along = axis(keys, dim)
        order.bound = keys.shape[order.choices_along]
        return order
    return _permutation(view, tensor(keys), dim, descending)


@form("sort")
def _sort(view: GraphView, keys: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    by_column = tensor(keys).op == "stack" and len(keys.shape) == 2 and axis(keys, dim) != keys.args[1]
    if by_column and not keys.dtype.is_floating_point:
        columns = zip(*(_sort(view, column, 0, descending, stable) for column in keys.args[0]), strict=True)
        return tuple(view.make("stack", parts, keys.args[1], shape=keys.shape, dtype=parts[0].dtype) for parts in columns)
    if len(keys.shape) > 1:
        return _choices(view, keys, dim)
    permutation = _permutation(view, tensor(keys), dim, descending)
    return view.make("index", keys, (permutation,), 0, shape=keys.shape, dtype=keys.dtype), permutation


def counts_of(view: GraphView, ids: Value, num: Size) -> Value:
    """How many ids each of the first numbers is."""
    hits = _hits(view, _exact_integers(ids), num, torch.bool)
    return view.make("sum", hits, tuple(range(len(ids.shape))), False, shape=(num,), dtype=torch.int64)


@form("bincount")
def _bincount(view: GraphView, ids: Any, weights: Any = None, minlength: int = 0) -> Value:
    require(weights is None, "unweighted counts")
    return counts_of(view, tensor(ids), output_shape(view)[0])


@form("histc")
def _histc(view: GraphView, ids: Any, bins: int = 100, min: int = 0, max: int = 0) -> Value:
    integers = _exact_integers(tensor(ids))
    require(min == 0 and max > 0 and integers.dtype.is_floating_point is False, "bins of integers")
    bound = integers.bound  # a last bin that is one longer counts its upper end, too
    require(max == bins - 1 or (max == bins and isinstance(bound, int) and bound <= bins), "unit bins")
    return cast(view, counts_of(view, ids, bins), output_dtype(view))


@form("searchsorted")
def _searchsorted(view: GraphView, ends: Any, x: Any, *, right: bool = False, side: str | None = None, **kwargs: Any) -> Value:
    require(right or side == "right", "ends that are no part of what they end")
    require(len(tensor(ends).shape) == 1 and kwargs.get("sorter") is None, "one row of sorted ends")
    return view.make("searched", ends, tensor(x))


@form("repeat_interleave")
def _repeat_interleave(view: GraphView, x: Any, repeats: Any, dim: int | None = None, **kwargs: Any) -> Value:
    if dim is None:
        x, dim = reshaped(view, tensor(x), (math.prod(x.shape),)), 0
    d = axis(tensor(x), dim)
    if isinstance(repeats, int):
        x = reshaped(view, x, (*x.shape[: d + 1], 1, *x.shape[d + 1 :]))
        return tiled(view, x, *[1] * (d + 1), repeats, *[1] * (len(x.shape) - d - 2))
    rows, dtype = output_shape(view)[d : d + 1], torch.int64
    each = expanded(view, tensor(repeats), x.shape[d : d + 1])
    ends = view.make("prefix", each, 0, shape=each.shape, dtype=dtype)
    group = view.make("searched", ends, view.make("arange", 0, 1, shape=rows, dtype=dtype), shape=rows, dtype=dtype)
    return view.make("index", x, tuple(group if i == d else None for i in range(len(x.shape))), d)


@form(*GROUPED_PRODUCTS)
def _grouped_mm(view: GraphView, rows: Any, weights: Any, offs: Any = None, *, bias: Any = None, **kwargs: Any) -> Value:
    require(offs is not None and bias is None, "row groups")
    require(len(tensor(rows).shape) == 2 and len(tensor(weights).shape) == 3, "rows by experts")
    groups = tensor(offs).shape[0]  # of a bincount it depends on the data, and is as large as the product asks for
    require(not isinstance(groups, int) or same_size(groups, weights.shape[0]), "a group for every expert")
    dtype = output_dtype(view)
    return view.make("grouped_mm", cast(view, rows, dtype), cast(view, weights, dtype), tensor(offs))


def _choices(view: GraphView, x: Any, dim: int) -> tuple[Value, Value]:
    """Some values along an axis, or all, and where they are; nothing else is known of either."""
    values, indices = view.opaque(view._node)
    indices.choices_along = axis(tensor(x), dim)
    indices.bound = x.shape[indices.choices_along]
    values.fades = x.fades
    return values, indices


@form("max")
def _max(view: GraphView, x: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(fake_of(view._node), torch.Tensor):
        if len(args) == 1 and isinstance(args[0], Value) and not kwargs:
            return view.make("pointwise", "maximum", (tensor(x), args[0]), ())
        require(not args and not kwargs, "the largest of one tensor, or the larger of two")
        return _largest_flag(view, x)
    return _max_along(view, x, *args, **kwargs)


def _max_along(view: GraphView, x: Any, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    values, indices = _choices(view, x, dim)
    indices.choices_along = None  # one of each
    return values if values.dtype.is_floating_point else _largest_along(view, x, dim, keepdim), indices


@form("amax")
def _largest_along(view: GraphView, x: Any, dim: Any, keepdim: bool = False) -> Value:
    require(isinstance(dim, int) and not tensor(x).dtype.is_floating_point, "the largest integer along an axis")
    if len(x.shape) == 1 and not keepdim:
        return view.make("largest_of_all", x, shape=(), dtype=x.dtype)
    d = axis(x, dim)
    shape = (*x.shape[:d], *[1][: int(keepdim)], *x.shape[d + 1 :])
    return view.make("largest", x, (d,), keepdim, shape=shape, dtype=x.dtype)


@form("min")
def _smaller(view: GraphView, x: Any, other: Any) -> Value:
    require(isinstance(other, Value), "the smaller of two tensors")
    return view.make("pointwise", "minimum", (tensor(x), other), ())


def _largest_flag(view: GraphView, x: Any) -> Value:
    """``any``, of flags or what they are as numbers; the largest of other integers.

        (ids == e).int().max()
    """
    flags = tensor(x)
    while flags.op == "cast" and flags.dtype != torch.bool:
        (flags,) = flags.args
    if flags.dtype != torch.bool:
        require(not flags.dtype.is_floating_point, "the largest integer")
        return view.make("largest_of_all", tensor(x), shape=(), dtype=x.dtype)
    return cast(view, view.make("any", flags, tuple(range(len(flags.shape))), False), output_dtype(view))


@form("argmax")
def _argmax(view: GraphView, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    index = view.make("argmax", tensor(x), dim, keepdim)
    index.bound = math.prod(x.shape) if dim is None else x.shape[axis(x, dim)]
    return index


short_forms({
    ("setitem", "__setitem__"): lambda view, x, key, values: _put(view, tensor(x), key, values, False),
    ("index_put", "_index_put_impl"): lambda view, x, indices, values, accumulate=False: _put(
        view, tensor(x), tuple(slice(None) if i is None else i for i in indices), values, accumulate
    ),
    ("gather",): lambda view, x, dim, index, **kwargs: view.make("take", tensor(x), axis(x, dim), tensor(index)),
    ("scatter",): lambda view, x, dim, index, src=None, *, value=None: _scatter(
        view, x, dim, index, value if src is None else src, False
    ),
    ("scatter_add",): lambda view, x, dim, index, src: _scatter(view, x, dim, index, src, True),
    # A subscript as exported programs hold it: None stands for a whole axis.
    ("index",): lambda view, x, indices: _getitem(view, tensor(x), tuple(slice(None) if i is None else i for i in indices)),
    ("topk",): lambda view, x, k, dim=-1, *args, **kwargs: _choices(view, x, dim),
    ("counts_below",): lambda view, ids, num_experts: counts_of(view, tensor(ids), num_experts),
    ("bucketize",): lambda view, x, ends, *, right=False, **kwargs: _searchsorted(view, ends, x, right=right),
})  # fmt: skip
