"""Gradients of expert weights that compiled backward adds in place, where ``accumulate_grad`` holds for a parameter.

A graph returns the gradient of each of its inputs, and autograd adds it to what is there. Where the gradient of an expert weight
leaves a backward graph as the kernel wrote it, for the parameter itself, the kernel is told the parameter: it adds to what the
parameter accumulates in and returns nothing, which for autograd is no gradient. Whether it does is asked for in each run.

    expert_weight_grad(x, dh, [w], ...)[0]                               of w, an input: may be added in place
    expert_weight_grad(x, dh, [w.view(E, 2, F, D)], ...)[0].view_as(w)   of a view of it as well
    expert_weight_grad(x, dh, [w.bfloat16()], ...)[0].float()            sums of fp32 need no rounding before
    expert_weight_grad(...)[0] + expert_weight_grad(...)[0]              two layers of one weight: stays
"""

import operator

import torch
from torch import fx

from moeblaze_ops.lowering.inductor.graph_writer import CAST
from moeblaze_ops.lowering.torch_internals import inductor
from moeblaze_ops.ops.accumulation import is_in_use
from moeblaze_ops.ops.weight_grad import expert_weight_grad_or_add


def accumulate_in_place(node: fx.Node) -> bool:
    """Give ``node``, an ``expert_weight_grad`` in a graph after autograd, the parameters that its results are for, and say so."""
    if not is_in_use() or not inductor.may_return_nothing():
        return False
    graph = node.graph
    (output,) = graph.find_nodes(op="output")
    inputs = {placeholder.name: placeholder for placeholder in graph.find_nodes(op="placeholder")}
    if not any(name.startswith("tangents") for name in inputs):
        return False  # results of a forward graph are no gradients
    parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
    numbers = range(len(node.args[2]))
    if len(node.users) != len(parts) or set(parts) != set(numbers):
        return False
    results = [_result(parts[number], output) for number in numbers]
    parameters = [_parameter(result, output, inputs) for result in results]
    if any(parameter is None for parameter in parameters):
        return False
    with graph.inserting_before(node):
        added = graph.call_function(expert_weight_grad_or_add, (*node.args, parameters))
    values = [parameter.meta["val"] for parameter in parameters]
    added.meta = {**node.meta, "val": [result.meta["val"] for result in results]}
    if "eager_input_vals" in node.meta:
        args, kwargs = node.meta["eager_input_vals"]
        added.meta["eager_input_vals"] = (*args, values), kwargs
    for number, result in enumerate(results):
        with graph.inserting_before(node):
            gradient = graph.call_function(operator.getitem, (added, number))
        gradient.meta = dict(result.meta)
        result.replace_all_uses_with(gradient)
        _erase_up_to(node, result)
    # What is left would still be launched: the kernels write to memory.
    graph.erase_node(node)
    return True


def _erase_up_to(end: fx.Node, last: fx.Node) -> None:
    """Erase views from ``last`` back to ``end``, of which nobody else reads one."""
    while last is not end:
        (before,) = last.all_input_nodes
        last.graph.erase_node(last)
        last = before


def _result(part: fx.Node, output: fx.Node) -> fx.Node | None:
    """The output of the graph that ``part`` alone is, through views and a cast to fp32 that nobody else reads, or None."""
    value = part.meta["val"]
    memory = torch.empty_strided(value.shape, value.stride(), device="meta")
    seen = memory
    while list(part.users) != [output]:
        if len(part.users) != 1:
            return None
        (part,) = part.users
        if part.target == CAST and part.args[1] == torch.float32:
            continue
        if not (isinstance(part.target, torch._ops.OpOverload) and part.target.is_view) or len(part.all_input_nodes) != 1:
            return None
        seen = part.target(seen, *part.args[1:], **part.kwargs)
    # A reshape may have copied.
    return part if seen.untyped_storage()._cdata == memory.untyped_storage()._cdata else None


def _parameter(result: fx.Node | None, output: fx.Node, inputs: dict[str, fx.Node]) -> fx.Node | None:
    """The input of forward whose gradient ``result`` is, if it lies in memory as the gradient does."""
    results = list(output.args[0])
    if result is None or results.count(result) != 1:
        return None
    # AOTAutograd numbers the inputs of forward from one, and returns gradients in their order.
    parameter = inputs.get(f"primals_{results.index(result) + 1}")
    if parameter is None:
        return None
    gradient, value = result.meta["val"], parameter.meta["val"]
    alike = (gradient.dtype, gradient.shape, gradient.stride()) == (value.dtype, value.shape, value.stride())
    return parameter if alike else None
