"""Elements of a match's operands in index notation: of tokens, of slots, of experts, and of weights as views."""

import math
from dataclasses import replace

from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import MAX_PROJECTIONS, Evaluator
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

    def of_token(self, operand: Operand, column: Expr, width: Size, token: Expr | None = None, depth: int = 0) -> Expr:
        """The element of ``[T, width]``; with ``rest``, of the tensor ``[T]`` that the column has."""
        token = self.token if token is None else token
        if operand.rest:
            slot = (operand, *operand.rest)[column.args[0]]
            return self._times(slot, self._at(self._value(slot.node), (self.num_tokens,), (token,), depth))
        value = self._value(operand.node)
        if width == 1:
            return self._times(operand, self._at(value, (self.num_tokens,), (token,), depth))
        shape, at = ((width, self.num_tokens), (column, token)) if operand.turned else ((self.num_tokens, width), (token, column))
        return self._times(operand, self._at(value, shape, at, depth))

    def of_slot(self, operand: Operand, k: Expr, expert: Expr, sizes: tuple[int, int]) -> Expr:
        """The element of ``[T, K, E]``, turned ``[K, T, E]``, or of the tensor ``[T, E]`` that the slot has."""
        if operand.rest:
            return self.of_token(replace((operand, *operand.rest)[k.args[0]], rest=()), expert, sizes[1])
        shape, at = (self.num_tokens, *sizes), (self.token, k, expert)
        if operand.turned:
            shape, at = (shape[1], shape[0], shape[2]), (k, self.token, expert)
        return self._at(self._value(operand.node), shape, at, 0)

    def of_input(self, operand: Operand, feature: Expr, token: Expr | None = None) -> Expr:
        """The element of the layer's input, which is not looked into further than an expert's input is."""
        return self.of_token(operand, feature, feature.args[1], token, MAX_PROJECTIONS)

    def of_place(self, operand: Operand, expert: Expr, place: Expr, sizes: tuple[Size, Size]) -> Expr:
        """The element of ``[E, C]``, turned ``[C, E]``, or ``[C]`` of each."""
        if operand.rest:
            slot = (operand, *operand.rest)[expert.args[0]]
            return self._times(slot, self._at(self._value(slot.node), sizes[1:], (place,), 0))
        shape, at = (sizes[::-1], (place, expert)) if operand.turned else (sizes, (expert, place))
        return self._times(operand, self._at(self._value(operand.node), shape, at, 0))

    def of_expert(self, operand: Operand, expert: Expr, count: int) -> Expr:
        """The element of ``[E]``, of one element for all experts, or of one tensor each."""
        if operand.rest:
            operand, expert, count = (operand, *operand.rest)[expert.args[0]], self.algebra.zero, 1
        value = self._value(operand.node)
        if same_size(math.prod(value.shape), 1):
            expert, count = self.algebra.zero, 1
        return self._times(operand, self._at(value, (count,), (expert,), 0))

    def of_vector(self, operand: Operand, feature: Expr) -> Expr:
        """The element of ``[D]``."""
        return self._times(operand, self._at(self._value(operand.node), (feature.args[1],), (feature,), 0))

    def of_weight(self, view: WeightView, expert: Expr, *logical: Expr) -> Expr:
        """The element of a view ``[E, ...]`` of stored weights."""
        value = view.values[0]
        if view.apart:
            value, expert = view.values[expert.args[0]], self.algebra.zero
        stored = [self.algebra.zero] * len(view.order)
        for index, axis in zip((expert, *logical), view.order, strict=True):
            stored[axis] = index
        sizes, indices = view.sizes, tuple(stored)
        for part in reversed(view.parts):
            taken = (*part.sizes[:-1], part.length)
            *outer, last = self.evaluator.reshape_indices(sizes, taken, indices)
            sizes, indices = part.sizes, (*outer, self.algebra.linear(part.start, [(1, last)]))
        stored_at = self.evaluator.reshape_indices(sizes, value.shape, indices)
        return self.evaluator.element(value, self.evaluator.with_only_feature(value.shape, stored_at, logical), 1)

    def _value(self, node: fx.Node) -> Value:
        return self._view.value_at(node, self._position)

    def _at(self, value: Value, shape: tuple[Size, ...], indices: Indices, depth: int) -> Expr:
        return self.evaluator.element(value, self.evaluator.reshape_indices(shape, value.shape, indices), depth)

    def _times(self, operand: Operand, e: Expr) -> Expr:
        e = self.algebra.detached(e) if operand.detached else e
        return e if operand.factor == 1 else self.algebra.mul(self.algebra.const(operand.factor), e)
