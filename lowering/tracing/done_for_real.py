"""What Dynamo does for real while it traces, so that an attempt that is given up would have done it as well.

    self.up = nn.LazyLinear(8)              its parameters are made where it is first called
    @torch._dynamo.assume_constant_result   the function is called, and its result is a constant of the graph

An attempt is given up before an instruction has either at hand.
"""

import functools
from types import FunctionType, MethodType
from typing import Any

from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import NullVariable
from torch.nn.modules.lazy import LazyModuleMixin

from moeblaze_ops.lowering.tracing.hit_loops import Declined

_NO_FUNCTIONS = frozenset((ConstantVariable, TensorVariable, NullVariable, type(None)))
"""What is on a stack and is never called; None is the format of a text, in torch 2.11."""

_MARK = "_dynamo_marked_constant"
_WITHOUT_EFFECT = ("torch.", "moeblaze_ops.")


class DoneForReal(Declined):
    """Tracing has an effect on the program, whatever was traced before."""


def refuse_what_is_done_for_real(stack: list[VariableTracker | None]) -> None:
    """Give the attempt up where what is on top of the stack has an effect on the program when Dynamo traces a call of it."""
    if not stack or type(stack[-1]) in _NO_FUNCTIONS:
        return
    value = _value(stack[-1])
    if isinstance(value, LazyModuleMixin) and hasattr(value, "_initialize_hook"):
        raise DoneForReal("a lazy module is initialised while it is traced")
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType) and _MARK in vars(function) and not function.__module__.startswith(_WITHOUT_EFFECT):
        raise DoneForReal("a function whose result is assumed to be constant is called while it is traced")


def _value(variable: VariableTracker) -> Any:
    """The object of the program that a variable of Dynamo's stands for, where it is a module or a function."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        value = variable.original_value()
        return value.func if isinstance(value, functools.partial) else value
    known = vars(variable.realize() if isinstance(variable, LazyVariableTracker) else variable)
    return _value(known["func"]) if isinstance(known.get("func"), VariableTracker) else known.get("value", known.get("fn"))
