"""Functions that traced code hands on, as Python's own, with guards on all that they read.

    moe(..., activation=self.act)                            where Dynamo found it, it is looked up
    moe(..., activation=lambda h: F.silu(h) * self.factor)   traced code makes it: so it is made, with what its cells hold

Dynamo takes a function for a constant where all that it holds are constants, and what it reads it guards only where it traces it.
"""

import functools
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.variables import (
    BaseListVariable,
    CellVariable,
    ConstDictVariable,
    FunctoolsPartialVariable,
    NestedUserFunctionVariable,
    SymNodeVariable,
    UserMethodVariable,
)

from moeblaze_ops.arguments.read_values import OF_TENSORS, globals_read_by, may_call, names_in, values_read_by
from moeblaze_ops.lowering.tracing.same_state import Variable, realized

__all__ = ["comptime", "function_in"]


class _Unknown(Exception):
    """What a function reads is not known before a run."""


def function_in(context: ComptimeContext, name: str) -> Callable | None:
    """The function that traced code has in a variable; None where it reads what only a run knows."""
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    reader = _Reader(tx)
    try:
        function = reader.value(variable, frozenset())
        reader.refuse_writes()
    except (_Unknown, NotImplementedError):
        return None
    for guard in reader.guards:
        install_guard(guard)
    return function


class _Reader:
    """What traced code holds, as Python would find it now."""

    def __init__(self, tx: Any) -> None:
        self.output = tx.output
        self.guards: list = []
        self.names = frozenset({"cell_contents"})

    def value(self, variable: Variable, names: frozenset[str], *, called: bool = True) -> Any:
        """What a variable stands for; ``names`` are in the code of functions that hold it, and ``called`` if they may call it."""
        variable = realized(variable)
        if variable.source is not None:
            value = variable.source.get_value({"G": self.output.root_tx.f_globals, "L": self.output.root_tx.f_locals}, {}, {})
            self._guard(variable.source, lambda now: values_read_by(now, names, called=called), value)
            return value
        match variable:
            case NestedUserFunctionVariable():
                return self._made(variable, names)
            case UserMethodVariable():
                function, owner = variable.get_function(), getattr(variable, "im_self", None) or variable.obj
                return MethodType(function, self.value(owner, names | names_in(function.__code__), called=False))
            case FunctoolsPartialVariable():
                keywords = {name: self.value(each, names) for name, each in variable.keywords.items()}
                return functools.partial(self.value(variable.func, names), *self._all(variable.args, names), **keywords)
            case BaseListVariable():
                return variable.python_type()(self._all(variable.items, names))
            case SymNodeVariable():
                return variable.evaluate_expr(self.output)
            case _:
                return variable.as_python_constant()

    def _all(self, variables: Any, names: frozenset[str]) -> Iterator[Any]:
        return (self.value(each, names) for each in variables)

    def _made(self, variable: NestedUserFunctionVariable, names: frozenset[str]) -> FunctionType:
        code, found = variable.get_code(), variable.f_globals
        names |= names_in(code)
        self.names |= names
        self._guard(GlobalStateSource(), lambda _: globals_read_by(code, found, names), None)
        cells = [self.output.side_effects.load_cell(cell) for cell in variable.closure.items] if variable.closure else []
        if variable in map(realized, cells):
            raise _Unknown
        held = zip(code.co_freevars, cells, strict=True)
        closure = tuple(CellType(self.value(cell, names, called=may_call(name, names))) for name, cell in held)
        function = FunctionType(code, found, variable.fn_name.as_python_constant(), None, closure)
        function.__defaults__ = self.value(variable.defaults, names) if variable.defaults else None
        function.__kwdefaults__ = variable.kwdefaults.as_python_constant() if variable.kwdefaults else None
        return function

    def refuse_writes(self) -> None:
        """Refuse attributes, lists and cells that traced code writes to before the call: Python would find them as they were."""
        effects = self.output.side_effects
        attributes = ((item, names) for item, names in effects.store_attr_mutations.items() if not _is_new_cell(item))
        held = (each for each in effects.id_to_variable.values() if isinstance(each, BaseListVariable | ConstDictVariable))
        is_written = any(self.names & names.keys() for _, names in attributes)
        if is_written or any(each.source is not None and effects.is_modified(each) for each in held):
            raise _Unknown

    def _guard(self, source: Any, reads: Callable[[Any], tuple], value: Any) -> None:
        """Ask at each call whether what is found at ``source`` reads what ``value`` reads now."""
        expected = reads(value)
        if any(isinstance(each, str) and each.startswith(OF_TENSORS) for each in expected):
            raise _Unknown
        self.names = self.names.union(*(names_in(each) for each in expected if isinstance(each, CodeType)))
        found = self.output.root_tx.f_globals

        def in_frame(frame: dict[str, Any]) -> bool:
            try:
                return reads(source.get_value({"G": found, "L": frame}, {}, {})) == expected
            except (AttributeError, LookupError, TypeError, ValueError):  # it is not there any more
                return False

        def reads_the_same(builder: Any, guard: Any) -> None:
            said = [f"an activation reads the same of {guard.name or 'globals'}"]
            if isinstance(value, dict):  # of which Dynamo asks for each key, and nothing else
                builder.guard_manager.root.add_lambda_guard(in_frame, said, None)
            else:
                builder.get_guard_manager(guard).add_lambda_guard(lambda now: reads(now) == expected, said, None)

        self.guards.append(source.make_guard(reads_the_same))


def _is_new_cell(item: Variable) -> bool:
    return isinstance(item, CellVariable) and item.pre_existing_contents is None
