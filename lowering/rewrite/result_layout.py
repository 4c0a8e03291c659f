"""The strides of a layer's result are those that its node had: ``y.as_strided(..., y.stride())`` reads the same numbers.

The operators give rows, ``[T, D]``. A layer as it was written may give another order of axes, mostly that of its tokens:

    x = tokens.transpose(0, 1)                  [S, B, D] as [B, S, D]
    y = torch.zeros_like(x) + ...               strides (D, B * D, 1), where the operators give (S * D, D, 1)
"""

from itertools import permutations

import torch
from torch import fx

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.sizes import Size, same_size, size_of
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.rewrite.inserter import Inserter


def has_strides_of(node: fx.Node, written: fx.Node) -> bool:
    """True if elements stand where they stood, apart from axes of one element, which have no next one."""
    fakes = fake_of(node), fake_of(written)
    axes = zip(fakes[1].shape, *(fake.stride() for fake in fakes), strict=True)
    return all(same_size(size_of(size), 1) or same_size(size_of(a), size_of(b)) for size, a, b in axes)


def no_holes(fake: torch.Tensor) -> bool:
    """True if a tensor has all of its memory, as far as its strides tell."""
    return same_size(size_of(fake.storage_offset()), 0) and dense_order(fake) is not None


def laid_out(insert: Inserter, node: fx.Node, written: fx.Node) -> fx.Node:
    """``node``, rows one after the other, in the strides of ``written``: itself where it has them, otherwise a copy."""
    fake = fake_of(written)
    prove(same_size(size_of(fake.storage_offset()), 0), Reason.LAYOUT, "it is part of a larger buffer", written)
    if has_strides_of(node, written):
        return node
    order = dense_order(fake)
    if order is None:
        raise Declined(Reason.LAYOUT, f"its strides are {tuple(fake.stride())}", written)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return insert.call("permute", insert.call("contiguous", insert.call("permute", node, order)), inverse)


def dense_order(fake: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a tensor from the outermost to the innermost in memory, None where that has holes or overlaps.

    ``torch.empty(S, B, D).transpose(0, 1)`` has (1, 0, 2), ``torch.empty(T, 2 * D)[:, :D]`` has none.
    """
    sizes, strides = tuple(map(size_of, fake.shape)), tuple(map(size_of, fake.stride()))

    def is_dense(order: tuple[int, ...]) -> bool:
        inner: Size = 1
        for axis in reversed(order):
            if not same_size(sizes[axis], 1) and not same_size(strides[axis], inner):
                return False
            inner = inner * sizes[axis]
        return True

    return next(filter(is_dense, permutations(range(len(sizes)))), None)
