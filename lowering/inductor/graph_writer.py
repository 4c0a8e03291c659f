"""Calls that are added to a graph of forward and backward, before it is parted."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moeblaze_ops.lowering.graph.sizes import same_shape, size_of

CAST = torch.ops.prims.convert_element_type.default
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
"""Another shape of the same elements in their order."""
_OF_PASS = ("partitioner_tag", "seq_nr")
"""What autograd noted of a node: the part that it is for, and what it differentiates."""


class Writer:
    """Writes calls before a node, for the pass that the node is for, or ``like`` if it is given."""

    def __init__(self, before: fx.Node, like: fx.Node | None = None):
        self._before, self._like = before, like or before

    def __call__(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args, kwargs)
        node.meta.update({name: self._like.meta[name] for name in _OF_PASS if name in self._like.meta})
        args, kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        node.meta["val"] = target(*args, **kwargs)
        return node

    def op(self, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
        """A call of one of our ops, with the strides that it asks Inductor for."""
        node = self(target, *args)
        node.meta["eager_input_vals"] = fx.map_arg(args, lambda argument: argument.meta["val"]), {}
        return node

    def instead(self, result: fx.Node) -> None:
        """Let ``result`` take the place of the node before which it was written."""
        self._before.replace_all_uses_with(result)
        self._before.graph.erase_node(self._before)

    def product(self, one: int | fx.Node, other: int | fx.Node) -> int | fx.Node:
        """The product of two sizes, each a number or a node that gives one."""
        return one * other if isinstance(one, int) and isinstance(other, int) else self(operator.mul, one, other)


def is_like(node: fx.Node, other: fx.Node) -> bool:
    """True if two tensors are of one shape, without a guard: it is too late for one."""
    shapes = (node.meta["val"].shape, other.meta["val"].shape)
    return same_shape(*([*map(size_of, shape)] for shape in shapes))
