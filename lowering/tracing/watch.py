"""Where Dynamo is watched while an attempt at a frame is made: its steps, iterators, mutations and numbers.

What is replaced does what it did where no attempt is made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering import patches
from moeblaze_ops.lowering.patches import Replacement
from moeblaze_ops.lowering.torch_internals.frames import dynamo_config
from moeblaze_ops.lowering.tracing import calls
from moeblaze_ops.lowering.tracing.branches import Branches
from moeblaze_ops.lowering.tracing.einsum_paths import paths_of_any_sizes

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
        with dynamo_config.patch(changed), paths_of_any_sizes():
            yield
    finally:
        _current.reset(token)


def _instead(do: Callable[..., Any]) -> Replacement:
    """Calls ``do(branches, method, self, ...)`` in the place of a method, while an attempt is made."""

    def method(original: Callable, *args: Any, **kwargs: Any) -> Any:
        branches = _current.get()
        return original(*args, **kwargs) if branches is None else do(branches, original, *args, **kwargs)

    return method


def _before(notice: Callable[..., None]) -> Replacement:
    """Calls ``notice(branches, self, ...)`` before each call of a method, while an attempt is made."""

    def method(original: Callable, *args: Any, **kwargs: Any) -> Any:
        if (branches := _current.get()) is not None:
            notice(branches, *args, **kwargs)
        return original(*args, **kwargs)

    return method


def install() -> None:
    """Replace the parts of Dynamo that branches need to see; they do what they did where no attempt is made."""
    patches.install(
        "attempts",
        {
            "InstructionTranslatorBase.step": _instead(lambda branches, step, tx: branches.step(tx, step)),
            "VariableTracker.__init__": _before(lambda branches, variable, **given: branches.made(variable, **given)),
            "IteratorVariable.next_variable|tp_iternext_impl": _before(lambda branches, iterator, *_: branches.moved(iterator)),
            "SideEffects.mutation": _before(lambda branches, _, variable: branches.mutated(variable)),
            "ShapeEnv.allow_scalar_outputs": _before(lambda branches, *_: branches.takes_number()),
            "ShapeEnv.allow_dynamic_output_shape_ops": _before(lambda branches, *_: branches.takes_size()),
            "TensorVariable.get_python_hash|hash_impl": _before(
                lambda branches, tensor, *_: branches.questions.refuse(hash, [tensor])
            ),
            "BuiltinVariable.call_function": _instead(calls.function_of_python),
            "InstructionTranslatorBase.call_function": _instead(calls.call),
            "TensorVariable.call_method": _instead(calls.method_of_tensor),
        },
    )
    patches.install("kept", {"_CacheKeyState.convert_sym_int": _before(lambda *given: _keep_nothing(given[-1]))})
    patches.install("cuts", {"fake_impls._compute_slice_index": _instead(lambda _, bound, *given: _cut(bound(*given), *given))})


def _keep_nothing(size: torch.SymInt) -> None:
    """Let torch compute what an operator gives for a size that only the data tell, and neither look for it nor keep it."""
    if free_unbacked_symbols(size):
        raise fake_tensor._BypassDispatchCache("a size that only the data tell")


def _cut(bound: Any, size: Any, index: Any) -> Any:
    """What a bound of a slice is, by what torch says; the smaller of both numbers where it does not say: rows[:C]."""
    return torch.sym_min(index, size) if bound is None and isinstance(index, int) and index >= 0 else bound
