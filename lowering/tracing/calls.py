"""Calls that Dynamo traces, of functions and of methods: what they give for numbers that only the data tell.

    counts.tolist(), np.cumsum(counts), torch.cat(parts)        `host_numbers`
    sorted(hits), e in hits, x[token.tolist()]                  `hit_loops`
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch._dynamo import utils
from torch._dynamo.variables import BaseListVariable, BuiltinVariable, ConstantVariable, RangeVariable, TensorVariable, lists
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from moeblaze_ops.lowering.tracing import hit_loops, host_numbers
from moeblaze_ops.lowering.tracing.hit_loops import Declined, as_key
from moeblaze_ops.lowering.tracing.replaced_methods import replace_method

_IDENTIFY = {"hash_impl", "get_python_hash", "is_python_equal"}
"""What Dynamo asks of a tensor that is a key; 2.11 has no ``hash_impl``."""

_GET_ATTRIBUTE = {"var_getattr", "tp_getattro_impl", "call_obj_hasattr"}
"""What Dynamo calls to read an attribute of a tensor; the first up to 2.13, the second from 2.14 on."""

_ASK_NAMES = (locals, vars, dir)

_OF_PYTHON = (BuiltinVariable, PolyfilledFunctionVariable)


def watch_calls(attempt: Callable[[], Any]) -> None:
    """Replace what calls of functions, and of methods of tensors and texts, give while there is an ``attempt`` (`Branches`)."""
    for cls in (*_OF_PYTHON, TorchInGraphFunctionVariable, NumpyVariable):
        _watch_functions(cls, operator.attrgetter("fn" if cls in _OF_PYTHON else "value"), attempt)
    tensor_method, constant_method = TensorVariable.call_method, ConstantVariable.call_method

    @functools.wraps(tensor_method)
    def of_tensors(self, tx, name, args, kwargs):
        if (branches := attempt()) is None or not branches.traces:
            return tensor_method(self, tx, name, args, kwargs)
        branches.merged.refuse_history(self, name)
        found = branches.instead(host_numbers.handled_method, tx, self, name, args, kwargs)
        if found is None:
            found = branches.instead(hit_loops.handled_method, tx, self, name, args)
        if found is None and name == "__getitem__":
            args = [as_key(args[0])]
        return tensor_method(self, tx, name, args, kwargs) if found is None else found

    @functools.wraps(constant_method)
    def of_texts(self, tx, name, args, kwargs):
        asked = (*args, *kwargs.values())
        if (branches := attempt()) is not None and isinstance(self.value, str):
            known = all(arg.is_python_constant() for arg in asked)
            if any(map(hit_loops.holds_numbers_of_data, asked)) or (branches.traces and not known):
                raise Declined("a text is made of what only the data tell")
        return constant_method(self, tx, name, args, kwargs)

    TensorVariable.call_method, ConstantVariable.call_method = of_tensors, of_texts
    for name in _GET_ATTRIBUTE & vars(TensorVariable).keys():
        _watch_tensors(name, attempt, lambda merged, tensor, tx, attribute: merged.refuse_history(tensor, attribute))
    for name in _IDENTIFY & vars(TensorVariable).keys():
        _watch_tensors(name, attempt, lambda merged, tensor, *args: merged.refuse(hash, [tensor]))
    set_item = TensorVariable.method___setitem__

    @functools.wraps(set_item)
    def of_subscripts(self, tx, key, value):
        branches = attempt()
        return set_item(self, tx, as_key(key) if branches is not None and branches.traces else key, value)

    replace_method(TensorVariable, "method___setitem__", of_subscripts)
    contains = utils.iter_contains

    @functools.wraps(contains)
    def of_lists(items, search, *args, **kwargs):
        items = list(items)
        if attempt() is not None:
            hit_loops.refuse_search(items, search)
        return contains(items, search, *args, **kwargs)

    utils.iter_contains = lists.iter_contains = of_lists


def _watch_tensors(name: str, attempt: Callable[[], Any], look: Callable[..., None]) -> None:
    """Let ``look`` refuse a call of a method of tensors: it gets the merged ones, the tensor, and the arguments by position."""
    original = getattr(TensorVariable, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if (branches := attempt()) is not None:
            look(branches.merged, self, *args)
        return original(self, *args, **kwargs)

    replace_method(TensorVariable, name, method)


def _watch_functions(cls: type, function_of: Callable[[Any], Any], attempt: Callable[[], Any]) -> None:
    original = cls.call_function

    @functools.wraps(original)
    def call_function(self, tx, args, kwargs):
        if (branches := attempt()) is None:
            return original(self, tx, args, kwargs)
        function = function_of(self)
        if not args and branches.age and any(function is asks for asks in _ASK_NAMES):
            raise Declined("a program asks which names are set, which depends on whether a branch was taken")
        if not branches.traces:
            hit_loops.refuse_misread(function, args)
            return original(self, tx, args, kwargs)
        if cls in _OF_PYTHON and args and not kwargs:
            args = [arg.realize() if isinstance(arg, LazyVariableTracker) else arg for arg in args]
            if (found := branches.instead(hit_loops.handled, tx, function, args)) is not None:
                return found
            if function is operator.getitem and isinstance(args[0], TensorVariable | BaseListVariable | RangeVariable):
                args = [args[0], as_key(args[1])]
            hit_loops.refuse(function, args)
            branches.merged.refuse(function, args)
        found = branches.instead(host_numbers.handled, tx, function, args, kwargs)
        return original(self, tx, args, kwargs) if found is None else found

    cls.call_function = call_function
