"""Canonical forms that leave numbers out where a mask says so; see `forms.views` for how forms work."""

import math
from typing import Any

import torch

from moeblaze_ops.lowering.forms.indexing import coordinates, counts_of
from moeblaze_ops.lowering.forms.pointwise import pointwise
from moeblaze_ops.lowering.forms.views import form, full, output_dtype, output_shape, require, selected, short_forms, tensor
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import same_shape, same_size, size_of


@form("where")
def _where(view: GraphView, mask: Any, *args: Any) -> Any:
    if args:
        return _chosen(view, mask, *args)
    rows = size_of(fake_of(view._node)[0].shape[0])
    return coordinates(view, tensor(mask), rows)


@form("unique", "_unique_impl")
def _unique(view: GraphView, ids: Any, *args: Any, **kwargs: Any) -> Value:
    """The numbers that ids have, in rising order: those of which the count is not zero."""
    options = {**dict(zip(("sorted", "return_inverse", "return_counts", "dim"), args, strict=False)), **kwargs}
    plain = not options.get("return_inverse") and not options.get("return_counts") and options.get("dim") is None
    require(plain and options.get("sorted", True) is True, "numbers in rising order alone")
    count = tensor(ids).bound
    require(isinstance(count, int), "ids below a known number")
    counts = counts_of(view, ids, count)
    zero = full(view, 0, (), counts.dtype)
    mask = view.make("pointwise", "gt", (counts, zero), (), shape=counts.shape, dtype=torch.bool)
    return view.make("nonzero", mask, 0, shape=output_shape(view), dtype=torch.int64)


def hits_in(hits: Value) -> tuple[Value, bool] | None:
    """The mask of which ``hits`` has the places of the true elements, one axis of it at most, and whether they fall.

    None where it has other numbers. ``hit.flip(0)`` has them in falling order.
    """
    falls = False
    while True:
        if hits.op == "slice" and hits.args[1] == 0 and hits.args[3] == -1 and same_size(hits.shape[0], hits.args[0].shape[0]):
            falls = not falls
        elif hits.op == "stack" and len(hits.args[0]) == 1:
            hits = hits.args[0][0]
            continue
        elif hits.op not in ("reshape", "cast"):
            break
        hits = hits.args[0]
    return (hits.args[0], falls) if hits.op == "nonzero" and len(hits.args[0].shape) == 1 else None


@form("is_hit")
def _is_hit(view: GraphView, hits: Any, expert: int) -> Value:
    found = hits_in(tensor(hits))
    require(found is not None and 0 <= expert < found[0].shape[0], "an expert of a mask")
    return selected(view, found[0], 0, expert)


def _chosen(view: GraphView, mask: Any, kept: Any, other: Any) -> Value:
    """``where(mask, kept, other)``: the kept numbers scattered over minus infinity, where ids made the mask by a scatter."""
    for numbers, rest, value in ((kept, other, True), (other, kept, False)):
        if not isinstance(numbers, Value) or _number(rest) != -math.inf or numbers.dtype != output_dtype(view):
            continue
        scattered = _scatter_that_stores(tensor(mask), value)
        if scattered is not None and same_shape(numbers.shape, mask.shape):
            _, dim, index, *_ = scattered.args
            source = view.make("take", numbers, dim, index, shape=index.shape)
            return view.make("scatter", full(view, -math.inf, numbers.shape, numbers.dtype), dim, index, source, False)
    return pointwise(view, "where", mask, kept, other)


def _scatter_that_stores(mask: Value, value: bool) -> Value | None:
    """The scatter by which a mask has ``value`` at the scattered places, and the other elsewhere."""
    while True:
        if mask.op == "cast":
            (mask,) = mask.args
        elif mask.op == "pointwise" and mask.args[0] == "not":
            ((mask,), value) = mask.args[1], not value
        elif mask.op == "pointwise" and mask.args[0] in ("eq", "ne", "gt") and _number(mask.args[1][1]) == 0:
            value = value is not (mask.args[0] == "eq")
            mask = mask.args[1][0]
        else:
            break
    if mask.op != "scatter" or mask.args[4]:
        return None
    numbers = _number(mask.args[0]), _number(mask.args[3])
    return mask if numbers == ((0, 1) if value else (1, 0)) else None


def _number(x: Any) -> float | None:
    """The number that all elements of a tensor are, as far as it is known."""
    while isinstance(x, Value) and x.op in ("expand", "cast"):
        (x,) = x.args
    if isinstance(x, Value):
        return x.args[0] if x.op == "full" else None
    return x if isinstance(x, (int, float)) else None


short_forms({
    ("hit_number",): lambda view, hits, expert: full(view, expert, output_shape(view), output_dtype(view)),
    ("masked_fill",): lambda view, x, mask, value: _chosen(view, mask, value, x),
})  # fmt: skip
