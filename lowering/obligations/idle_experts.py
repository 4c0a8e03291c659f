"""Parameters that get a gradient of zeros where the program as written leaves None: of experts without tokens.

``if idx.numel() == 0: continue`` keeps an idle expert out of the graph of autograd, so its parameters get no gradient:

    y = self.experts[e](x[idx])        # parameters of one expert each: None as written, zeros in the fused operators
    y = x[idx] @ self.w_up[e]          # one parameter of all experts: a gradient of zeros for e, either way
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from moeblaze_ops.lowering.graph.fake_values import needs_gradient
from moeblaze_ops.lowering.obligations.check import all_nodes
from moeblaze_ops.lowering.torch_internals.callers import module_path_of


@dataclass(frozen=True)
class IdleExperts:
    """The graph's inputs that hold the parameters of one expert each, and the module that they are read in."""

    module_path: str
    inputs: tuple[str, ...]


def guarded_inputs(gm: fx.GraphModule, work: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The inputs of ``gm`` with gradients that only the ``work`` of one branch reads, which runs if an expert has tokens."""
    inputs = (node for node in all_nodes(gm) if node.op in ("placeholder", "get_attr") and node.users and needs_gradient(node))
    return {node for node in inputs if None not in (branches := set(map(work.get, node.users))) and len(branches) == 1}


def idle_experts(gm: fx.GraphModule, guarded: Collection[fx.Node]) -> list[IdleExperts]:
    """The modules of a rewritten graph in which what is made of ``guarded`` inputs meets something else."""
    layers: dict[str, dict[str, None]] = {}
    for node in all_nodes(gm):
        sources = map(_source, node.all_input_nodes) if len(node.all_input_nodes) > 1 else ()
        if read := {source.name: None for source in sources if source in guarded}:
            layers.setdefault(module_path_of(node), {}).update(read)
    return [IdleExperts(path, tuple(inputs)) for path, inputs in layers.items()]


def _source(node: fx.Node) -> fx.Node:
    """The input that ``node`` is a view of, or made of alone."""
    while node.op not in ("placeholder", "get_attr") and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node
