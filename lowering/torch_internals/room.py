"""Room for the compiler's frames.

From 3.11 on, Python keeps frames in pieces of 16 KB. A piece is mapped when a call is the first in it, and unmapped when that
returns: a loop that happens to call across the end of one asks the kernel for memory in each pass, and a call takes 250 times as
long. The compiler's stacks span several pieces, which took a fifth of its time. A piece has room for its first frame, at least.
"""

from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def call_with_room(function: Callable[[], _Result]) -> _Result:
    """Calls ``function`` where the frames of all its calls fit behind this one's megabyte, of which most is never touched."""
    return function()


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=(1 << 17) + 1)
