"""The first ones of the rows that a mask selects are those of another mask, whose true elements are counted up to there.

    token, k = torch.where(chosen == e)
    token, k = token[:C], k[:C]                 torch.where(mask & (mask.flatten().cumsum(0) <= C).view(T, K)),  mask = chosen == e
"""

import math

import torch

from moeblaze_ops.lowering.forms.views import cast, full, reshaped
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import Size, same_size


def first_rows(view: GraphView, x: Value, count: int, rows: Size) -> Value | None:
    """The first ``count`` of what has a row for each true element of a mask, ``rows`` in all; None where it has not."""
    shape = (rows, *x.shape[1:])
    if x.op == "nonzero":
        mask, dim = x.args
        return view.make("nonzero", first_true(view, mask, count), dim, shape=shape, dtype=x.dtype)
    if x.op == "reshape" and x.args[0].shape and same_size(x.args[0].shape[0], x.shape[0]):
        inner = first_rows(view, x.args[0], count, rows)
        return inner and reshaped(view, inner, shape)
    if x.op == "stack" and x.args[1] == 1:
        parts = [first_rows(view, part, count, rows) for part in x.args[0]]
        return None if None in parts else view.make("stack", tuple(parts), 1, shape=shape, dtype=x.dtype)
    if x.op == "index" and x.args[2] == 0:
        base, indices, _ = x.args
        firsts = [index if index is None else first_rows(view, index, count, rows) for index in indices]
        known = all(index is None or (first is not None and index.shape == x.shape[:1]) for index, first in zip(indices, firsts, strict=True))
        return view.make("index", base, tuple(firsts), 0, shape=shape, dtype=x.dtype) if known else None
    return None


def first_true(view: GraphView, mask: Value, count: int) -> Value:
    """A mask with the first ``count`` of the true elements, in row-major order."""
    flat = cast(view, reshaped(view, mask, (math.prod(mask.shape),)), torch.int64)
    number = view.make("prefix", flat, 0, shape=flat.shape, dtype=torch.int64)
    limit = full(view, count, (), torch.int64)
    there = view.make("pointwise", "le", (number, limit), (), shape=flat.shape, dtype=torch.bool)
    both = mask, reshaped(view, there, mask.shape)
    return view.make("pointwise", "and", both, (), shape=mask.shape, dtype=torch.bool)
