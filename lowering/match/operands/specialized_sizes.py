"""Sizes of weights that Dynamo takes for any, made numbers again: a layer has the widths that it has.

    def layer(x, w_up, w_down): ...     called with weights of other sizes in one process: symbols from the second ones on

Each becomes a guard, so that other weights are compiled for themselves. The number of tokens stays a symbol.
"""

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_int

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.torch_internals.frames import marked_dynamic


class SymbolicWeight(Exception):
    """A layer has all that it needs but numbers for the shape of the weight that ``node`` gives."""

    def __init__(self, node: fx.Node):
        super().__init__(node.name)
        self.node = node


def may_be_specialized(node: fx.Node) -> bool:
    """True if a guard may say what the sizes of a tensor are.

    w_up [s0, s1]       but not  torch._dynamo.mark_dynamic(w_up, 0), nor rows that the data count
    """
    fake = fake_of(node)
    return not free_unbacked_symbols(fake) and _symbols(fake).isdisjoint(_kept_dynamic(node.graph))


def specialize(node: fx.Node) -> None:
    """Guard the sizes of a tensor."""
    for size in fake_of(node).shape:
        guard_int(size)


def _symbols(fake: torch.Tensor) -> set:
    sizes: list = [size for size in fake.shape if isinstance(size, torch.SymInt)]
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


def _kept_dynamic(graph: fx.Graph) -> set:
    """The symbols of axes that the user wants to be any."""
    kept: set = set()
    for node in graph.find_nodes(op="placeholder"):
        for dim in marked_dynamic(node):
            size: int | torch.SymInt = fake_of(node).shape[dim]
            kept |= size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
    return kept
