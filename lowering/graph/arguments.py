"""Arguments of torch's functions that are written in Python, by their names wherever a call has them.

    F.hardsigmoid(x, True), F.hardsigmoid(x, inplace=True)          argument_of(node, "inplace") is True
"""

import inspect
from functools import cache
from types import FunctionType
from typing import Any

from torch import fx

_RUNNING = ("running_mean", "running_var")
_WRITES: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch_norm": ("training", _RUNNING), "instance_norm": ("use_input_stats", _RUNNING),
    "embedding": ("max_norm", ("weight",)), "embedding_bag": ("max_norm", ("weight", "input")),
}  # fmt: skip
"""Functions that write to some of their arguments, whatever their names say, and the argument that says that they do."""


def argument_of(node: fx.Node, name: str) -> Any:
    """What a call gives as ``name``, or what it is if it is not given; None where nothing is known of such an argument."""
    if name in node.kwargs:
        return node.kwargs[name]
    if node.op != "call_function" or not isinstance(node.target, FunctionType):
        return None
    place, default = _parameters(node.target).get(name, (None, None))
    return default if place is None or place >= len(node.args) else node.args[place]


@cache
def _parameters(function: FunctionType) -> dict[str, tuple[int, Any]]:
    """The places and the defaults of a function's arguments, by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # it bears the name of one that is not written in Python
        return {}
    return {own.name: (i, own.default if own.default is not own.empty else None) for i, own in enumerate(parameters)}


def written_arguments(node: fx.Node, name: str) -> list[Any]:
    """What ``name``, an operator of torch, writes to by the arguments of a call, beside its first one."""
    written = [argument_of(node, "out")]
    if name in _WRITES and isinstance(node.target, FunctionType):
        flag, statistics = _WRITES[name]
        writes = argument_of(node, flag) not in (None, False)
        written += [argument_of(node, own) for own in statistics] if writes else []
    return written
