"""Expert weights in the ops' logical form: which view of the stored tensors it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import fx

from moeblaze_ops.arguments.separate_experts import are_in_a_row
from moeblaze_ops.lowering.graph.fake_values import fake_of, has_storage
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.stored_numbers import rounds_between
from moeblaze_ops.lowering.index_notation.expr import Expr, linear_parts
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.specialized_sizes import SymbolicSizes, may_be_specialized
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove


@dataclass(frozen=True)
class Part:
    """The elements from ``start`` on of the last axis of a tensor that is viewed as ``sizes``."""

    sizes: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class WeightView:
    """One tensor of the ops' weight list.

    ``values`` is one stored tensor of all experts, or with ``apart`` one per expert, which several may share. Of each its
    ``parts`` are taken one after another; what is left is viewed as ``sizes`` and permuted by ``order`` to (E, G, F, D),
    (E, F, D), ..., with 1 for E where there is one per expert.
    """

    values: tuple[Value, ...]
    parts: tuple[tuple[Part, ...], ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    cast: bool
    apart: bool

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(value.node for value in self.values)

    @property
    def copied_bytes(self) -> int:
        """Bytes of experts stored apart that are joined by a copy: on a GPU, unless they lie one after another in memory."""
        stored = [fake_of(node) for node in self.nodes]
        in_place = stored[0].device.type == "cpu" or (not any(self.parts) and are_in_a_row(stored))
        if not self.apart or (in_place and not self.cast):
            return 0
        return len(stored) * math.prod(self.sizes) * stored[0].element_size()


@dataclass(frozen=True)
class _Element:
    """A leaf's position in its tensor as a linear function of expert, output and input features."""

    value: Value
    dtype: torch.dtype
    constant: int
    strides: tuple[int, ...]  # of the expert, 0 where it is a constant of the expression, and of the feature variables
    subscripted: int | None  # the size of the axis that the expert's expression is a subscript of


def weight_views(
    algebra: Algebra,
    experts: Sequence[Sequence[Expr]],
    features: Sequence[Sequence[Expr]],
    index: Sequence[Expr | None],
    num_experts: int | None,
    *,
    halves_axis: bool,
    may_copy: bool = False,
) -> tuple[tuple[WeightView, ...], int]:
    """Views that cover all experts' elements, and the number of experts.

    Args:
        experts: per expert the elements of its halves (gate, up), or of its one weight. A single entry stands for all
            experts where ``index`` names the expert's variable.
        features: per expert its feature variables, outermost axis of the result first.
        index: per expert the expression that its weights are indexed by, None where it is a constant.
        num_experts: E, or None to read it off what is indexed.
        halves_axis: whether the result has the axis G (up weights have it even when there is one half).
        may_copy: take parts of tensors that are not contiguous, which are copied; not of whole weights.
    """
    elements = [
        [_element(algebra, leaf, own, at) for leaf in halves] for halves, own, at in zip(experts, features, index, strict=True)
    ]
    halves = list(zip(*elements, strict=True))
    if num_experts is None:
        num_experts = _num_indexed(algebra, index[0], halves[0][0].subscripted)
    for own, at in zip(elements, index, strict=True):
        named = at is None or algebra.fits(at, num_experts) or all(e.subscripted == num_experts for e in own)
        prove(named, Reason.EXPERT_COVERAGE, "ids that may be no expert's of these")
    sizes = _sizes(features)
    if len(halves) == 2 and all(gate.value is up.value and gate.constant < up.constant for gate, up in elements):
        try:
            return (_view(halves, sizes, num_experts, halves_axis, may_copy),), num_experts
        except Declined:  # each by itself may be a view nevertheless, as where other weights lie between them
            pass
    return tuple(_view([half], sizes, num_experts, halves_axis, may_copy) for half in halves), num_experts


def order_in_memory(algebra: Algebra, weights: Sequence[Expr], features: Sequence[Sequence[Expr]]) -> list[int]:
    """Which experts' weights lie one after another in one tensor, each a part of it; as they come where each has its own."""
    in_turn = list(range(len(weights)))
    elements = [_element(algebra, weight, own, None) for weight, own in zip(weights, features, strict=True)]
    one_tensor = all(element.value is elements[0].value for element in elements)
    return sorted(in_turn, key=lambda i: elements[i].constant) if one_tensor else in_turn


def _num_indexed(algebra: Algebra, ids: Expr, subscripted: int | None) -> int:
    """How many experts ``ids`` may name."""
    bounds = [bound for bound in (algebra.extent(ids), subscripted) if isinstance(bound, int)]
    prove(bounds, Reason.EXPERT_COVERAGE, "ids without a known bound")
    return min(bounds)


def _sizes(features: Sequence[Sequence[Expr]]) -> tuple[int, ...]:
    (sizes, *others) = [tuple(variable.args[1] for variable in own) for own in features]
    prove(all(isinstance(size, int) for size in sizes), Reason.WEIGHT_LAYOUT, "a symbolic width")
    prove(all(own == sizes for own in others), Reason.WEIGHT_LAYOUT, "experts of several sizes")
    return sizes


