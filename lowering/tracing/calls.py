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
            found = branches.instead(host_numbers.handled_method, tx, self, name, args, kwargs)
            if found is None:
                found = branches.instead(hit_loops.handled_method, tx, self, name, args)
            if found is None and name == "__getitem__":
                args = [as_key(args[0])]
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

    def of_subscripts(set_item):
        @functools.wraps(set_item)
        def method(self, tx, key, value):
            branches = attempt()
            return set_item(self, tx, as_key(key) if branches is not None and branches.traces else key, value)

        return method

    def of_lists(contains):
        @functools.wraps(contains)
        def iter_contains(items, search, *args, **kwargs):
            items = list(items)
            if attempt() is not None:
                hit_loops.refuse_search(items, search)
            return contains(items, search, *args, **kwargs)

        return iter_contains

    asks_identity = _asked(attempt, lambda merged, tensor, *_: merged.refuse(hash, [tensor]))
    asks_history = _asked(attempt, lambda merged, tensor, tx, attribute: merged.refuse_history(tensor, attribute))
    return {
        "BuiltinVariable.call_function": _function("fn", attempt),
        "PolyfilledFunctionVariable.call_function": _function("fn", attempt),
        "TorchInGraphFunctionVariable.call_function": _function("value", attempt),
        "NumpyVariable.call_function": _function("value", attempt),
        "ConstantVariable.call_method": of_texts,
        "TensorVariable.call_method": of_tensors,
        "TensorVariable.method___setitem__": of_subscripts,
        "TensorVariable.var_getattr|tp_getattro_impl": asks_history,
        "TensorVariable.call_obj_hasattr": asks_history,
        "TensorVariable.get_python_hash|hash_impl": asks_identity,
        "TensorVariable.is_python_equal": asks_identity,
        "utils.iter_contains": of_lists,
        "lists.iter_contains": of_lists,
    }


def _asked(attempt: Callable[[], Any], look: Callable[..., None]) -> Replacement:
    """Lets ``look`` refuse a call of a method of tensors: it gets the merged ones, the tensor, and the arguments by position."""

    def replacement(original):
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            if (branches := attempt()) is not None:
                look(branches.merged, self, *args)
            return original(self, *args, **kwargs)

        return method

    return replacement


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
                hit_loops.refuse(function, args)
                branches.merged.refuse(function, args)
            found = branches.instead(host_numbers.handled, tx, function, args, kwargs)
            return original(self, tx, args, kwargs) if found is None else found

        return call_function

    return replacement
