"""The nodes that a rewrite adds: what the ops take of the nodes of a graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.weight_layout import Part, WeightView
from moeblaze_ops.lowering.undoable_edits import Edits, NodeInserter


class Inserter(NodeInserter):
    """Adds what the ops take: views of stored weights, and operands as they are read; of those in ``copied`` it reads copies."""

    def __init__(self, edits: Edits, after: fx.Node, copied: frozenset[fx.Node] = frozenset()):
        super().__init__(edits, after)
        self._copied, self._block = copied, _inference_block(after)

    def view(self, node: fx.Node, method: str, *args: Any) -> fx.Node:
        """A view of ``node``, never a copy: it may be made early.

        In a block of inference mode AOTAutograd traces views of what was made there alone, so that others are made before it.
        """
        made_before = self._block is not None and node < self._block
        return (self.at(self._block.prev) if made_before else self).call(method, node, *args)

    def at(self, *nodes: fx.Node) -> "Inserter":
        """One that adds after the last of other, earlier nodes, or after what is read in place of it."""
        return Inserter(self.edits, max(map(self.edits.successor, nodes)), self._copied)

    @contextmanager
    def without_autocast(self, device: str) -> Iterator[None]:
        """What is added inside computes in the dtypes of its operands."""
        settings = (device, torch.get_autocast_dtype(device), False, torch.is_autocast_cache_enabled())
        mode = self._add(torch.amp.autocast_mode._enter_autocast, settings, {})
        with torch.autocast(device, enabled=False):
            yield
        self._add(torch.amp.autocast_mode._exit_autocast, (mode,), {})

    def in_dtype(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """What ``node`` holds, cast if it is of another dtype."""
        return node if fake_of(node).dtype == dtype else self.call("to", node, dtype)

    def times(self, node: fx.Node, factor: float) -> fx.Node:
        return node if factor == 1 else self.call(torch.mul, node, factor)

    def weights(self, views: Sequence[WeightView]) -> list[fx.Node]:
        """The tensors that the ops take, by views of the stored ones: experts that are stored apart stay apart.

        Where they are cast they are stacked before: it takes one cast instead of E.
        """
        if all(view.apart and not view.cast for view in views):
            return [self.viewed(node, view, parts) for view in views for node, parts in zip(view.nodes, view.parts, strict=True)]
        return [self.whole(view) for view in views]

    def whole(self, view: WeightView) -> fx.Node:
        """One tensor of all experts, stacked where they are stored apart, in the dtype in which it is used."""
        stored, parts = view.nodes[0], view.parts[0]
        if view.apart:
            stored, parts = self.call(torch.stack, [self._part(*own) for own in zip(view.nodes, view.parts, strict=True)]), ()
            view = replace(view, sizes=(len(view.nodes), *view.sizes[1:]))
        node = self.viewed(stored, view, parts)
        return self.call("to", node, view.dtype) if view.cast else node

    def viewed(self, node: fx.Node, view: WeightView, parts: tuple[Part, ...]) -> fx.Node:
        """The ``parts`` of a stored tensor that a view takes, as the view shapes them."""
        node = self._reshaped(self._part(node, parts), view.sizes)
        return node if view.order == tuple(range(len(view.order))) else self.view(node, "permute", view.order)

    def _part(self, node: fx.Node, parts: tuple[Part, ...]) -> fx.Node:
        for part in parts:
            node = self.view(self._reshaped(node, part.sizes), "narrow", len(part.sizes) - 1, part.start, part.length)
        return node

    def _reshaped(self, node: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
        return node if tuple(fake_of(node).shape) == sizes else self.view(node, "reshape", sizes)

    def rows(self, operand: Operand, width: int, top_k: int = 1) -> fx.Node:
        """An operand as ``[T, width]`` in the dtype it is used in; of slots, as ``[T, top_k, width]``."""
        if operand.rest:
            slots = (replace(operand, rest=(), of_slots=False), *(replace(slot, dtype=operand.dtype) for slot in operand.rest))
            join, width = (torch.stack, width) if operand.of_slots else (torch.cat, 1)
            return self.call(join, [self.rows(slot, width) for slot in slots], 1)
        node, fake = self._read(operand), fake_of(operand.node)
        if operand.order is not None:
            order = self.call("clone", operand.order) if operand.order in self._copied else operand.order
            node = self.call("scatter", self.call(torch.zeros_like, node), 0, order, node)
        if operand.spread is not None:
            held, sizes = operand.spread
            node = self.call("expand", self.call("reshape", node, (*held, width)), (*sizes, width))
            node = self.call("reshape", node, (-1, width))
        elif operand.of_slots:
            node = self.call("reshape", node, (top_k, -1, width) if operand.turned else (-1, top_k, width))
            node = self.call("transpose", node, 0, 1) if operand.turned else node
        elif operand.turned:
            node = self.view(node, "t")
        elif fake.dim() != 2 or fake.shape[1] != width:
            node = self.call("reshape", node, (-1, width))
        return self.times(self.in_dtype(node, operand.dtype), operand.factor)

    def places(self, operand: Operand) -> fx.Node:
        """An operand ``[C]`` of every expert, or one of all, as ``[C, E]`` in the dtype it is used in; or those of sequences."""
        if operand.rest:
            node = self.call(torch.stack, [self._read(part) for part in (operand, *operand.rest)], -1)
        else:
            node = self._read(operand) if operand.turned else self.view(self._read(operand), "transpose", -2, -1)
        return self.in_dtype(node, operand.dtype)

    def numbers(self, operand: Operand) -> fx.Node:
        """An operand without tokens as one axis, in the dtype it is used in."""
        stored = (operand, *operand.rest)
        flat = [self.call("reshape", self._read(part), (-1,)) for part in stored]
        return self.in_dtype(self.call(torch.cat, flat) if operand.rest else flat[0], operand.dtype)

    def _read(self, operand: Operand) -> fx.Node:
        """What holds an operand as it is here. Inductor drops the copies: what AOTAutograd traces has no writes."""
        node = self.call("clone", operand.node) if operand.node in self._copied else operand.node
        return self.call("detach", node) if operand.detached else node


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
