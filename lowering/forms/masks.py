"""Canonical forms that leave numbers out where a mask says so; see `forms.views` for how forms work."""

import math
from typing import Any

from moeblaze_ops.lowering.forms.indexing import coordinates
from moeblaze_ops.lowering.forms.pointwise import pointwise
from moeblaze_ops.lowering.forms.views import form, full, output_dtype, tensor
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, fake_of
from moeblaze_ops.lowering.index_notation.expr import same_size, size_of


@form("where")
def _where(view: GraphView, mask: Any, *args: Any) -> Any:
    if args:
        return _chosen(view, mask, *args)
    rows = size_of(fake_of(view._node)[0].shape[0])
    return coordinates(view, tensor(mask), rows)


@form("masked_fill")
def _masked_fill(view: GraphView, x: Any, mask: Any, value: Any) -> Value:
    return _chosen(view, mask, value, x)


def _chosen(view: GraphView, mask: Any, kept: Any, other: Any) -> Value:
    """``where(mask, kept, other)``: the kept numbers scattered over minus infinity, where ids made the mask by a scatter."""
    for numbers, rest, value in ((kept, other, True), (other, kept, False)):
        if not isinstance(numbers, Value) or _number(rest) != -math.inf or numbers.dtype != output_dtype(view):
            continue
        scattered = _scatter_that_stores(tensor(mask), value)
        if scattered is not None and len(numbers.shape) == len(mask.shape) and all(map(same_size, numbers.shape, mask.shape)):
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
