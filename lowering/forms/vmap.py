"""Canonical forms of what `torch.vmap` leaves in a graph; see `forms.views` for how forms work.

    lane (x, dim, level)            one of the slices of x along an axis, the same one everywhere inside the vmap
    lanes (x, level, dim)           what x is for all of them, along a new axis
"""

from typing import Any

from moeblaze_ops.lowering.forms.views import axis, form, output_shape, require, tensor
from moeblaze_ops.lowering.graph.fake_values import has_storage
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value


@form("_add_batch_dim")
def _lane(view: GraphView, x: Any, dim: int, level: int) -> Value:
    return view.make("lane", tensor(x), axis(x, dim), level)


@form("_remove_batch_dim")
def _lanes(view: GraphView, x: Any, level: int, size: Any, dim: int) -> Value:
    # Inside the vmap nothing tells which tensors share memory.
    require(all(has_storage(written) for _, written in view.all_writes()), "no writes to a slice")
    return view.make("lanes", tensor(x), level, dim % len(output_shape(view)))
