"""Which axes of two shapes of one size hold the same elements."""

import math

from moeblaze_ops.lowering.graph.sizes import Size, same_size


def common_groups(a: tuple[Size, ...], b: tuple[Size, ...]) -> list[tuple[list[int], list[int]]]:
    """Split the axes of two shapes of equal size into the finest runs of equal size."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = [i] if i < len(a) else [], [j] if j < len(b) else []
        i, j = i + len(left), j + len(right)
        size_a, size_b = math.prod(a[x] for x in left), math.prod(b[x] for x in right)
        while not same_size(size_a, size_b):
            # Sizes of one are absorbed first, then the smaller side grows; symbolic sizes take turns.
            if i < len(a) and (j >= len(b) or _grow_left(size_a, size_b, len(left), len(right))):
                size_a, i = size_a * a[i], i + 1
                left.append(i - 1)
            elif j < len(b):
                size_b, j = size_b * b[j], j + 1
                right.append(j - 1)
            else:
                return [(list(range(len(a))), list(range(len(b))))]
        groups.append((left, right))
    return groups


def _grow_left(size_a: Size, size_b: Size, len_a: int, len_b: int) -> bool:
    if isinstance(size_a, int) and isinstance(size_b, int):
        return size_a < size_b
    if 1 in (size_a, size_b):
        return size_a == 1
    return len_a <= len_b
