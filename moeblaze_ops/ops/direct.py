"""Calls of ops that go past the dispatcher, where it would do nothing but find the implementation.

Through the dispatcher an op passes autocast, transforms, forward mode, tracers and its checks, which take longer than a small
layer's products. ``call`` looks once whether there is anything to pass:

    call(expert_up, x, ...)                          the op, which checks its arguments
    call(expert_up, x, ...)                          its implementation, for plain tensors of the same shapes
    with FlopCounterMode(): call(expert_up, x, ...)  the op, as with everything that watches

Results, gradients, what autograd keeps and errors are those of the op: both have one implementation and one gradient formula.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.geometry import geometry_of, remember
from moeblaze_ops.ops.autodiff import with_defaults


@dataclass
class _Direct:
    """What is behind the dispatcher: implementations that check nothing, and how autograd calls them."""

    on_cpu: Callable
    on_cuda: Callable
    differentiate: Callable | None
    complete: Callable[[Sequence[Any]], tuple[Any, ...]]
    checked: set[Hashable] = field(default_factory=set)


_direct: dict[torch._ops.OpOverload, _Direct] = {}


def register_direct(op: torch._ops.OpOverload, on_cpu: Callable, on_cuda: Callable, differentiate: Callable | None) -> None:
    """Let ``call`` go past the dispatcher for ``op``.

    Args:
        op: an op that checks its arguments.
        on_cpu, on_cuda: its implementations, without these checks.
        differentiate: what ``autodiff.differentiated`` made for it; None for an op that writes into its arguments.
    """
    _direct[op] = _Direct(on_cpu, on_cuda, differentiate, with_defaults(op))


def call(op: torch._ops.OpOverload, *args: Any) -> Any:
    """``op(*args)``."""
    geometry = geometry_of(args)
    direct = None if geometry is None else _direct.get(op)
    if direct is None:
        return op(*args)
    implementation = _implementation(direct, args)
    if implementation is None or geometry not in direct.checked:
        results = op(*args)
        remember(direct.checked, geometry)
        return results

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*args)

    if direct.differentiate is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return direct.differentiate(below_autograd, direct.complete(args))
    return below_autograd(*args)


def _implementation(direct: _Direct, args: Sequence[Any]) -> Callable | None:
    """That of the device of the arguments, which share one if they were checked."""
    first = next(arg for arg in args if isinstance(arg, Tensor))
    return direct.on_cpu if first.is_cpu else direct.on_cuda if first.is_cuda else None
