"""Parameters that get a gradient of zeros where the program as written leaves None: of experts without tokens.

``if idx.numel() == 0: continue`` keeps an idle expert out of the graph of autograd, so its parameters get no gradient:

    y = self.experts[e](x[idx])        # parameters of one expert each: None as written, zeros in the fused operators
    y = x[idx] @ self.w_up[e]          # one parameter of all experts: a gradient of zeros for e, either way
"""

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from moeblaze_ops.lowering.obligations.check import all_nodes

_PARAMETERS = ("w_up", "b_up", "w_down", "b_down")


@dataclass(frozen=True)
class IdleExperts:
    """The graph's inputs that hold the parameters of one expert each, of a layer in a module."""

    module_path: str
    inputs: tuple[str, ...]


def guarded_inputs(gm: fx.GraphModule, work: Collection[fx.Node]) -> set[fx.Node]:
    """The inputs of ``gm`` that only ``work`` reads, which runs for experts with tokens only."""
    inputs = (node for node in all_nodes(gm) if node.op in ("placeholder", "get_attr"))
    return {node for node in inputs if node.users and all(user in work for user in node.users)}


def idle_experts(gm: fx.GraphModule, guarded: Collection[fx.Node]) -> list[IdleExperts]:
    """The layers of a rewritten graph whose operators read experts apart, from inputs that were ``guarded``."""
    layers: dict[str, dict[str, None]] = {}
    for node in all_nodes(gm):
        if getattr(node.target, "namespace", None) != "moeblaze":
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            for tensor in value if argument.name in _PARAMETERS and len(value) > 1 else ():
                if (source := _source(tensor)) in guarded:
                    layers.setdefault(_module_path(node), {})[source.name] = None
    return [IdleExperts(path, tuple(inputs)) for path, inputs in layers.items()]


def _source(node: fx.Node) -> fx.Node:
    """The input that ``node`` is a view of, or made of alone."""
    while node.op not in ("placeholder", "get_attr") and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""
