"""Calls that need no second look: nothing watches them, and arguments like theirs were checked before.

Checks read the shapes, dtypes and devices of tensors, and numbers and names beside them. So a call passes where one like it did.

    once(check_moe, x, weights, ...)        runs the check; not again for tensors of these shapes
    once(check_moe, dual, weights, ...)     runs it every time: a transform, a mode or a subclass of tensors is there
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from moeblaze_ops.kernels.known_calls import Call, KnownCalls, taken_apart

_passed: defaultdict[Callable, KnownCalls[bool]] = defaultdict(KnownCalls)


def once(check: Callable[..., None], *args: Any) -> None:
    """``check(*args)``, unless it has passed for arguments like these."""
    call = unwatched(args)
    if call is None or not _passed[check].find(call):
        check(*args)
        if call is not None:
            _passed[check].remember(call, True)


def unwatched(args: Sequence[Any]) -> Call | None:
    """The arguments of a call taken apart; None where something watches, or where a tensor is more than its numbers."""
    return None if torch.compiler.is_compiling() or _is_watched() else taken_apart(args)


def _is_watched() -> bool:
    """True if a mode, a transform, autocast, a tracer or a profiler of this thread is to see what ops are called."""
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
