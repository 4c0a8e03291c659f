"""Changes of a graph that can be undone, and the nodes that a rewrite adds."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from moeblaze_ops.lowering.graph.fake_values import fake_mode_of, fake_of, fake_result
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView
from moeblaze_ops.lowering.torch_internals import saved_tensors_hooks_are_disabled


class Edits:
    """Nodes inserted and readers redirected, in a way that ``undo`` takes back.

    The nodes themselves stay: a copy of the graph would lose the attributes that Dynamo sets on its nodes.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._successors: dict[fx.Node, fx.Node | Callable[[], fx.Node]] = {}
        self._undo: list[Callable[[], None]] = []

    def insert(self, after: fx.Node, target: Callable | str, args: tuple, kwargs: dict) -> fx.Node:
        args = fx.node.map_arg(args, self._successor)
        with self.graph.inserting_after(after):
            create = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            node = create(target, args, kwargs)
        self._undo.append(lambda: self.graph.erase_node(node))
        return node

    def redirect(self, reader: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Let ``reader``, and whatever is inserted later, read ``new``."""
        self._successors[old] = new
        args, kwargs = reader.args, reader.kwargs

        def restore() -> None:
            reader.args, reader.kwargs = args, kwargs
            self._successors.pop(old, None)

        self._undo.append(restore)
        reader.replace_input_with(old, new)

    def succeed(self, old: fx.Node, make: Callable[[], fx.Node]) -> None:
        """Let whatever is inserted later read what ``make`` adds in place of ``old``; nothing is added for nobody."""
        self._successors[old] = make
        self._undo.append(lambda: self._successors.pop(old))

    def _successor(self, node: fx.Node) -> fx.Node:
        successor = self._successors.get(node, node)
        if isinstance(successor, fx.Node):
            return successor
        made = self._successors[node] = successor()

        def restore() -> None:
            self._successors[node] = successor

        self._undo.append(restore)
        return made

    def mark(self) -> int:
        """A point to go back to."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back everything since ``mark``."""
        while len(self._undo) > mark:
            self._undo.pop()()


class Inserter:
    """Adds nodes after one node, each with the fake value that it gives; of the operands in ``copied`` it reads copies."""

    def __init__(self, edits: Edits, after: fx.Node, copied: frozenset[fx.Node] = frozenset()):
        self._edits, self._after, self._meta, self._copied = edits, after, after.meta, copied
        self.nodes: list[fx.Node] = []
        self._mode = fake_mode_of(edits.graph)
        self._block = _inference_block(after)

    def call(self, target: Callable | str, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._add(target, args, kwargs)
        with _nothing_saved_for_the_caller():
            node.meta["example_value"] = fake_result(self._mode, target, args, kwargs)
        return node

    def view(self, node: fx.Node, method: str, *args: Any) -> fx.Node:
        """A view of ``node``, never a copy: it may be made early.

        In a block of inference mode AOTAutograd traces views of what was made there alone, so that others are made before it.
        """
        made_before = self._block is not None and node < self._block
        return (self.at(self._block.prev) if made_before else self).call(method, node, *args)

    def of_data(self, target: Callable, *args: Any) -> fx.Node:
        """A call that gives a size which only the data tell; autograd's trace of the graph makes a symbol of its own for it."""
        with self._mode.shape_env.ignore_fresh_unbacked_symbols():
            return self.call(target, *args)

    def given(self, value: Any, target: Callable, *args: Any) -> fx.Node:
        """A call of what cannot run on fakes here, with the fake value that it gives."""
        node = self._add(target, args, {})
        node.meta["example_value"] = value
        return node

    def at(self, node: fx.Node) -> "Inserter":
        """One that adds after another node, an earlier one."""
        return Inserter(self._edits, node, self._copied)

    def redirect(self, reader: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """As ``Edits.redirect``."""
        self._edits.redirect(reader, old, new)

    def _add(self, target: Callable | str, args: tuple, kwargs: dict) -> fx.Node:
        node = self._edits.insert(self._after, target, args, kwargs)
        self.nodes.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self._meta:
                node.meta[key] = self._meta[key]
        self._after = node
        return node

    @contextmanager
    def without_autocast(self, device: str) -> Iterator[None]:
        """What is added inside computes in the dtypes of its operands."""
        settings = (device, torch.get_autocast_dtype(device), False, torch.is_autocast_cache_enabled())
        mode = self._add(torch.amp.autocast_mode._enter_autocast, settings, {})
        with torch.autocast(device, enabled=False):
            yield
        self._add(torch.amp.autocast_mode._exit_autocast, (mode,), {})

    def items(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def weights(self, views: Sequence[WeightView]) -> list[fx.Node]:
        """The tensors that the ops take, by views of the stored ones: experts that are stored apart stay apart.

        Where they are cast they are stacked before: it takes one cast instead of E.
        """
        if all(view.apart and not view.cast for view in views):
            return [self.viewed(node, view) for view in views for node in view.nodes]
        return [self.whole(view) for view in views]

    def whole(self, view: WeightView) -> fx.Node:
        """One tensor of all experts, stacked where they are stored apart, in the dtype in which it is used."""
        stored = view.nodes[0]
        if view.apart:
            stored = self.call(torch.stack, [self._part(node, view) for node in view.nodes])
            view = replace(view, parts=(), sizes=(len(view.nodes), *view.sizes[1:]))
        node = self.viewed(stored, view)
        return self.call("to", node, view.dtype) if view.cast else node

    def viewed(self, node: fx.Node, view: WeightView) -> fx.Node:
        """The part of a stored tensor that a view takes, as the view shapes it."""
        node = self._reshaped(self._part(node, view), view.sizes)
        return node if view.order == tuple(range(len(view.order))) else self.view(node, "permute", view.order)

    def _part(self, node: fx.Node, view: WeightView) -> fx.Node:
        for part in view.parts:
            node = self.view(self._reshaped(node, part.sizes), "narrow", len(part.sizes) - 1, part.start, part.length)
        return node

    def _reshaped(self, node: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
        return node if tuple(fake_of(node).shape) == sizes else self.view(node, "reshape", sizes)

    def rows(self, operand: Operand, width: int) -> fx.Node:
        """An operand as ``[T, width]`` in the dtype it is used in."""
        if operand.rest:
            slots = (replace(operand, rest=()), *(replace(slot, dtype=operand.dtype) for slot in operand.rest))
            return self.call(torch.cat, [self.rows(slot, 1) for slot in slots], 1)
        node, fake = self._read(operand.node), fake_of(operand.node)
        if operand.turned:
            node = self.view(node, "t")
        elif fake.dim() != 2 or fake.shape[1] != width:
            node = self.call("reshape", node, (-1, width))
        if fake.dtype != operand.dtype:
            node = self.call("to", node, operand.dtype)
        return node if operand.factor == 1 else self.call(torch.mul, node, operand.factor)

    def places(self, operand: Operand) -> fx.Node:
        """An operand ``[C]`` of every expert, or one of all, as ``[C, E]`` in the dtype it is used in."""
        if operand.rest:
            node = self.call(torch.stack, list(operand.nodes), 1)
        else:
            node = self._read(operand.node) if operand.turned else self.view(self._read(operand.node), "t")
        return node if fake_of(node).dtype == operand.dtype else self.call("to", node, operand.dtype)

    def numbers(self, operand: Operand) -> fx.Node:
        """An operand without tokens as one axis, in the dtype it is used in."""
        stored = (operand, *operand.rest)
        flat = [self.call("reshape", self._read(part.node), (-1,)) for part in stored]
        node = self.call(torch.cat, flat) if operand.rest else flat[0]
        return node if fake_of(node).dtype == operand.dtype else self.call("to", node, operand.dtype)

    def _read(self, node: fx.Node) -> fx.Node:
        """An operand as it is here. Inductor drops the copies: what AOTAutograd traces has no writes."""
        return self.call("clone", node) if node in self._copied else node


def _inference_block(node: fx.Node) -> fx.Node | None:
    """Where the outermost block of inference mode begins in which a node stands."""
    entered: list[fx.Node] = []
    for before in node.graph.nodes:
        if before.target is torch.autograd.grad_mode._enter_inference_mode:
            entered.append(before)
        elif before.target is torch.autograd.grad_mode._exit_inference_mode:
            entered.remove(before.args[0])
        if before is node:
            break
    return next((enter for enter in entered if enter.args[0]), None)


def _nothing_saved_for_the_caller() -> AbstractContextManager:
    """A context in which what autograd saves of fakes does not reach the hooks of who called the compiled function.

    ``torch.utils.checkpoint`` around it counts what is saved, and would find less when it runs the function again. There are
    none where they are disabled.
    """
    if saved_tensors_hooks_are_disabled():
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
