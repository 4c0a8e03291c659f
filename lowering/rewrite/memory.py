"""Which elements of its storage a view has, and whether those of two views are apart."""

from itertools import chain
from typing import TypeAlias

import sympy
import torch

from moeblaze_ops.lowering.graph.sizes import Size, size_of

Memory: TypeAlias = tuple[torch.dtype, Size, tuple[tuple[Size, Size], ...]]
"""The dtype, where elements begin, and sizes and strides of axes: those that are one axis in memory are one here."""


def memory_of(fake: torch.Tensor) -> Memory:
    """The same for two views of a storage if they have the same elements in the same order."""
    axes: list[tuple[Size, Size]] = []
    for size, stride in zip(map(size_of, fake.shape), map(size_of, fake.stride()), strict=True):
        if axes and axes[-1][1] == sympy.expand(size * stride):
            axes[-1] = sympy.expand(axes[-1][0] * size), stride
        elif size != 1:
            axes.append((size, stride))
    return fake.dtype, size_of(fake.storage_offset()), tuple(axes)


def are_apart(one: Memory, other: Memory) -> bool:
    """True if no element of one is an element of the other.

        out[0], out[1]          the first ends before the second begins
        out[:, 0], out[:, 1]    so it is in each period of the first axis, as in out[..., :3], out[..., 3:]
    """
    if one[0] != other[0]:
        return False
    strides = (stride for _, stride in chain(one[2], other[2]) if stride != 0)
    for period in (None, *strides):
        first, second = (_span(memory, period) for memory in (one, other))
        if first and second and (_is_less(first[1], second[0]) or _is_less(second[1], first[0])):
            return True
    return False


def _span(memory: Memory, period: Size | None) -> tuple[Size, Size] | None:
    """The first and the last place of elements, in each period of so many places if there is one."""
    _, start, axes = memory
    if period is not None:
        start, axes = start % period, [(size, stride) for size, stride in axes if stride % period != 0]
    end = start + sum((size - 1) * stride for size, stride in axes)
    return (start, end) if period is None or _is_less(end, period) else None


def _is_less(a: Size, b: Size) -> bool:
    return bool(sympy.expand(b - a).is_positive)
