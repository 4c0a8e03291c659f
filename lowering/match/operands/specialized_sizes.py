"""Sizes of weights, and K, that Dynamo takes for any, made numbers again: a layer has the widths that it has.

    def layer(x, w_up, w_down, top_k): ...     called with others of them in one process: symbols from the second ones on

Each becomes a guard, so that others are compiled for themselves. The number of tokens stays a symbol.
"""

from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_int

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.torch_internals.frames import marked_dynamic


class SymbolicSizes(Exception):
    """A layer has all that it needs but numbers for ``sizes``."""

    def __init__(self, sizes: Iterable[int | torch.SymInt]):
        super().__init__()
        self.sizes = tuple(sizes)


def may_be_specialized(sizes: Iterable[int | torch.SymInt], graph: fx.Graph) -> bool:
    """True if a guard may say what sizes are.

    those of w_up [s0, s1]       but not  torch._dynamo.mark_dynamic(w_up, 0), nor rows that the data count
    """
    return not free_unbacked_symbols(sizes) and _symbols(sizes).isdisjoint(_kept_dynamic(graph))


def specialize(sizes: Iterable[int | torch.SymInt]) -> None:
    """Guard what sizes are made of: a guard on ``s0 // 2`` alone would leave it a symbol."""
    for size in (size for size in sizes if isinstance(size, torch.SymInt)):
        for symbol in size.node.expr.free_symbols:
            guard_int(size.node.shape_env.create_symintnode(symbol, hint=None))


def _symbols(sizes: Iterable[int | torch.SymInt]) -> set:
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def _kept_dynamic(graph: fx.Graph) -> set:
    """The symbols of axes that the user wants to be any."""
    kept: set = set()
    for node in graph.find_nodes(op="placeholder"):
        for dim in marked_dynamic(node):
            size: int | torch.SymInt = fake_of(node).shape[dim]
            kept |= size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
    return kept
