"""Calls that need no second look: nothing watches them, and arguments like theirs were checked before.

Checks read the shapes, dtypes and devices of tensors, and numbers and names beside them. Who runs them remembers these of a
call that passed, its geometry, and a call of the same geometry passes too.

    once(check_moe, x, weights, ...)        runs the check; not again for tensors of these shapes
    once(check_moe, dual, weights, ...)     runs it every time: a transform, a mode or a subclass of tensors is there
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

MOST_GEOMETRIES = 4096
_VALUES = (type(None), bool, int, float, str)

_passed: dict[Callable, set[Hashable]] = {}


def once(check: Callable[..., None], *args: Any) -> None:
    """``check(*args)``, unless it has passed for arguments of this geometry."""
    geometry = geometry_of(args)
    passed = None if geometry is None else _passed.setdefault(check, set())
    if passed is None or geometry not in passed:
        check(*args)
        if passed is not None:
            remember(passed, geometry)


def remember(geometries: set[Hashable], geometry: Hashable) -> None:
    if len(geometries) >= MOST_GEOMETRIES:
        geometries.clear()
    geometries.add(geometry)


def geometry_of(args: Sequence[Any]) -> Hashable | None:
    """What checks read of arguments; None where something watches, or where a tensor is more than its numbers.

    Tensors may be in lists, tuples and dictionaries.
    """
    if torch.compiler.is_compiling() or _is_watched():
        return None
    geometry: list[Hashable] = []
    return tuple(geometry) if _describe(args, geometry) else None


def _describe(args: Sequence[Any], geometry: list[Hashable]) -> bool:
    """Collect the geometry of arguments; False where a tensor is not plain, or a value of a kind that nobody compares."""
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.layout is not torch.strided or arg.is_neg() or arg.is_nested or arg._is_zerotensor():
                return False
            geometry += (arg.shape, arg.dtype, arg.device)
        elif kind is list or kind is tuple or kind is dict:
            geometry.append(len(arg))
            if not _describe(arg.values() if kind is dict else arg, geometry):
                return False
        elif kind in _VALUES:
            geometry += (kind.__name__, arg)  # True and 1.0 are no 1
        else:
            return False
    return True


def _is_watched() -> bool:
    """Whether a mode, a transform, autocast, a tracer or a profiler of this thread is to see what ops are called."""
    c = torch._C
    return (
        c._len_torch_dispatch_stack() > 0
        or c._len_torch_function_stack() > 0
        or c._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or c._is_any_autocast_enabled()
        or profiler._is_profiler_enabled
        or c._get_tracing_state() is not None
    )
