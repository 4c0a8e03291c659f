"""Calls that are added to a graph of forward and backward, before it is parted."""

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

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

    def product(self, one: int | fx.Node, other: int | fx.Node) -> int | fx.Node:
        """The product of two sizes, each a number or a node that gives one."""
        return one * other if isinstance(one, int) and isinstance(other, int) else self(operator.mul, one, other)
