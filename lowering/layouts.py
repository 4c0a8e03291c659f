"""Expert weights in the ops' logical form: which view of the stored tensors it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from moeblaze_ops.joining import are_in_a_row
from moeblaze_ops.lowering.algebra import Algebra
from moeblaze_ops.lowering.expressions import Expr, Size
from moeblaze_ops.lowering.reasons import Reason, prove
from moeblaze_ops.lowering.values import Value, fake_of


@dataclass(frozen=True)
class WeightView:
    """One tensor of the ops' weight list.

    ``values`` is one stored tensor of all experts, or with ``apart`` one per expert. Each is viewed as ``sizes`` and
    permuted by ``order`` to (E, G, F, D), (E, F, D), ..., with 1 for E where there is one per expert. ``half`` then
    selects one of two halves that are stored in the other order, ``count`` the first experts of a tensor of more.
    """

    values: tuple[Value, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    cast: bool
    apart: bool
    half: int | None = None
    count: int | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(value.node for value in self.values)

    @property
    def copied_bytes(self) -> int:
        """Bytes of experts stored apart that are joined by a copy: on a GPU, unless they lie one after another in memory."""
        stored = [fake_of(node) for node in self.nodes]
        in_place = stored[0].device.type == "cpu" or (self.half is None and are_in_a_row(stored))
        if not self.apart or (in_place and not self.cast):
            return 0
        return sum(fake.nbytes for fake in stored) // (1 if self.half is None else 2)


@dataclass(frozen=True)
class _Element:
    """A leaf's position in its tensor as a linear function of expert, output and input features."""

    value: Value
    dtype: torch.dtype
    constant: int
    strides: tuple[int, ...]  # of the feature variables
    expert_stride: int | None  # None where the expert is a constant of the expression


def weight_views(
    algebra: Algebra,
    experts: Sequence[Sequence[Expr]],
    features: Sequence[Sequence[Expr]],
    index: Sequence[Expr | None],
    num_experts: int | None,
    *,
    halves_axis: bool,
    part: bool = False,
) -> tuple[tuple[WeightView, ...], int]:
    """Views that cover all experts' elements, and the number of experts.

    Args:
        experts: per expert the elements of its halves (gate, up), or of its one weight. A single entry stands for all
            experts where ``index`` names the expert's variable.
        features: per expert its feature variables, outermost axis of the result first.
        index: per expert the expression that its weights are indexed by, None where it is a constant.
        num_experts: E, or None to read it off the tensor.
        halves_axis: whether the result has the axis G (up weights have it even when there is one half).
        part: whether a tensor may have more experts than these, behind them.
    """
    elements = [
        [_element(algebra, leaf, own, at) for leaf in halves] for halves, own, at in zip(experts, features, index, strict=True)
    ]
    sizes = tuple(_static(v.args[1]) for v in features[0])
    halves = list(zip(*elements, strict=True))
    packed = len(halves) == 2 and all(gate.value is up.value for gate, up in elements)
    if packed:
        views, count = _packed(halves, sizes, num_experts, part)
        return views, count
    views = [_view([half], sizes, num_experts, halves_axis, part) for half in halves]
    prove(len({count for _, count in views}) == 1, Reason.EXPERT_COVERAGE, "gate and up of different experts")
    return tuple(view for view, _ in views), views[0][1]


def _static(extent: Size) -> int:
    prove(isinstance(extent, int), Reason.WEIGHT_LAYOUT, "a symbolic width")
    return extent


def _element(algebra: Algebra, leaf: Expr, features: Sequence[Expr], index: Expr | None) -> _Element:
    dtype = None
    while leaf.kind == "cast":
        dtype, leaf = dtype or leaf.args[0], leaf.args[1]
    prove(leaf.kind == "leaf", Reason.PROJECTION_WEIGHTS, f"'{leaf.kind}' of tensors")
    value, indices = leaf.args
    prove(all(isinstance(s, int) for s in value.shape), Reason.WEIGHT_LAYOUT, "a symbolic weight shape")
    strides = [math.prod(value.shape[i + 1 :]) for i in range(len(value.shape))]
    position = algebra.linear(0, list(zip(strides, indices, strict=True)))
    if position.kind == "const":
        constant, terms = position.args[0], {}
    elif position.kind == "linear":
        constant, terms = position.args[0], {atom: c for c, atom in position.args[1]}
    else:
        constant, terms = 0, {position: 1}
    known = {*features, index}
    prove(all(atom in known for atom in terms), Reason.PROJECTION_WEIGHTS, "indexed by something else than the expert")
    return _Element(
        value,
        dtype or value.dtype,
        constant,
        tuple(terms.get(v, 0) for v in features),
        None if index is None else terms.get(index, 0),
    )


