"""How many multiprocessors persistent kernels take: all of them, or fewer while a collective runs beside.

A persistent kernel gives each of its programs the same share of the work. A program that finds its multiprocessor taken by a
collective starts when that has ended, and the kernel ends as late. So it runs with as many programs as there is room for.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_left_free = 0


def left_free() -> int:
    """Multiprocessors that a persistent kernel which is launched now leaves to others."""
    return _left_free


@contextmanager
def leaving_free(count: int) -> Iterator[None]:
    """A context in which persistent kernels leave so many multiprocessors to others."""
    global _left_free
    before, _left_free = _left_free, count
    try:
        yield
    finally:
        _left_free = before
