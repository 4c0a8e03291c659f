"""Weights that are computed from what is passed in are computed once more in backward, in place of being kept.

A dequantisation, a cast or a parametrization gives a tensor of the size of all experts' weights, which the products of backward
read again. The partitioner would keep it: it does not repeat what backward has to write to memory. With one such tensor for each
projection of each layer, all weights would be kept in the dtype of the products. Repeating it costs to read what it is made of
and to write it, which is little beside the products with it.

    w = (codes.to(x.dtype) * scales).transpose(1, 2)      the cast and the product are repeated; views are free
    w = base + 2.0 * b @ a                                b's product with the scale is: a layer takes both factors as weights
    w = rotation @ stored                                 left to the partitioner: a product of matrices is not cheap
    w = all_gather(shard)                                 left to it as well: what moves between ranks is dear
"""

import operator

import torch
from torch import fx

from moeblaze_ops.lowering.torch_internals import graphs

_OPERANDS = ("w_up", "w_down", "lora_a_ERD", "lora_b_EGFR", "lora_a_ERF", "lora_b_ERD")
_MOST_NODES = 4096
_DEAR = frozenset(("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "_scaled_mm", "linear", "einsum"))


def repeat_weights(node: fx.Node) -> None:
    """Mark what computes the weights of ``node``, an operator of a layer in a joint graph, to be repeated in backward."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    for name in _OPERANDS:
        weights = given.get(name) or ()
        for weight in (weights,) if isinstance(weights, fx.Node) else weights:
            for step in _steps(weight):
                graphs.repeat_in_backward(step)


def _steps(weight: fx.Node) -> list[fx.Node]:
    """The nodes that compute a weight from inputs of the graph; none where all are views, or one is dear or random."""
    steps: dict[fx.Node, None] = {}
    pending = [weight]
    while pending:
        step = pending.pop()
        if step in steps:
            continue
        if step.op in ("placeholder", "get_attr"):
            if any(map(_writes, step.users)):
                return []  # backward would read what forward has written
            continue
        if not _is_cheap(step) or len(steps) == _MOST_NODES:
            return []
        steps[step] = None
        pending += step.all_input_nodes
    return [] if all(map(_is_view, steps)) else list(steps)


def _is_view(step: fx.Node) -> bool:
    return isinstance(step.target, torch._ops.OpOverload) and step.target.is_view


def _writes(step: fx.Node) -> bool:
    return isinstance(step.target, torch._ops.OpOverload) and step.target._schema.is_mutable


def _is_cheap(step: fx.Node) -> bool:
    if step.target is operator.getitem:
        return True
    if not isinstance(step.target, torch._ops.OpOverload) or _writes(step):
        return False
    namespace, name = step.target.namespace, step.target._schema.name.split("::")[1]
    random = torch.Tag.nondeterministic_seeded in step.target.tags
    return not random and namespace not in ("moeblaze", "_c10d_functional", "c10d") and name not in _DEAR
