"""What was found out about a call, found again for calls like it.

Calls are alike if their tensors have the same types, dtypes, devices, shapes, strides and flags of autograd, if these stand at
the same places of the arguments, one that comes twice at both of them, and if all else in the arguments is equal. To read that
of a dozen tensors takes Python 10 us, as long as to launch three kernels. The guard with which Dynamo looks at the inputs of a
frame compares it in 1 us.

    known.remember(taken_apart((x, w)), value)
    known.find(taken_apart((y, w)))               value, for a y like x
"""

from collections.abc import Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

MOST_CALLS = 4096

_NO_STATE: list[Hashable] = []

Value = TypeVar("Value")


class Call(NamedTuple):
    """The tensors among arguments, one or more, also those in lists, tuples and dictionaries, and all else with their places.

    A tensor that comes twice is there once: Dynamo's guard takes no others.
    """

    tensors: list[Tensor]
    rest: list[Any]


def taken_apart(args: Iterable[Any]) -> Call | None:
    """The arguments of a call; None where a tensor is more than its numbers, or a value of a kind that nobody compares."""
    tensors: dict[int, Tensor] = {}
    rest: list[Any] = []
    return Call(list(tensors.values()), rest) if _take_apart(args, tensors, rest) and tensors else None


def _take_apart(args: Iterable[Any], tensors: dict[int, Tensor], rest: list[Any]) -> bool:
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.is_nested:  # has no shape
                return False
            rest.append(Tensor)
            if id(arg) in tensors:
                rest.append(list(tensors).index(id(arg)))
            tensors[id(arg)] = arg
        elif arg is None or kind is str or kind is torch.dtype:
            rest.append(arg)
        elif kind is int or kind is bool or kind is float:
            rest += (kind, arg)  # True and 1.0 are no 1
        elif kind is list or kind is tuple or kind is dict:
            rest += (list, len(arg))
            if not _take_apart(arg.values() if kind is dict else arg, tensors, rest):
                return False
        else:
            return False
    return True


class KnownCalls(Generic[Value]):
    """Values by calls; all are forgotten when they are too many."""

    def __init__(self) -> None:
        # By the shape of the first tensor: to compare the rest is faster than to hash it.
        self._calls: dict[torch.Size, list[tuple[list, list, Any, Value]]] = {}
        self._count = 0

    def find(self, call: Call, state: list[Hashable] = _NO_STATE) -> Value | None:
        """The value of a call like this one, in the same state of whatever else matters."""
        tensors, rest = call
        for known_rest, known_state, guard, value in self._calls.get(tensors[0].shape, ()):
            if known_rest == rest and known_state == state and guard.check(*tensors):
                return value
        return None

    def remember(self, call: Call, value: Value, state: list[Hashable] = _NO_STATE) -> None:
        """Give ``value`` for calls like this one."""
        if self._count >= MOST_CALLS:
            self._calls.clear()
            self._count = 0
        tensors, rest = call
        # Torch's own types: what else a tensor is (negated, of zeros, watched by a transform) is in its dispatch keys.
        sizes, strides = [[*tensor.shape] for tensor in tensors], [[*tensor.stride()] for tensor in tensors]
        guards: Any = torch._C._dynamo.guards  # whose stub has other types than it takes
        guard = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._calls.setdefault(tensors[0].shape, []).append((rest, state, guard, value))
        self._count += 1
