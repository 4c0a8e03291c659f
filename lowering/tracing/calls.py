"""Calls that Dynamo traces, of functions and of methods: what they give for numbers that only the data tell.

    counts.tolist(), np.cumsum(counts), torch.cat(parts)        `host_numbers`
    sorted(hits), e in hits, x[token.tolist()]                  `hit_loops`
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import BaseListVariable, FunctoolsPartialVariable, NumpyVariable, RangeVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from moeblaze_ops.lowering.patches import Replacement
from moeblaze_ops.lowering.tracing import hit_loops, host_numbers
from moeblaze_ops.lowering.tracing.hit_loops import Declined, as_key
from moeblaze_ops.lowering.tracing.same_state import realized

_ASK_NAMES = (locals, vars, dir)


def replaced_calls(attempt: Callable[[], Any]) -> dict[str, Replacement]:
    """What calls of functions, and of methods of tensors, become while there is an ``attempt`` (`Branches`)."""

    def of_tensors(tensor_method):
        @functools.wraps(tensor_method)
        def call_method(self, tx, name, args, kwargs):
            if (branches := attempt()) is None or not branches.traces:
                return tensor_method(self, tx, name, args, kwargs)
            branches.merged.refuse_history(self, name)
            if name in ("item", "__index__", "__int__", "__float__"):
                branches.takes_number()
            found = branches.instead(host_numbers.handled_method, tx, self, name, args, kwargs)
            if found is None:
                found = branches.instead(hit_loops.handled_method, tx, self, name, args)
            if found is None and name in ("__getitem__", "__setitem__"):
                args = [as_key(args[0]), *args[1:]]
            return tensor_method(self, tx, name, args, kwargs) if found is None else found

        return call_method

    def of_builtins(call_builtin):
        @functools.wraps(call_builtin)
        def call_function(self, tx, args, kwargs):
            if (branches := attempt()) is None:
                return call_builtin(self, tx, args, kwargs)
            function = self.fn
            if not args and branches.age and any(function is asks for asks in _ASK_NAMES):
                raise Declined("a program asks which names are set, which depends on whether a branch was taken")
            hit_loops.refuse_text(function, [*args, *kwargs.values()], traces=branches.traces)
            if not branches.traces:
                hit_loops.refuse_comparison(function, args)
                return call_builtin(self, tx, args, kwargs)
            found, args = _given(branches, tx, function, list(map(realized, args)), kwargs, is_of_python=True)
            return call_builtin(self, tx, args, kwargs) if found is None else found

        return call_function

    def of_instructions(call):
        @functools.wraps(call)
        def call_function(self, fn, args, kwargs):
            found = None
            if (branches := attempt()) is not None and branches.traces:
                called, given, named = realized(fn), args, kwargs
                while isinstance(called, FunctoolsPartialVariable):
                    called, given, named = called.func, [*called.args, *given], {**called.keywords, **named}
                if isinstance(called, PolyfilledFunctionVariable):
                    found, _ = _given(branches, self, called.fn, list(map(realized, given)), named, is_of_python=True)
                elif isinstance(called, TorchInGraphFunctionVariable | NumpyVariable):
                    found, _ = _given(branches, self, called.value, given, named)
            return call(self, fn, args, kwargs) if found is None else self.push(found)

        return call_function

    return {
        "BuiltinVariable.call_function": of_builtins,
        "InstructionTranslatorBase.call_function": of_instructions,
        "TensorVariable.call_method": of_tensors,
    }


def _given(
    branches: Any,
    tx: Any,
    function: Any,
    args: list[VariableTracker],
    kwargs: dict[str, VariableTracker],
    *,
    is_of_python: bool = False,
) -> tuple[VariableTracker | None, list[VariableTracker]]:
    """What a function gives for numbers that only the data tell, where it is other than Dynamo's; and what it is called with."""
    if is_of_python and args and not kwargs:
        if (found := branches.instead(hit_loops.handled, tx, function, args)) is not None:
            return found, args
        if function is operator.getitem and isinstance(args[0], TensorVariable | BaseListVariable | RangeVariable):
            args = [args[0], as_key(args[1])]
        branches.taken(args)
        hit_loops.refuse(function, args)
        branches.merged.refuse(function, args)
    return branches.instead(host_numbers.handled, tx, function, args, kwargs), args
