"""Which axes of two shapes of one size hold the same elements."""

import math
from collections.abc import Iterator
from itertools import product

from moeblaze_ops.lowering.graph.sizes import Size, same_size

Groups = tuple[tuple[range, range], ...]


def common_groups(a: tuple[Size, ...], b: tuple[Size, ...]) -> Groups:
    """The axes of both in the finest groups of one size each: one axis and another, an axis of size 1 alone, or several.

    (6, 4), (2, 3, 1, 4)            0 and 0, 1; 2 alone; 1 and 3
    """
    return next(_from(a, b, 0, 0), ((range(len(a)), range(len(b))),))


def _from(a: tuple[Size, ...], b: tuple[Size, ...], i: int, j: int) -> Iterator[Groups]:
    if (i, j) == (len(a), len(b)):
        yield ()
    ends = product(range(i, len(a) + 1), range(j, len(b) + 1))
    for m, n in sorted(ends, key=lambda end: (end != (i + 1, j + 1), sum(end))):
        if (m, n) != (i, j) and same_size(math.prod(a[i:m]), math.prod(b[j:n])):
            yield from (((range(i, m), range(j, n)), *rest) for rest in _from(a, b, m, n))
