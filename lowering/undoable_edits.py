"""Changes of a graph that can be undone, and nodes added to it with the fake values that they give."""

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from moeblaze_ops.lowering.graph.fake_values import fake_mode_of, fake_result
from moeblaze_ops.lowering.torch_internals.graphs import saved_tensors_hooks_are_disabled


class Edits:
    """Nodes inserted and readers redirected, in a way that ``undo`` takes back.

    The nodes themselves stay: a copy of the graph would lose the attributes that Dynamo sets on its nodes.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._successors: dict[fx.Node, fx.Node | Callable[[], fx.Node]] = {}
        self._undo: list[Callable[[], None]] = []

    def insert(self, after: fx.Node, target: Callable | str, args: tuple, kwargs: dict) -> fx.Node:
        args = fx.node.map_arg(args, self.successor)
        with self.graph.inserting_after(after):
            node = self.graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
        self._undo.append(lambda: self.graph.erase_node(node))
        return node

    def redirect(self, readers: Iterable[fx.Node], old: fx.Node, new: fx.Node) -> None:
        """Let ``readers`` of what holds ``old``, and whatever is inserted later, read ``new``."""
        held = self.holder(old)
        self.succeed(old, new)
        self.replace(readers, held, new)

    def replace(self, readers: Iterable[fx.Node], old: fx.Node, new: fx.Node) -> None:
        """Let ``readers`` read ``new`` in place of ``old``."""
        for reader in readers:
            self._undo.append(partial(_restore, reader, reader.args, reader.kwargs))
            reader.replace_input_with(old, new)

    def call_with(self, node: fx.Node, args: tuple) -> None:
        """Let ``node`` have other arguments."""
        self._undo.append(partial(_restore, node, node.args, node.kwargs))
        node.args = args

    def succeed(self, old: fx.Node, new: fx.Node | Callable[[], fx.Node]) -> None:
        """Let whatever is inserted later read ``new``, or what it adds, in place of ``old``; nothing is added for nobody."""
        self._undo.append(partial(self._successors.__setitem__, old, self._successors.get(old, old)))
        self._successors[old] = new

    def holder(self, node: fx.Node) -> fx.Node:
        """What readers of ``node`` read by now: of a buffer that several layers are added to, the result of the one before."""
        successor = self._successors.get(node, node)
        return successor if isinstance(successor, fx.Node) else node

    def successor(self, node: fx.Node) -> fx.Node:
        """What is read in place of ``node`` by now."""
        successor = self._successors.get(node, node)
        if isinstance(successor, fx.Node):
            return successor
        made = successor()
        self.succeed(node, made)
        return made

    def mark(self) -> int:
        """A point to go back to."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back everything since ``mark``."""
        while len(self._undo) > mark:
            self._undo.pop()()


def _restore(reader: fx.Node, args: tuple, kwargs: dict) -> None:
    reader.args, reader.kwargs = args, kwargs


class NodeInserter:
    """Adds nodes after one node, each behind the one before, with the fake value that it gives."""

    def __init__(self, edits: Edits, after: fx.Node):
        self.edits, self._after, self._meta = edits, after, after.meta
        self.nodes: list[fx.Node] = []
        self._mode = fake_mode_of(edits.graph)

    def call(self, target: Callable | str, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._add(target, args, kwargs)
        with _nothing_saved_for_the_caller():
            node.meta["example_value"] = fake_result(self._mode, target, args, kwargs)
        return node

    def of_data(self, target: Callable, *args: Any) -> fx.Node:
        """A call that gives a size which only the data tell; autograd's trace of the graph makes a symbol of its own for it."""
        with self._mode.shape_env.ignore_fresh_unbacked_symbols():
            return self.call(target, *args)

    def given(self, value: Any, target: Callable, *args: Any) -> fx.Node:
        """A call of what cannot run on fakes here, with the fake value that it gives."""
        node = self._add(target, args, {})
        node.meta["example_value"] = value
        return node

    def items(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def _add(self, target: Callable | str, args: tuple, kwargs: dict) -> fx.Node:
        node = self.edits.insert(self._after, target, args, kwargs)
        self.nodes.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self._meta:
                node.meta[key] = self._meta[key]
        self._after = node
        return node


def _nothing_saved_for_the_caller() -> AbstractContextManager:
    """A context in which what autograd saves of fakes does not reach the hooks of who called the compiled function.

    ``torch.utils.checkpoint`` around it counts what is saved, and would find less when it runs the function again. There are
    none where they are disabled.
    """
    if saved_tensors_hooks_are_disabled():
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
