"""What the losses and counts of a router share with the layer: its counts, and one pass over the gradient of its logits.

    fraction = F.one_hot(ids, E).float().mean(0)          # counts of the ids, where a layer or its router has these ids
    counts = expert_counts(ids, E)                        # what dispatch says of the same ids, if they are dispatched
    dlogits = router_sums_backward(..) + more             # one call, which adds in fp32

The first compares every id with every expert, T K E times. All is done to the graph of forward and backward, where nothing is
written to.
"""

import functools
import math
import operator

import torch
from torch import fx

from moeblaze_ops.arguments.validation import MAX_EXPERTS
from moeblaze_ops.lowering.inductor.graph_writer import CAST, VIEWS, Writer, is_like

aten = torch.ops.aten
_ops = torch.ops.moeblaze
_ADDED = 4
"""Where ``router_sums_backward`` takes what is added."""


def join_router_gradients(add: fx.Node) -> bool:
    """Let one call give a sum of gradients of a router's logits, and say whether it does.

    The operands are looked at first: a sum of several ends in one call. What is replaced stays without users.
    """
    if not add.users or add.kwargs:
        return False
    for side in add.args:
        if isinstance(side, fx.Node) and side.target == aten.add.Tensor and len(side.users) == 1:
            join_router_gradients(side)
    if not all(isinstance(side, fx.Node) and _is_matrix_like(side, add) for side in add.args):
        return False
    for node, other in (add.args, add.args[::-1]):
        if node is other or node.target != _ops.router_sums_backward.default or len(node.users) > 1 or node.kwargs:
            continue
        args = _padded(node)
        joined = _both(args, _padded(other)) if _is_of_same(node, other) and len(other.users) == 1 else None
        if joined is None and args[_ADDED] is None:
            joined = (*args[:_ADDED], other)
        if joined is not None:
            add.replace_all_uses_with(Writer(add).op(_ops.router_sums_backward.default, *joined))
            return True
    return False


def _is_matrix_like(node: fx.Node, add: fx.Node) -> bool:
    value, total = node.meta["val"], add.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == total.dtype and value.dim() == 2 and is_like(node, add)


def _padded(node: fx.Node) -> tuple:
    """All arguments of a call of ``router_sums_backward``."""
    return (*node.args, *(None,) * (_ADDED + 1 - len(node.args)))


def _is_of_same(node: fx.Node, other: fx.Node) -> bool:
    """True if both are such gradients of the same logits and of the same tokens."""
    return other.target == node.target and not other.kwargs and node.args[2:_ADDED] == other.args[2:_ADDED]


def _both(args: tuple, others: tuple) -> tuple | None:
    """The arguments of one call in place of two, None where both have an argument."""
    given = [(one, other) for one, other in zip(args, others, strict=True)]
    own = [given[0], given[1], given[_ADDED]]
    if any(one is not None and other is not None for one, other in own):
        return None
    dsums, dsquares, added = (other if one is None else one for one, other in own)
    return dsums, dsquares, *args[2:_ADDED], added


def count_by_dispatch(counts: fx.Node) -> None:
    """Let the users of ``expert_counts`` read what ``dispatch`` counts, if it takes the same ids and experts."""
    ids, num_experts = counts.args
    for dispatch in _dispatches(ids):
        if dispatch.args[1] != num_experts or not all(argument < counts for argument in dispatch.all_input_nodes):
            continue
        if counts < dispatch:
            counts.prepend(dispatch)
        write = Writer(counts)
        offsets = write(operator.getitem, dispatch, 1)
        ends = write(aten.slice.Tensor, offsets, 0, 1, num_experts + 1)
        write.instead(write(aten.sub.Tensor, ends, write(aten.slice.Tensor, offsets, 0, 0, num_experts)))
        return


def _dispatches(ids: fx.Node) -> list[fx.Node]:
    """The calls of ``dispatch`` that take the same numbers."""
    source = _unwidened(ids)
    return [node for node in _same_numbers(source) if node.target == _ops.dispatch.default and _unwidened(node.args[0]) is source]


