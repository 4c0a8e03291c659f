"""Which axes of two shapes of one size hold the same elements."""

import math
from functools import lru_cache
from itertools import product

from moeblaze_ops.lowering.graph.sizes import Size, same_size


@lru_cache(maxsize=1 << 12)
def common_groups(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[tuple[range, range], ...]:
    """The axes of both in the finest groups of one size each: one axis and another, an axis of size 1 alone, or several.

    (6, 4), (2, 3, 1, 4)            0 and 0, 1; 2 alone; 1 and 3
    """
    groups, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        ends = sorted(product(range(i, len(a) + 1), range(j, len(b) + 1)), key=lambda end: (end != (i + 1, j + 1), sum(end)))
        alike = ((m, n) for m, n in ends if (m, n) != (i, j) and same_size(math.prod(a[i:m]), math.prod(b[j:n])))
        if (end := next(alike, None)) is None:  # of axes without elements
            return ((range(len(a)), range(len(b))),)
        groups.append((range(i, end[0]), range(j, end[1])))
        i, j = end
    return tuple(groups)
