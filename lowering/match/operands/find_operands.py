"""Which node of the graph holds a tensor that a proof describes by its elements."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, tee
from typing import TypeAlias

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.facts.zero_stops_gradient import is_rectified
from moeblaze_ops.lowering.graph.dependencies import dependencies
from moeblaze_ops.lowering.graph.fake_values import fake_of, has_storage
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size
from moeblaze_ops.lowering.graph.stored_numbers import holds_all
from moeblaze_ops.lowering.index_notation.expr import DETACH, Expr, Indices, factors_of, split_number, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


@dataclass(frozen=True)
class Operand:
    """A node that holds an operand of the ops, up to a reshape to ``[T, C]``, a cast to ``dtype`` and a constant factor.

    ``gathered``: it holds scores ``[T, E]``, and the operand is what the layer's ids choose from them; ``turned``: it holds
    them as ``[E, T]``. ``of_slots``: it holds ``[T, K, C]``, or turned ``[K, T, C]``. ``rest``: it holds the first slot of each
    token, and these the others. ``detached``: it gets no gradient. ``order``: this node holds a permutation of all slots, in
    whose order it has them. ``spread``: it holds ``[*sizes, C]`` of the first sizes, which are broadcast to those of the tokens.
    """

    node: fx.Node
    dtype: torch.dtype
    gathered: bool = False
    turned: bool = False
    factor: float = 1
    of_slots: bool = False
    rest: tuple["Operand", ...] = ()
    detached: bool = False
    order: fx.Node | None = None
    spread: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node, *([self.order] if self.order else []), *(slot.node for slot in self.rest))

    @property
    def is_rounded(self) -> bool:
        """True if the cast to ``dtype`` changes numbers."""
        stored = fake_of(self.node).dtype
        rounds = stored.is_floating_point or not self.dtype.is_floating_point
        return rounds and not holds_all(self.dtype, stored)


Places: TypeAlias = Callable[[tuple[Size, ...]], Sequence[Indices] | None]
"""The indices of every target in a tensor of a shape; None if it has no place for them."""

Axis: TypeAlias = tuple[Size, Indices]
"""The size of an axis and the index of each target, or one for all of them."""


_ROW = -7
"""The level of the variable that stands for a row in an order of slots."""


class Finder:
    """Looks for operands among the nodes before a result: those that it depends on, the latest first, then the others."""

    def __init__(self, view: GraphView, evaluator: Evaluator, root: fx.Node, tokens: Indices, sizes: tuple[Size, ...]):
        self._view, self._evaluator, self._tokens, self._sizes = view, evaluator, tokens, sizes
        self._position = view.position[root]
        self.num_tokens: Size = math.prod(sizes)
        (self.token,) = evaluator.reshape_indices(sizes, (self.num_tokens,), tokens)
        of_sequences = len(sizes) == 2 and all(isinstance(size, int) and size > 1 for size in sizes)
        self.sequences: tuple[Axis, ...] = ((sizes[0], tokens[:1]),) if of_sequences else ()
        self.names: Indices = (self.token, tokens[1]) if of_sequences else (self.token,)
        others = (node for node, at in view.position.items() if at < self._position)  # such as tensors of the program's numbers
        nodes = chain(dependencies(view, root), others)
        tensors = (node for node in nodes if isinstance(fake_of(node), torch.Tensor))  # no setitem
        self._walk: Iterator[fx.Node] = filter(has_storage, tensors)  # no slice under vmap
        self._found: dict[tuple, Operand | None] = {}

    def find(self, targets: Indices, columns: Indices, width: Size, depth: int = 0, *, integers: bool = False) -> Operand | None:
        """The node ``[..., width]`` whose element at (token, column) is the target, for every column.

        A cast of ``integers`` to floating point, which has the same elements, is passed over.
        """
        key = (targets, columns, depth, integers)
        if key not in self._found:
            found = self._latest(targets, self._of_tokens(columns, width), depth, integers=integers)
            self._found[key] = found or self._of_sequences(targets, columns, width, depth, integers=integers)
        return self._found[key]

    def _of_sequences(
        self, targets: Indices, columns: Indices, width: Size, depth: int, *, integers: bool
    ) -> Operand | None:
        """The node whose element is the same for all tokens along some axes, as ids ``[B, K]`` of tokens ``[B, S]`` are."""
        tells = set().union(*(target.free for target in targets))
        sizes = tuple(size if token in tells else 1 for size, token in zip(self._sizes, self._tokens, strict=True))
        if not all(isinstance(size, int) for size in self._sizes) or math.prod(sizes) in (1, self.num_tokens):
            return None
        found = self._latest(targets, self._of_tokens(columns, width, sizes), depth, integers=integers)
        return found and replace(found, spread=(sizes, self._sizes))

    def find_table(
        self, targets: Indices, *axes: Axis, depth: int = 0, reshaped: bool = False, around: Sequence[Axis] = ()
    ) -> Operand | None:
        """The node over axes, the first two of them ``turned`` or not, that has every target; ``reshaped``: in any shape."""
        for turned, order in enumerate(_orders(axes)):
            over = self._over((*around, *order), len(targets), reshaped)
            if (found := self._latest(targets, over, depth)) is not None:
                return replace(found, turned=bool(turned))
        return None

    def find_scaled(self, targets: Indices, columns: Indices, width: Size, depth: int = 0) -> Operand | None:
        """As ``find``, or the node that gives all targets when it is multiplied by one number."""
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

    def find_sorted(self, target: Expr, slot: Expr, top_k: int) -> Operand | None:
        """The node that has the target of every slot in the order of a permutation, and the node of that.

            order = ids.flatten().argsort();  kept = torch.arange(T * K) - starts[ids.flatten()[order]] < capacity
        """
        row = self._evaluator.algebra.var(_ROW, self.num_tokens * top_k, "r")
        of_rows = self._over([(row.args[1], (row,))], 1)
        for node, order, _ in self._read(of_rows, 0):
            if order.is_permutation:
                place = self._evaluator.algebra.leaf(order, (row,))
                at = self._evaluator.reshape_indices((row.args[1],), (*self._sizes, top_k), (place,))
                own = self._evaluator.algebra.substitute(target, dict(zip((*self._tokens, slot), at, strict=True)))
                if (found := self._latest((own,), of_rows)) is not None:
                    return replace(found, order=node)
        return None

    def order_of(self, targets: Sequence[Expr]) -> list[int] | None:
        """The column of each target in the latest node ``[..., width]`` that has one for each, whatever their order."""
        return self._order(targets, self._of_tokens(self._numbers(targets), len(targets)))

    def order_of_places(
        self, targets: Sequence[Expr], place: Expr, sizes: tuple[Size, Size], around: Sequence[Axis]
    ) -> list[int] | None:
        """The same for the rows of a node ``[E, C]``, or the columns of one ``[C, E]``."""
        axes = (sizes[0], self._numbers(targets)), (sizes[1], (place,))
        orders = (self._order(targets, self._over((*around, *order), len(targets))) for order in _orders(axes))
        return next((order for order in orders if order is not None), None)

    def is_rectified(self, node: fx.Node) -> bool:
        """True if a node holds what a ReLU gave, whose gradient is zero where it is zero; that of a clamp is one at its bound."""
        return is_rectified(self._view.value_at(node, self._position))

    def _latest(self, targets: Indices, places: Places, depth: int = 0, *, integers: bool = False) -> Operand | None:
        """The latest node that holds the targets, or what all of them are a cast of, to be cast.

        One in which rows are stored of which only the data tell how many is the last resort: they would stay.
        """
        of_rows = None
        for node, value, elements in self._read(places, depth):
            if (integers and value.dtype.is_floating_point) or not _are(elements, targets):
                continue
            if not _puts_rows(value):
                return Operand(node, value.dtype)
            of_rows = of_rows or Operand(node, value.dtype)
        if of_rows is not None:
            return of_rows
        attached = tuple(attached_of(self._evaluator.algebra, target) for target in targets)
        if None not in attached:
            found = self._latest(attached, places, depth, integers=integers)
            return found and replace(found, detached=True)
        dtypes, whole = zip(*map(self._uncast, targets), strict=True)
        if len(set(dtypes)) != 1 or None in dtypes:
            return None
        found = self._latest(whole, places, depth, integers=integers)
        return None if found is None or found.is_rounded else Operand(found.node, dtypes[0])

    def _uncast(self, target: Expr) -> tuple[torch.dtype | None, Expr]:
        """The dtype to which a product was rounded, and that before; marks stand outside of what is rounded."""
        casts = [f for f in factors_of(target) if f.kind == "cast"]
        if len(casts) != 1 or not all(f in casts or is_indicator(f) for f in factors_of(target)):
            return None, target
        dtype, rounded = casts[0].args
        return dtype, self._evaluator.algebra.substitute(target, {casts[0]: rounded})

    def _order(self, targets: Sequence[Expr], places: Places) -> list[int] | None:
        for _, _, elements in self._read(places, 0):
            with suppress(Unroll):
                held = list(elements)
                if set(held) == set(targets) and len(set(held)) == len(targets):
                    return [held.index(target) for target in targets]
        return None

    def _read(self, places: Places, depth: int) -> Iterator[tuple[fx.Node, Value, Iterator[Expr]]]:
        """Each node that has the places, and its elements there: one that has no formula raises an `Unroll`."""
        self._walk, nodes = tee(self._walk)  # of the nodes that the result depends on most searches need few
        for node in nodes:
            value = self._view.value_at(node, self._position)
            if isinstance(value, Value) and (indices := places(value.shape)) is not None:
                yield node, value, (self._evaluator.element(value, at, depth) for at in indices)

    def _numbers(self, targets: Sequence[Expr]) -> Indices:
        return tuple(map(self._evaluator.algebra.const, range(len(targets))))

    def _numbers_beside(self, rest: Expr, column: Expr, width: Size, depth: int) -> list[Expr]:
        """Numbers, each of which some node holds multiplied by ``rest``."""
        found: dict[Expr, None] = {}
        for _, _, elements in self._read(self._of_tokens((column,), width), depth):
            with suppress(Unroll):
                number, other = self._number_and_rest(next(elements))
                if number and other is rest:
                    found[self._evaluator.algebra.const(number)] = None
        return list(found)

    def _number_and_rest(self, e: Expr) -> tuple[float | None, Expr | None]:
        """The number in a product, None where there is none, and the product without it."""
        number, factors = split_number(e) if e.kind == "mul" else (1, ())
        return (None, None) if number == 1 else (number, self._evaluator.algebra.mul(*factors))

    def _of_tokens(self, columns: Indices, width: Size, sizes: tuple[Size, ...] | None = None) -> Places:
        """``[*tokens, width]`` in any shape, or ``[*sizes, width]`` of what is the same for all tokens along axes of size 1."""
        zero = self._evaluator.algebra.zero
        pairs = zip(sizes or self._sizes, self._tokens, strict=True)
        tokens = [(size, (zero if sizes and size == 1 else token,)) for size, token in pairs]
        return self._over([*tokens, (width, columns)], len(columns), reshaped=True)

    def _over(self, axes: Sequence[Axis], count: int, reshaped: bool = False) -> Places:
        """A tensor of these axes, or one of as many elements if ``reshaped``, for ``count`` targets."""
        sizes = tuple(size for size, _ in axes)
        indices = list(zip(*(at if len(at) == count else at * count for _, at in axes), strict=True))

        def places(shape: tuple[Size, ...]) -> Sequence[Indices] | None:
            if same_shape(shape, sizes):
                return indices
            as_many = reshaped and same_size(math.prod(shape), math.prod(sizes))
            return [self._evaluator.reshape_indices(sizes, shape, at) for at in indices] if as_many else None

        return places


def joined(found: Sequence[Operand | None]) -> Operand | None:
    """One operand of what each slot, or each expert, has of its own; None where one has nothing, or another dtype."""
    if None in found or len({operand.dtype for operand in found}) != 1:
        return None
    return replace(found[0], rest=tuple(found[1:]))


def by_number(targets: Mapping[Expr, Expr]) -> tuple[Indices, Indices, Size]:
    """Experts in the order of their numbers, or one variable for all of them; the target of each; and how many there are."""
    experts = tuple(sorted(targets, key=lambda number: number.args[0]))
    count = experts[0].args[1] if experts[0].kind == "var" else len(experts)
    return experts, tuple(map(targets.__getitem__, experts)), count


def _orders(axes: Sequence[Axis]) -> list[Sequence[Axis]]:
    """Axes as they are, and with the first two exchanged."""
    return [axes, (axes[1], axes[0], *axes[2:])] if len(axes) > 1 else [axes]


def _puts_rows(value: Value) -> bool:
    """True if rows are stored in a value of which only the data tell how many."""
    while value.op in ("reshape", "permute"):
        value = value.args[0]
    rows = [i.shape for i in value.args[1] if i is not None] if value.op == "put" else []
    return bool(free_unbacked_symbols(sympy.Tuple(*map(math.prod, rows))))


def _are(elements: Iterator[Expr], targets: Indices) -> bool:
    with suppress(Unroll):
        return all(element is target for element, target in zip(elements, targets, strict=True))
    return False


def attached_of(algebra: Algebra, e: Expr) -> Expr | None:
    """What ``e`` is without gradient; None where it has one, as far as is known."""
    parts = {part: part.args[1][0] for part in subexpressions(e, lambda s: s.kind == "call" and s.args[0] == DETACH)}
    whole = algebra.substitute(e, parts) if parts else e
    return whole if parts and algebra.detached(whole) is e else None