def _packed(halves: list, sizes: tuple[int, ...], num_experts: int | None, part: bool) -> tuple[tuple[WeightView, ...], int]:
    gates, ups = halves
    offsets = {up.constant - gate.constant for gate, up in zip(gates, ups, strict=True)}
    prove(len(offsets) == 1, Reason.WEIGHT_LAYOUT, "gate and up lie differently per expert")
    (offset,) = offsets
    if offset > 0:
        view, count = _view([gates, ups], sizes, num_experts, True, part)
        return (view,), count
    view, count = _view([ups, gates], sizes, num_experts, True, part)
    return tuple(replace(view, half=half) for half in (1, 0)), count


def _view(
    halves: list, sizes: tuple[int, ...], num_experts: int | None, halves_axis: bool, part: bool
) -> tuple[WeightView, int]:
    first = halves[0]
    lead = first[0]
    prove(all(e.strides == lead.strides for half in halves for e in half), Reason.WEIGHT_LAYOUT, "experts lie differently")
    prove(len({e.dtype for half in halves for e in half}) == 1, Reason.DTYPE_PATH, "weights of several dtypes")
    axes: list[tuple[int, int]] = list(zip(lead.strides, sizes, strict=True))
    if halves_axis:
        axes.insert(0, (halves[1][0].constant - lead.constant, 2) if len(halves) == 2 else (0, 1))
    numel = math.prod(lead.value.shape)
    inner = math.prod(size for _, size in axes)
    prove(inner > 0, Reason.WEIGHT_LAYOUT, "a tensor without elements")
    apart = len(first) > 1 and (numel == inner or len({e.value for e in first}) == len(first))
    if apart:
        prove(all(e.constant == 0 for e in first), Reason.WEIGHT_LAYOUT, "part of a tensor")
        whole = all(math.prod(e.value.shape) == numel for e in first)
        prove(whole, Reason.WEIGHT_LAYOUT, "experts of several sizes")
        order_sizes, order = _tiled([(numel, 1), *axes], numel)
        count, values = len(first), tuple(e.value for e in first)
    else:
        prove(all(e.value is lead.value for e in first), Reason.WEIGHT_LAYOUT, "some experts share a tensor")
        count = num_experts if num_experts is not None else max(numel // inner, 1)
        stride = lead.expert_stride or (first[1].constant - lead.constant if len(first) > 1 else 0)
        prove(all(e.constant == i * stride for i, e in enumerate(first)), Reason.EXPERT_COVERAGE, "weights of another expert")
        stored = numel // inner
        whole = count == stored or (part and count < stored)
        prove(whole and stored * inner == numel, Reason.EXPERT_COVERAGE, f"{count} experts read a tensor of {stored}")
        order_sizes, order = _tiled([(stride, stored), *axes], numel)
        values = (lead.value,)
    first = None if apart or count == stored else count
    return WeightView(values, order_sizes, order, lead.dtype, lead.dtype != lead.value.dtype, apart, count=first), count


def _tiled(axes: list[tuple[int, int]], numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the axes in storage order, and the permutation back to the given order."""
    depth: list[float] = []  # an axis of size one stays behind its neighbour: no permutation for its sake
    for stride, size in axes:
        depth.append(stride if size > 1 else depth[-1] - 0.5 if depth else math.inf)
    by_stride = sorted(range(len(axes)), key=lambda i: -depth[i])
    expected = 1
    for i in reversed(by_stride):
        stride, size = axes[i]
        prove(size == 1 or stride == expected, Reason.WEIGHT_LAYOUT, "not all of the tensor, each element once")
        expected *= size
    prove(expected == numel, Reason.WEIGHT_LAYOUT, "not all of the tensor")
    order = [0] * len(axes)
    for position, i in enumerate(by_stride):
        order[i] = position
    return tuple(axes[i][1] for i in by_stride), tuple(order)
