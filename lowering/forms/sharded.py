"""Canonical forms of a DTensor's methods: what they give of a parameter is passed in by the caller, as the parameter is.

    w = p.redistribute(placements=[Replicate()]).to_local()    # an input of the graph
    w = (p * 2).to_local()                                     # opaque

In another call of the layer it is another input: it travels again.
"""

from typing import Any

from moeblaze_ops.lowering.forms.views import form, output_dtype, output_shape, require, tensor
from moeblaze_ops.lowering.graph.dtensors import dtensor_call
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.torch_internals.callers import call_of_layer


@form("DTensor.redistribute", "DTensor.to_local")
def _of_parameter(view: GraphView, x: Value, *args: Any, **kwargs: Any) -> Value:
    require(tensor(x).op == "input", "a parameter")
    call = dtensor_call(view._node)
    require(call is not None, "a method of a DTensor, with arguments by name")
    return view.make("input", x, repr(call), call_of_layer(view._node), shape=output_shape(view), dtype=output_dtype(view))
