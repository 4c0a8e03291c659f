"""What a graph computes of its model's state alone: parameters, buffers and other tensors that modules hold.

    self.codes.to(x.dtype) * self.scales              but not  x * self.norm.weight
    torch.ops.codec.unpack(self.packed, self.table)   but not  self.w[chosen]

It is no longer that once something else was written to it:

    out = torch.zeros(T, D); out.add_(y)              what a layer makes, and the tokens of the next one

Such a tensor is the same for all tokens. Only what is looked into depends on it, never whether a layer is right.
"""

import torch
from torch import fx

from moeblaze_ops.lowering.graph.fake_values import fake_of, storage_of

_STATE = "moeblaze_model_state"
_HELD = "_dynamo_static_input_type"
"""The mark that Dynamo leaves on inputs that modules hold: it expects them to stay where they are in memory."""


def nodes_of_state(graph: fx.Graph) -> frozenset[fx.Node]:
    """The tensors of the model's state in a graph, and the nodes that are computed of nothing else."""
    found: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    changed: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.op == "get_attr" or node.meta.get(_STATE) or _HELD in node.meta.get("tensor_dict", {}):
                found.add(node)
        elif node.op != "output":
            tensors = [operand for operand in node.all_input_nodes if isinstance(fake_of(operand), torch.Tensor | tuple | list)]
            if not all(operand in found or operand in constant for operand in tensors) or changed.intersection(_memory(*tensors)):
                changed.update(_memory(node) if fake_of(node) is not None else _memory(*tensors[:1]))  # x[i] = y gives nothing
            elif constant.issuperset(tensors):
                constant.add(node)
            else:
                found.add(node)
    return frozenset(found)


def mark_state_in_bodies(graph: fx.Graph) -> None:
    """Tell bodies of higher-order operators, as of activation checkpointing, which of their inputs are the model's state."""
    state = nodes_of_state(graph)
    owner = graph.owning_module
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
        bodies = [body for operand in operands if isinstance(body := _module(owner, operand), fx.GraphModule)]
        given = [operand for operand in operands if not isinstance(_module(owner, operand), fx.GraphModule)]
        for body in bodies:
            inputs = body.graph.find_nodes(op="placeholder")
            for operand, inside in zip(given, inputs, strict=False) if len(given) == len(inputs) else ():
                inside.meta[_STATE] = operand in state


def _module(owner: torch.nn.Module | None, node: fx.Node) -> object:
    return getattr(owner, str(node.target), None) if node.op == "get_attr" else None


def _memory(*nodes: fx.Node) -> set[int]:
    """What tensors share with their views, and with what an operator gives that writes to them."""
    return {storage for node in nodes if (storage := storage_of(node)) is not None}
