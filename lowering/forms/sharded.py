"""Canonical forms of a DTensor's methods: what they give of a parameter is passed in by the caller, as the parameter is.

    w = p.redistribute(placements=[Replicate()]).to_local()    # an input of the graph, another one in each call of a layer
    w = (p * 2).to_local()                                     # opaque
"""

from typing import Any

from moeblaze_ops.lowering.forms.views import form, output_dtype, output_shape, require, tensor
from moeblaze_ops.lowering.graph.dtensors import dtensor_call
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value


@form("DTensor.redistribute", "DTensor.to_local")
def _of_parameter(view: GraphView, x: Value, *args: Any, **kwargs: Any) -> Value:
    require(tensor(x).op == "input", "a parameter")
    call, of_layer = dtensor_call(view._node), view._node.meta.get("call_of_layer")
    require(call is not None, "a method of a DTensor, with arguments by name")
    return view.make("input", x, repr(call), of_layer, shape=output_shape(view), dtype=output_dtype(view))
