"""Elements of a match's operands in index notation: of tokens, of slots, of experts, and of weights as views."""

import math

from torch import fx

from moeblaze_ops.lowering.evaluate.depth import MAX_PROJECTIONS
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import Size, same_size
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView


class Elements:
    """Elements of operands where a layer ends, at a token that ``tokens`` index among tokens of ``sizes``."""

    def __init__(self, view: GraphView, evaluator: Evaluator, root: fx.Node, tokens: Indices, sizes: tuple[Size, ...]):
        self.evaluator, self.algebra = evaluator, evaluator.algebra
        self._view, self._position = view, view.position[root]
        self.num_tokens: Size = math.prod(sizes)
        (self.token,) = evaluator.reshape_indices(sizes, (self.num_tokens,), tokens)

    def of_token(self, operand: Operand, column: Expr, width: Size, slot: tuple[int, Expr] | None = None, depth: int = 0) -> Expr:
        """The element of ``[T, width]``, or of ``[T, K, width]`` at one of K slots; any of both may be turned.

        With ``rest``, of the tensor that its index of the second axis has.
        """
        axes = [(self.num_tokens, self.token), *([slot] if slot else []), (width, column)]
        if operand.rest:
            _, own = axes.pop(1)
            operand = (operand, *operand.rest)[own.args[0]]
        elif operand.turned:
            axes[:2] = axes[1::-1]
        if operand.spread is not None:
            at = self.evaluator.reshape_indices((self.num_tokens,), operand.spread[1], (self.token,))
            axes[:1] = [(n, i if n != 1 else self.algebra.zero) for n, i in zip(operand.spread[0], at, strict=True)]
        if width == 1:
            axes.remove((width, column))
        if operand.order is not None:
            shape, at = zip(*axes, strict=True)
            order, rows = self._value(operand.order), math.prod(shape)
            assert order.is_permutation, order
            axes = [(rows, self.algebra.inverse(order, *self.evaluator.reshape_indices(shape, (rows,), at)))]
        return self._read(operand, axes, depth)

    def of_input(self, operand: Operand, feature: Expr) -> Expr:
        """The element of the layer's input, which is not looked into further than an expert's input is."""
        return self.of_token(operand, feature, feature.args[1], depth=MAX_PROJECTIONS)

    def of_place(self, operand: Operand, expert: Expr, place: Expr, sizes: tuple[int, int, Size]) -> Expr:
        """The element of ``[B, E, C]``, turned ``[B, C, E]``, or ``[B, C]`` of each, in the sequence of the token."""
        B, E, C = sizes
        axes = [(B, self.algebra.div(self.token, self.num_tokens // B)), (C, place)]
        if not operand.rest:
            axes.insert(2 if operand.turned else 1, (E, expert))
        slot = (operand, *operand.rest)[expert.args[0] if operand.rest else 0]
        return self._read(slot, axes)

    def of_expert(self, operand: Operand, expert: Expr, count: int) -> Expr:
        """The element of ``[E]``, of one element for all experts, or of one tensor each."""
        if operand.rest:
            operand, expert, count = (operand, *operand.rest)[expert.args[0]], self.algebra.zero, 1
        if same_size(math.prod(self._value(operand.node).shape), 1):
            expert, count = self.algebra.zero, 1
        return self._read(operand, [(count, expert)])

    def of_vector(self, operand: Operand, feature: Expr) -> Expr:
        """The element of ``[D]``."""
        return self._read(operand, [(feature.args[1], feature)])

    def of_weight(self, view: WeightView, expert: Expr, *logical: Expr) -> Expr:
        """The element of a view ``[E, ...]`` of stored weights."""
        number = expert.args[0] if view.apart else 0
        value, parts, expert = view.values[number], view.parts[number], self.algebra.zero if view.apart else expert
        stored = [self.algebra.zero] * len(view.order)
        for index, axis in zip((expert, *logical), view.order, strict=True):
            stored[axis] = index
        sizes, indices = view.sizes, tuple(stored)
        for part in reversed(parts):
            taken = (*part.sizes[:-1], part.length)
            *outer, last = self.evaluator.reshape_indices(sizes, taken, indices)
            sizes, indices = part.sizes, (*outer, self.algebra.linear(part.start, [(1, last)]))
        stored_at = self.evaluator.reshape_indices(sizes, value.shape, indices)
        return self.evaluator.element(value, self.evaluator.with_only_feature(value.shape, stored_at, logical), 1)

    def _value(self, node: fx.Node) -> Value:
        return self._view.value_at(node, self._position)

    def _read(self, operand: Operand, axes: list[tuple[Size, Expr]], depth: int = 0) -> Expr:
        value, (shape, at) = self._value(operand.node), zip(*axes, strict=True)
        e = self.evaluator.element(value, self.evaluator.reshape_indices(shape, value.shape, at), depth)
        e = self.algebra.detached(e) if operand.detached else e
        return e if operand.factor == 1 else self.algebra.mul(self.algebra.const(operand.factor), e)
