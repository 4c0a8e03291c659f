"""Calls that Dynamo traces, of functions and of methods: what they give for numbers that only the data tell.

    counts.tolist(), np.cumsum(counts), torch.cat(parts)        `host_numbers`
    sorted(hits), e in hits, x[token.tolist()]                  `hit_loops`
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import BaseListVariable, RangeVariable, TensorVariable
from torch._dynamo.variables.lazy import LazyVariableTracker

from moeblaze_ops.lowering.patches import Replacement
from moeblaze_ops.lowering.tracing import hit_loops, host_numbers
from moeblaze_ops.lowering.tracing.hit_loops import Declined, as_key

_ASK_NAMES = (locals, vars, dir)


def replaced_calls(attempt: Callable[[], Any]) -> dict[str, Replacement]:
    """What calls of functions, and of methods of tensors and texts, become while there is an ``attempt`` (`Branches`)."""

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

    def of_texts(constant_method):
        @functools.wraps(constant_method)
        def call_method(self, tx, name, args, kwargs):
            asked = (*args, *kwargs.values())
            if (branches := attempt()) is not None and isinstance(self.value, str):
                known = all(arg.is_python_constant() for arg in asked)
                if any(map(hit_loops.holds_numbers_of_data, asked)) or (branches.traces and not known):
                    raise Declined("a text is made of what only the data tell")
            return constant_method(self, tx, name, args, kwargs)

        return call_method

    return {
        "BuiltinVariable.call_function": _function("fn", attempt),
        "PolyfilledFunctionVariable.call_function": _function("fn", attempt),
        "TorchInGraphFunctionVariable.call_function": _function("value", attempt),
        "NumpyVariable.call_function": _function("value", attempt),
        "ConstantVariable.call_method": of_texts,
        "TensorVariable.call_method": of_tensors,
    }


def _function(attribute: str, attempt: Callable[[], Any]) -> Replacement:
    """Lets a call of a function, which is an ``attribute`` of Dynamo's variable, give what it gives for numbers."""
    is_of_python = attribute == "fn"

    def replacement(original):
        @functools.wraps(original)
        def call_function(self, tx, args, kwargs):
            if (branches := attempt()) is None:
                return original(self, tx, args, kwargs)
            function = getattr(self, attribute)
            if not args and branches.age and any(function is asks for asks in _ASK_NAMES):
                raise Declined("a program asks which names are set, which depends on whether a branch was taken")
            if not branches.traces:
                hit_loops.refuse_misread(function, args)
                return original(self, tx, args, kwargs)
            if is_of_python and args and not kwargs:
                args = [arg.realize() if isinstance(arg, LazyVariableTracker) else arg for arg in args]
                if (found := branches.instead(hit_loops.handled, tx, function, args)) is not None:
                    return found
                if function is operator.getitem and isinstance(args[0], TensorVariable | BaseListVariable | RangeVariable):
                    args = [args[0], as_key(args[1])]
                branches.taken(args)
                hit_loops.refuse(function, args)
                branches.merged.refuse(function, args)
            found = branches.instead(host_numbers.handled, tx, function, args, kwargs)
            return original(self, tx, args, kwargs) if found is None else found

        return call_function

    return replacement
