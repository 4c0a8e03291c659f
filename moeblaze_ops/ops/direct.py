"""Calls of ops that go past the dispatcher, where it would do nothing but find the implementation.

Through the dispatcher an op passes autocast, transforms, forward mode, tracers and its checks, which take longer than a small
layer's products. ``call`` looks once whether there is anything to pass:

    call(expert_up, x, ...)                          the op, which checks its arguments
    call(expert_up, x, ...)                          its implementation, for plain tensors of the same shapes
    with FlopCounterMode(): call(expert_up, x, ...)  the op, as with everything that watches

Results, gradients, what autograd keeps and errors are those of the op: both have one implementation and one gradient formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from moeblaze_ops.arguments.geometry import unwatched
from moeblaze_ops.kernels.known_calls import Call, KnownCalls
from moeblaze_ops.ops.autodiff import with_defaults


@dataclass
class _Direct:
    """What is behind the dispatcher: implementations that check nothing, and how autograd calls them."""

    on_cpu: Callable
    on_cuda: Callable
    differentiate: Callable | None
    complete: Callable[[Sequence[Any]], tuple[Any, ...]]
    checked: KnownCalls[bool] = field(default_factory=KnownCalls)

    @cached_property
    def repeated(self) -> Any:
        """The implementation on CUDA and what it launched; who has no GPU may have no Triton."""
        from moeblaze_ops.kernels.repeated import Repeated

        return Repeated(self.on_cuda)

    def like(self, call: Call) -> Callable | None:
        """The implementation, for a call like one that was checked."""
        if call.tensors[0].is_cuda:
            return self.repeated.like(call)
        return self.on_cpu if self.checked.find(call) else None

    def remember(self, call: Call) -> None:
        """That a call was checked."""
        if call.tensors[0].is_cuda:
            self.repeated.remember(call)
        elif call.tensors[0].is_cpu:
            self.checked.remember(call, True)


_direct: dict[torch._ops.OpOverload, _Direct] = {}


def register_direct(op: torch._ops.OpOverload, on_cpu: Callable, on_cuda: Callable, differentiate: Callable | None) -> None:
    """Let ``call`` go past the dispatcher for ``op``.

    Args:
        op: an op that checks its arguments.
        on_cpu, on_cuda: its implementations, without these checks. What the one on CUDA does besides launching kernels
            follows from the geometry of its arguments.
        differentiate: what ``autodiff.differentiated`` made for it; None for an op that writes into its arguments.
    """
    _direct[op] = _Direct(on_cpu, on_cuda, differentiate, with_defaults(op))


def call(op: torch._ops.OpOverload, *args: Any) -> Any:
    """``op(*args)``."""
    direct = _direct.get(op)
    taken = None if direct is None else unwatched(args)
    if taken is None:
        return op(*args)
    implementation = direct.like(taken)
    if implementation is None:
        results = op(*args)
        direct.remember(taken)
        return results

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*args)

    if direct.differentiate is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return direct.differentiate(below_autograd, direct.complete(args))
    return below_autograd(*args)
