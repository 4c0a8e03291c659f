"""What Python asks of tensors that a branch on data leaves as one of two objects, or with one of two histories of gradients.

    if rows.numel() > 0:
        out = out + part            the graph has one tensor afterwards, the program either of two
    out is start, {out: 1}          refused: which of them it is, only the data tell
    out.requires_grad               refused: so it is whether a gradient flows through it
    out.shape, out.dtype            the same either way, or the branch is not proven
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker

from moeblaze_ops.lowering.graph.fake_values import storage_of
from moeblaze_ops.lowering.graph.functional_view import written_nodes
from moeblaze_ops.lowering.obligations.markers import branch_begins, branch_ends
from moeblaze_ops.lowering.tracing.hit_loops import Declined

_OF_HISTORY = frozenset((
    "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "output_nr", "_version", "_base", "_is_view", "is_set_to",
    "storage_offset", "data_ptr", "untyped_storage", "storage",
))  # fmt: skip
"""What a tensor has by how it was made, and not by what it holds."""

_OF_IDENTITY = (operator.is_, operator.is_not, id, hash)


class MergedTensors:
    """The tensors that are others without the work of a branch, in one attempt at a frame."""

    def __init__(self) -> None:
        self._nodes: set[fx.Node] = set()

    def add(self, variables: Iterable[VariableTracker]) -> None:
        """Take tensors for what the work of a branch made, where the program has other objects without it."""
        self._nodes.update(variable.as_proxy().node for variable in variables if isinstance(variable, TensorVariable))

    def refuse(self, function: Any, args: list[VariableTracker]) -> None:
        """Give the attempt up where a function asks which object one of them is, or how it came to be."""
        if any(function is asking for asking in _OF_ATTRIBUTES) and len(args) > 1 and isinstance(args[1], ConstantVariable):
            _OF_ATTRIBUTES[function](self, args[0], args[1].value)
        if not self._nodes or not any(function is asking for asking in _OF_IDENTITY):
            return
        nodes = {arg.as_proxy().node for arg in args if isinstance(arg, TensorVariable)}
        if len(nodes) == len(args) and not nodes.isdisjoint(self._nodes):
            raise Declined("a program asks which tensor one is, which depends on whether a branch was taken")

    def refuse_history(self, variable: VariableTracker, name: str) -> None:
        """Give the attempt up where it is asked how a tensor came to be that depends on the work of a branch."""
        if not isinstance(variable, TensorVariable):
            return
        if (name in _OF_HISTORY and _depends_on_work(variable)) or self._has_own(variable, name):
            raise Declined(f"`{name}` is asked of a tensor, which depends on whether a branch was taken")

    def refuse_own(self, variable: VariableTracker, name: str) -> None:
        """Give the attempt up where one of them is given an attribute of the program's."""
        if isinstance(variable, TensorVariable) and self._has_own(variable, name):
            raise Declined(f"`{name}` is set on a tensor, which depends on whether a branch was taken")

    def _has_own(self, variable: TensorVariable, name: str) -> bool:
        return variable.as_proxy().node in self._nodes and not hasattr(torch.Tensor, name)


_OF_ATTRIBUTES = {
    getattr: MergedTensors.refuse_history,
    hasattr: MergedTensors.refuse_history,
    setattr: MergedTensors.refuse_own,
}


def _depends_on_work(variable: TensorVariable) -> bool:
    proxy = variable.as_proxy()
    around = getattr(proxy.tracer, "parent", None)
    while around is not None:  # the body of an operator: what it is given is not looked up
        if _done(around.graph):
            return True
        around = around.parent
    graph = proxy.node.graph
    done = _done(graph)
    return bool(done) and proxy.node in _made_by(graph, done)


def _done(graph: fx.Graph) -> set[fx.Node]:
    """Where the branches of a graph begin that have ended."""
    return {node for node in graph.nodes if node.target is branch_begins and node.users}


def _made_by(graph: fx.Graph, branches: set[fx.Node]) -> set[fx.Node]:
    """The tensors that branches make or write to, on either side, and what is made of them."""
    starts = {begin if begin.args[2] is None else begin.args[2] for begin in branches}
    made: set[fx.Node] = set()
    memory: set[int] = set()
    depth = 0
    for node in graph.nodes:
        depth += (node in starts) - (node.target is branch_ends)
        if depth or any(read in made or storage_of(read) in memory for read in node.all_input_nodes):
            made.add(node)
            memory.update(place for place in map(storage_of, written_nodes(node)) if place is not None)
    return made | {node for node in graph.nodes if storage_of(node) in memory}
