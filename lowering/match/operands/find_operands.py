"""Which node of the graph holds a tensor that a proof describes by its elements."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee

import torch
from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.facts.zero_stops_gradient import is_rectified
from moeblaze_ops.lowering.graph.dependencies import dependencies
from moeblaze_ops.lowering.graph.fake_values import fake_of, has_storage
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size
from moeblaze_ops.lowering.graph.stored_numbers import holds_all
from moeblaze_ops.lowering.index_notation.expr import Expr


@dataclass(frozen=True)
class Operand:
    """A node that holds an operand of the ops, up to a reshape to ``[T, C]``, a cast to ``dtype`` and a constant factor.

    ``gathered``: it holds scores ``[T, E]``, and the operand is what the layer's ids choose from them; ``turned``: it holds
    them as ``[E, T]``. ``rest``: it holds the first slot of each token, and these the others.
    """

    node: fx.Node
    dtype: torch.dtype
    gathered: bool = False
    turned: bool = False
    factor: float = 1
    rest: tuple["Operand", ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node, *(slot.node for slot in self.rest))

    @property
    def is_rounded(self) -> bool:
        """Whether the cast to ``dtype`` changes numbers."""
        stored = fake_of(self.node).dtype
        rounds = stored.is_floating_point or not self.dtype.is_floating_point
        return rounds and not holds_all(self.dtype, stored)


class Finder:
    """Looks for operands among the nodes that one result depends on, the latest first."""

    def __init__(self, view: GraphView, evaluator: Evaluator, root: fx.Node, tokens: tuple[Expr, ...], sizes: tuple[Size, ...]):
        self._view, self._evaluator, self._tokens, self._sizes = view, evaluator, tokens, sizes
        self._position = view.position[root]
        self.num_tokens: Size = math.prod(sizes)
        (self.token,) = evaluator.reshape_indices(sizes, (self.num_tokens,), tokens)
        tensors = (node for node in dependencies(view, root) if isinstance(fake_of(node), torch.Tensor))  # no setitem
        self._walk: Iterator[fx.Node] = filter(has_storage, tensors)  # no slice under vmap
        self._found: dict[tuple, Operand | None] = {}

    @property
    def _nodes(self) -> Iterator[fx.Node]:
        """The nodes that the result depends on, of which most searches need few."""
        self._walk, nodes = tee(self._walk)
        return nodes

    def find(self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int = 0) -> Operand | None:
        """The node ``[..., width]`` whose element at (token, column) is the target, for every column."""
        key = (targets, columns, depth)
        if key not in self._found:
            self._found[key] = self._search(targets, columns, width, depth)
        return self._found[key]

    def find_turned(self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int) -> Operand | None:
        """The node ``[width, T]`` whose element at (column, token) is the target, for every column."""
        at = [(column, self.token) for column in columns]
        found = self._find_at(targets, at, (width, self.num_tokens), depth)
        return found and replace(found, turned=True)

    def find_places(
        self, targets: tuple[Expr, ...], experts: tuple[Expr, ...], place: Expr, sizes: tuple[Size, Size]
    ) -> Operand | None:
        """The node ``[E, C]``, or turned ``[C, E]``, whose element at (expert, place) is the target, for every expert."""
        found = self._find_at(targets, [(expert, place) for expert in experts], sizes)
        if found is None and (found := self._find_at(targets, [(place, expert) for expert in experts], sizes[::-1])):
            found = replace(found, turned=True)
        return found

    def find_vector(self, target: Expr, place: Expr, size: Size) -> Operand | None:
        """The node ``[C]`` whose element at a place is the target."""
        return self._find_at((target,), [(place,)], (size,))

    def _find_at(
        self, targets: tuple[Expr, ...], indices: Sequence[tuple[Expr, ...]], shape: tuple[Size, ...], depth: int = 0
    ) -> Operand | None:
        def search(targets: tuple[Expr, ...]) -> Operand | None:
            for value, node in self._of_shape(shape):
                try:
                    elements = [self._evaluator.element(value, at, depth) for at in indices]
                except Unroll:
                    continue
                if all(element is target for element, target in zip(elements, targets, strict=True)):
                    return Operand(node, value.dtype)
            return None

        return _or_what_is_cast(search, targets)

    def _of_shape(self, shape: tuple[Size, ...]) -> Iterable[tuple[Value, fx.Node]]:
        for node in self._nodes:
            value = self._view.value_at(node, self._position)
            if isinstance(value, Value) and same_shape(value.shape, shape):
                yield value, node

    def order_of(self, targets: Sequence[Expr]) -> list[int] | None:
        """The column of each target in the latest node ``[..., width]`` that has one for each, whatever their order."""
        columns = tuple(map(self._evaluator.algebra.const, range(len(targets))))
        for node in self._nodes:
            value = self._view.value_at(node, self._position)
            for token in self._token_indices(value.shape, len(targets)) if isinstance(value, Value) else ():
                if len(value.shape) == len(token) + 1:
                    order = self._order(value, [(*token, column) for column in columns], targets)
                    if order is not None:
                        return order
        return None

    def order_of_places(self, targets: Sequence[Expr], place: Expr, sizes: tuple[Size, Size]) -> list[int] | None:
        """The same for the rows of a node ``[E, C]``, or the columns of one ``[C, E]``."""
        experts = tuple(map(self._evaluator.algebra.const, range(len(targets))))
        for turned in (False, True):
            indices = [(place, expert) if turned else (expert, place) for expert in experts]
            for value, _ in self._of_shape(sizes[::-1] if turned else sizes):
                if (order := self._order(value, indices, targets)) is not None:
                    return order
        return None

    def _order(self, value: Value, indices: Sequence[tuple[Expr, ...]], targets: Sequence[Expr]) -> list[int] | None:
        try:
            elements = [self._evaluator.element(value, at) for at in indices]
        except Unroll:
            return None
        known = set(elements) == set(targets) and len(set(elements)) == len(targets)
        return [elements.index(target) for target in targets] if known else None

    def is_rectified(self, node: fx.Node) -> bool:
        """Whether a node holds what a ReLU gave, whose gradient is zero where it is zero; that of a clamp is one at its bound."""
        return is_rectified(self._view.value_at(node, self._position))

    def find_of_experts(self, targets: tuple[Expr, ...], experts: tuple[Expr, ...], count: int) -> Operand | None:
        """The node of ``count`` elements, whatever the token, of which each expert's is the target."""
        for node in self._nodes:
            value = self._view.value_at(node, self._position)
            if not isinstance(value, Value) or not same_size(math.prod(value.shape), count):
                continue
            at = (self._evaluator.reshape_indices((count,), value.shape, (expert,)) for expert in experts)
            try:
                elements = [self._evaluator.element(value, indices) for indices in at]
            except Unroll:
                continue
            if all(element is target for element, target in zip(elements, targets, strict=True)):
                return Operand(node, value.dtype)
        return None

    def find_ids(self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size) -> Operand | None:
        """The same for expert ids; a cast of them to floating point has the same elements."""
        found = self.find(targets, columns, width)
        if found is None or not found.dtype.is_floating_point:
            return found
        return self._search(targets, columns, width, 0, integers=True)

    def find_scaled(self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int = 0) -> Operand | None:
        """The same, or the node that gives all targets when it is multiplied by one number."""
        found = self.find(targets, columns, width, depth)
        if found is not None:
            return found
        numbers, rests = zip(*map(self._number_and_rest, targets), strict=True)
        if len(set(numbers)) != 1 or numbers[0] is None:
            return None
        for held in (None, *self._numbers_beside(rests[0], columns[0], width, depth)):
            multiples = rests if held is None else tuple(self._evaluator.algebra.mul(held, rest) for rest in rests)
            if (found := self.find(multiples, columns, width, depth)) is not None:
                return replace(found, factor=numbers[0] / (1 if held is None else held.args[0]))
        return None

    def _numbers_beside(self, rest: Expr, column: Expr, width: Size, depth: int) -> list[Expr]:
        """Numbers, each of which some node holds multiplied by ``rest``."""
        found: dict[Expr, None] = {}
        for node in self._nodes:
            value = self._view.value_at(node, self._position)
            for e in self._elements(value, column, width, depth) if isinstance(value, Value) else ():
                number, other = self._number_and_rest(e)
                if number and other is rest:
                    found[self._evaluator.algebra.const(number)] = None
        return list(found)

    def _search(
        self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int, integers: bool = False
    ) -> Operand | None:
        def search(targets: tuple[Expr, ...]) -> Operand | None:
            for node in filter(_is_of_integers, self._nodes) if integers else self._nodes:
                value = self._view.value_at(node, self._position)
                if isinstance(value, Value) and self._holds(value, targets, columns, width, depth):
                    return Operand(node, value.dtype)
            return None

        return _or_what_is_cast(search, targets)

    def _holds(self, value: Value, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int) -> bool:
        for token in self._token_indices(value.shape, width):
            rank = len(token)
            try:
                if all(
                    self._evaluator.element(value, (*token, column)[: len(value.shape)], depth) is target
                    for target, column in zip(targets, columns, strict=True)
                ) and len(value.shape) in (rank, rank + 1):
                    return True
            except Unroll:
                continue
        return False

    def _number_and_rest(self, e: Expr) -> tuple[float | None, Expr | None]:
        """The number in a product, None where there is none, and the product without it."""
        numbers = [f.args[0] for f in e.args if f.kind == "const"] if e.kind == "mul" else []
        return (numbers[0], self._evaluator.algebra.mul(*(f for f in e.args if f.kind != "const"))) if numbers else (None, None)

    def _elements(self, value: Value, column: Expr, width: Size, depth: int) -> Iterable[Expr]:
        for token in self._token_indices(value.shape, width):
            if len(value.shape) in (len(token), len(token) + 1):
                try:
                    yield self._evaluator.element(value, (*token, column)[: len(value.shape)], depth)
                except Unroll:
                    continue

    def _token_indices(self, shape: tuple[Size, ...], width: Size) -> Iterable[tuple[Expr, ...]]:
        """Token indices that fit ``[*tokens, width]``, or ``[*tokens]`` when width is 1, over any axes of the tokens."""
        forms = [shape[:-1]] if shape and same_size(shape[-1], width) else []
        for sizes in (*forms, shape) if width == 1 else forms:
            if sizes == self._sizes:
                yield self._tokens
            elif sizes and same_size(math.prod(sizes), math.prod(self._sizes)):
                yield self._evaluator.reshape_indices(self._sizes, sizes, self._tokens)


def _is_of_integers(node: fx.Node) -> bool:
    return not fake_of(node).dtype.is_floating_point


def _or_what_is_cast(search: Callable[[tuple[Expr, ...]], Operand | None], targets: tuple[Expr, ...]) -> Operand | None:
    """What ``search`` finds for the targets, or for what all of them are a cast of, to be cast."""
    found = search(targets)
    casts = {target.args[0] if target.kind == "cast" else None for target in targets}
    if found is not None or len(casts) != 1 or None in casts:
        return found
    found = _or_what_is_cast(search, tuple(target.args[1] for target in targets))
    return None if found is None or found.is_rounded else Operand(found.node, casts.pop())