def _element(algebra: Algebra, leaf: Expr, features: Sequence[Expr], index: Expr | None) -> _Element:
    casts: list[torch.dtype] = []
    while leaf.kind == "cast":
        dtype, leaf = leaf.args
        casts.insert(0, dtype)
    prove(leaf.kind == "leaf", Reason.PROJECTION_WEIGHTS, f"'{leaf.kind}' of tensors")
    value, indices = leaf.args
    dtypes = (value.dtype, *casts)
    prove(not rounds_between(dtypes), Reason.DTYPE_PATH, "weights that are rounded on the way", value.node)
    if not all(isinstance(size, int) for size in value.shape):
        sizes = fake_of(value.node).shape
        prove(may_be_specialized(sizes, value.node.graph), Reason.WEIGHT_LAYOUT, "a symbolic weight shape")
        raise SymbolicSizes(sizes)
    strides = [math.prod(value.shape[i + 1 :]) for i in range(len(value.shape))]
    position = algebra.linear(0, list(zip(strides, indices, strict=True)))
    constant, parts = linear_parts(position)
    terms = {atom: c for c, atom in parts}
    static = all(isinstance(number, int) for number in (constant, *terms.values()))
    prove(static, Reason.WEIGHT_LAYOUT, "a symbolic position")
    if index is not None and index.kind == "linear":
        terms = _with_one_id(terms, index)
    known = {*features, index}
    prove(all(atom in known for atom in terms), Reason.PROJECTION_WEIGHTS, "indexed by something else than the expert")
    subscripted = next((size for size, own in zip(value.shape, indices, strict=True) if own is index), None)
    return _Element(value, dtypes[-1], constant, tuple(terms.get(v, 0) for v in (index, *features)), subscripted)


def _with_one_id(terms: dict[Expr, int], ids: Expr) -> dict[Expr, int]:
    """A position in which the digits of an id stand for the id."""
    digits = {atom: c for c, atom in ids.args[1]}
    (stride, *others) = {Fraction(terms.get(atom, 0), c) for atom, c in digits.items()}
    prove(not others and stride.denominator == 1, Reason.PROJECTION_WEIGHTS, "indexed by something else than the expert")
    return {ids: int(stride)} | {atom: c for atom, c in terms.items() if atom not in digits}


def _view(
    halves: Sequence[Sequence[_Element]], sizes: tuple[int, ...], num_experts: int, halves_axis: bool, may_copy: bool
) -> WeightView:
    first = halves[0]
    lead, *others = first
    between = halves[-1][0].constant - lead.constant
    alike = all(up.constant - gate.constant == between for gate, up in zip(first, halves[-1], strict=True))
    alike = alike and all(e.strides == lead.strides for half in halves for e in half)
    prove(alike, Reason.WEIGHT_LAYOUT, "experts lie differently")
    prove(len({e.dtype for half in halves for e in half}) == 1, Reason.DTYPE_PATH, "weights of several dtypes")
    distance = others[0].constant - lead.constant if others else lead.strides[0]
    in_a_row = all(e.value is lead.value and e.constant == lead.constant + i * distance for i, e in enumerate(first))
    apart = len(others) > 0 and not (in_a_row and distance > 0)
    stored = first if apart else first[:1]
    values = tuple(e.value for e in stored)
    axes = [(0, 1) if apart else (distance, num_experts), *zip(lead.strides[1:], sizes, strict=True)]
    if halves_axis:
        axes.insert(1, (between, len(halves)))
    parts, all_sizes, orders = zip(*(stored_order(axes, e.constant, math.prod(e.value.shape)) for e in stored), strict=True)
    prove(all(has_storage(value.node) for value in values), Reason.WEIGHT_LAYOUT, "no tensor, or a slice under vmap")
    contiguous = may_copy or not any(parts) or all(fake_of(value.node).is_contiguous() for value in values)
    prove(contiguous, Reason.WEIGHT_LAYOUT, "part of a tensor that is not contiguous")
    cast = any(value.dtype != lead.dtype for value in values)
    return WeightView(values, parts, all_sizes[0], orders[0], lead.dtype, cast, apart)


def stored_order(
    axes: Sequence[tuple[int, int]], start: int, numel: int
) -> tuple[tuple[Part, ...], tuple[int, ...], tuple[int, ...]]:
    """Where a tensor of ``numel`` elements has those at ``start + sum of stride * index``, for axes of (stride, size).

    Returns:
        The parts to take of the tensor, the sizes to view the last one as, in storage order, and the permutation of these
        to the order of ``axes``.
    """
    prove(start >= 0 and all(size > 0 for _, size in axes), Reason.WEIGHT_LAYOUT, "a tensor without elements")
    depth: list[float] = []  # an axis of size one stays behind its neighbour: no permutation for its sake
    for stride, size in axes:
        depth.append(stride if size > 1 else depth[-1] - 0.5 if depth else math.inf)
    by_stride = sorted(range(len(axes)), key=lambda i: -depth[i])
    parts: list[Part] = []
    sizes: tuple[int, ...] = ()
    block = numel  # the axes further inside have some of so many elements in a row, the first of them at ``start``
    for stride, size in (axes[i] for i in by_stride):
        if size > 1:
            length = stride * size
            prove(0 < length <= block, Reason.WEIGHT_LAYOUT, "not each element once")
            inside = max(0, start + length - block)
            if length < block:
                parts.append(Part((*sizes, block), start - inside, length))
            start, block = inside, stride
        sizes = (*sizes, size)
    prove(start < block, Reason.WEIGHT_LAYOUT, "more than the tensor")
    if block > 1:
        parts.append(Part((*sizes, block), start, 1))
    order = [0] * len(axes)
    for position, i in enumerate(by_stride):
        order[i] = position
    return tuple(parts), sizes, tuple(order)
