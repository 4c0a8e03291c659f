"""Where Dynamo is watched while an attempt at a frame is made: its steps, iterators, mutations and numbers.

What is replaced does what it did where no attempt is made.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import MutationType
from torch._dynamo.variables.iter import IteratorVariable
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moeblaze_ops.lowering.torch_internals import dynamo_config
from moeblaze_ops.lowering.tracing.branches import Branches
from moeblaze_ops.lowering.tracing.calls import watch_calls
from moeblaze_ops.lowering.tracing.replaced_methods import replace_method

Translator = symbolic_convert.InstructionTranslatorBase

_current: ContextVar[Branches | None] = ContextVar("moeblaze_branches", default=None)


@contextmanager
def tracing(branches: Branches) -> Iterator[None]:
    """A context in which Dynamo traces sizes that only the data tell, but for what ``branches`` refuses.

    Where ``branches.traces``, it traces branches on data as they do, and numbers of a tensor's elements.
    """
    token = _current.set(branches)
    changed: dict[str, Any] = {"capture_dynamic_output_shape_ops": True}
    if branches.traces:
        changed["capture_scalar_outputs"] = True
    try:
        with dynamo_config.patch(changed):
            yield
    finally:
        _current.reset(token)


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _subclasses(inner)


def _before(cls: type, name: str, notice: Callable[..., None]) -> None:
    """Call ``notice(branches, self, ...)`` before each call of a method, while an attempt is made."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if (branches := _current.get()) is not None:
            notice(branches, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    replace_method(cls, name, method)


@functools.cache
def install() -> None:
    """Replace the parts of Dynamo that branches need to see; they do what they did where no attempt is made."""
    step = Translator.step

    @functools.wraps(step)
    def watched_step(self):
        branches = _current.get()
        return step(self) if branches is None else branches.step(self, step)

    Translator.step = watched_step
    watch_calls(_current.get)
    _before(TensorVariable, "method_item", lambda branches, *_, **__: branches.takes_number())
    allows_numbers = ShapeEnv.allow_scalar_outputs.fget

    def allow_scalar_outputs(self):
        if (branches := _current.get()) is not None:
            branches.takes_number()
        return allows_numbers(self)

    ShapeEnv.allow_scalar_outputs = property(allow_scalar_outputs)
    _before(symbolic_convert.InstructionTranslator, "__init__", lambda branches, tx, *_, **__: branches.reset())
    _before(Translator, "__init__", lambda branches, tx, *_, **__: branches.born(tx))
    _before(MutationType, "__init__", lambda branches, kind, *_: branches.born(kind))
    _before(IteratorVariable, "__init__", lambda branches, iterator, **_: branches.born(iterator))
    for cls in _subclasses(IteratorVariable):
        for name in ("next_variable", "tp_iternext_impl", "unpack_var_sequence", "force_unpack_var_sequence"):
            if name in vars(cls):
                _before(cls, name, lambda branches, iterator, *_: branches.moved(iterator))
    clone = IteratorVariable.clone

    def cloned(self, **kwargs):
        new = clone(self, **kwargs)
        if (branches := _current.get()) is not None:
            branches.born(new, branches.birth(self))
        return new

    IteratorVariable.clone = cloned
    _before(SideEffects, "mutation", lambda branches, _, variable: branches.mutated(variable))
    _before(SideEffects, "store_attr", lambda branches, effects, item, name, *_, **__: branches.stored(effects, item, name))
    for name in ("register_hook", "remove_hook", "track_save_for_backward"):
        _before(SideEffects, name, lambda branches, *_, **__: branches.effect())
