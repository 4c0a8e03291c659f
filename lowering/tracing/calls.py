"""Calls that Dynamo traces, of functions and of methods: what they give for numbers that only the data tell.

    counts.tolist(), np.cumsum(counts), torch.cat(parts)        `host_numbers`
    sorted(hits), e in hits, x[token.tolist()]                  `hit_loops`
    torch.zeros(T, D, requires_grad=True)                       `leaves`
    p.to(p.dtype)                                               `conversions`
"""

import operator
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import (
    BaseListVariable,
    ConstantVariable,
    FunctoolsPartialVariable,
    NumpyVariable,
    RangeVariable,
    TensorVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from moeblaze_ops.lowering.torch_internals.graphs import is_in_order
from moeblaze_ops.lowering.tracing import conversions, hit_loops, host_numbers, leaves
from moeblaze_ops.lowering.tracing.hit_loops import Declined, as_key
from moeblaze_ops.lowering.tracing.same_state import realized

_ASK_NAMES = (locals, vars, dir)


def method_of_tensor(branches: Any, original: Callable, x: TensorVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    """What `TensorVariable.call_method` gives while ``branches`` are traced."""
    if not branches.traces:
        return original(x, tx, name, args, kwargs)
    branches.questions.refuse(getattr, [x, ConstantVariable.create(name)])
    if name in ("item", "__index__", "__int__", "__float__"):
        branches.takes_number()
    found = branches.instead(host_numbers.handled_method, tx, x, name, args, kwargs)
    if found is None:
        found = branches.instead(hit_loops.handled_method, tx, x, name, args)
    if found is None and name in ("__getitem__", "__setitem__"):
        args = [as_key(args[0]), *args[1:]]
    found = original(x, tx, name, args, kwargs) if found is None else found
    if conversions.is_itself(x, name, found):
        return x
    if name == "register_hook" and not is_in_order(tx.output.graph):
        raise Declined("a hook on a tensor of which only the data tell the size: torch 2.11 puts it before what tells that")
    return found


def function_of_python(branches: Any, original: Callable, called: Any, tx: Any, args: list, kwargs: dict) -> Any:
    """What `BuiltinVariable.call_function` gives while an attempt is made."""
    function, found = called.fn, None
    if not args and branches.age and any(function is asks for asks in _ASK_NAMES):
        raise Declined("a program asks which names are set, which depends on whether a branch was taken")
    if branches.traces:
        found, args = _given_by_python(branches, tx, function, list(map(realized, args)), kwargs)
    else:
        branches.questions.refuse(function, [*args, *kwargs.values()])
    return original(called, tx, args, kwargs) if found is None else found


def call(branches: Any, original: Callable, tx: Any, fn: Any, args: list, kwargs: dict) -> None:
    """Do what `InstructionTranslatorBase.call_function` does, for functions that are not all of Python's own."""
    called, given, named, found = realized(fn), args, kwargs, None
    while isinstance(called, FunctoolsPartialVariable):
        called, given, named = called.func, [*called.args, *given], {**called.keywords, **named}
    if branches.traces:
        branches.questions.refuse(getattr(called, "fn", getattr(called, "_fn", None)), given)
        if isinstance(called, PolyfilledFunctionVariable | TorchInGraphFunctionVariable | NumpyVariable):
            given, named = list(map(realized, given)), {name: realized(value) for name, value in named.items()}
        if isinstance(called, PolyfilledFunctionVariable):
            found, _ = _given_by_python(branches, tx, called.fn, given, named)
        elif isinstance(called, TorchInGraphFunctionVariable | NumpyVariable):
            found = branches.instead(host_numbers.handled, tx, called.value, given, named)
            found = branches.instead(leaves.handled, tx, called.value, given, named) if found is None else found
            found = branches.instead(conversions.overwrites, called) if found is None else found
    return original(tx, fn, args, kwargs) if found is None else tx.push(found)


def _given_by_python(
    branches: Any, tx: Any, function: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> tuple[VariableTracker | None, list[VariableTracker]]:
    """What a function of Python gives for numbers of the data, where it is other than Dynamo's; and what it is called with."""
    if args and not kwargs:
        if (found := branches.instead(hit_loops.handled, tx, function, args)) is not None:
            return found, args
        if function is operator.getitem and isinstance(args[0], TensorVariable | BaseListVariable | RangeVariable):
            args = [args[0], as_key(args[1])]
        branches.taken(args)
        hit_loops.refuse(function, args)
    branches.questions.refuse(function, [*args, *kwargs.values()])
    return branches.instead(host_numbers.handled, tx, function, args, kwargs), args