def _same_numbers(source: fx.Node) -> list[fx.Node]:
    """The readers of a tensor of ids, and of the same ids in a wider type."""
    readers = list(source.users)
    return readers + [user for reader in readers if _unwidened(reader) is source for user in reader.users]


def _unwidened(node: fx.Node) -> fx.Node:
    """Ids as they were before they were cast to a type that has all of them."""
    while node.target == CAST and isinstance(node.args[0], fx.Node):
        given, cast = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        if (given, cast) != (torch.int32, torch.int64) and given != cast:
            return node
        node = node.args[0]
    return node


def count_one_hot(reduced: fx.Node) -> None:
    """Replace a sum or a mean over tokens of [id = expert] by counts, if the ids are those of a layer."""
    source, axes, *rest = reduced.args
    value = reduced.meta["val"]
    if rest or reduced.kwargs or not value.is_cuda or value.dtype not in (torch.float32, torch.float64, torch.int64):
        return
    ids, num_experts = _one_hot(source)
    if ids is None or not _is_of_layer(ids):
        return
    shape, rank = ids.meta["val"].shape, source.meta["val"].dim()
    axes = sorted(axis % rank for axis in axes)
    if axes != list(range(len(axes))) or not 1 <= len(axes) < rank or rank != len(shape) + 1:
        return
    kept = shape[len(axes) :]
    if not all(isinstance(size, int) for size in kept):
        return
    num_kept = math.prod(kept)
    if num_kept * num_experts > MAX_EXPERTS or not num_kept:
        return
    write = Writer(reduced)
    bins = ids if num_kept == 1 and len(shape) == 2 else write(aten.reshape.default, ids, [-1, num_kept])
    if num_kept > 1:
        # An id of a later slot counts in bins of its own; one that is no expert's counts nowhere.
        options = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        first_bins = write(torch.ops.prims.iota.default, num_kept, start=0, step=num_experts, **options)
        used = write(aten.logical_and.default, write(aten.ge.Scalar, bins, 0), write(aten.lt.Scalar, bins, num_experts))
        none = write(aten.full.default, [], -1, dtype=torch.int64, device=value.device)
        bins = write(aten.where.self, used, write(aten.add.Tensor, bins, first_bins), none)
    counts = write.op(_ops.expert_counts.default, bins, num_kept * num_experts)
    result = write(CAST, counts, value.dtype)
    if reduced.target == aten.mean.dim:
        result = write(aten.div.Tensor, result, functools.reduce(write.product, (_size(write, ids, axis) for axis in axes)))
    write.instead(write(aten.reshape.default, result, [*kept, num_experts]))
    count_by_dispatch(counts)


def _size(write: Writer, node: fx.Node, axis: int):
    size = node.meta["val"].shape[axis]
    return size if isinstance(size, int) else write(aten.sym_size.int, node, axis)


def _one_hot(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The ids and the experts of ``[id = expert]`` as numbers, with the experts in the last axis."""
    is_number = False
    while node.target == CAST:
        is_number |= not node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype.itemsize >= 4
        node = node.args[0]
    if not is_number or node.target != aten.eq.Tensor:
        return None, 0
    for ids, numbers in (node.args, node.args[::-1]):
        if not all(isinstance(side, fx.Node) for side in (ids, numbers)):
            continue
        count = _count_of_iota(numbers)
        if count and ids.target == aten.unsqueeze.default and ids.args[1] in (-1, ids.meta["val"].dim() - 1):
            return ids.args[0], count
    return None, 0


def _count_of_iota(node: fx.Node) -> int:
    """n where a tensor is 0, 1 and so on up to n - 1, else 0."""
    if node.target == torch.ops.prims.iota.default and (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1):
        count = node.args[0]
        return count if isinstance(count, int) else 0
    return 0


def _is_of_layer(ids: fx.Node) -> bool:
    """True if the ids are what a recognised router gave, or what is dispatched."""
    source = _unwidened(ids)
    while source.target in VIEWS:
        source = _unwidened(source.args[0])
    is_chosen = source.target is operator.getitem and source.args[0].target == _ops.route.default and source.args[1] == 1
    return is_chosen or bool(_dispatches(ids))
