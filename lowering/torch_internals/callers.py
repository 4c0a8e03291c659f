"""Who calls what: the functions and modules of a node that was traced, of a frame that is compiled, and of this thread."""

import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn

_STANDARD_LIBRARY = os.path.dirname(operator.__file__)


def running_module() -> nn.Module | None:
    """The innermost module of which a function runs in this thread."""
    return next(_modules_on_stack(), None)


def name_among_callers(module: nn.Module) -> tuple[nn.Module, str]:
    """The outermost module that calls a module, and its name in it; without a name if that is itself."""
    names = ((outer, _name_in(outer, module)) for outer in reversed([*_modules_on_stack()]))
    return next(((outer, name) for outer, name in names if name is not None), (module, ""))


def _modules_on_stack() -> Iterator[nn.Module]:
    frame = inspect.currentframe()
    while frame is not None:
        if (module := _module_of(frame)) is not None:
            yield module
        frame = frame.f_back


def _name_in(outer: nn.Module, module: nn.Module) -> str | None:
    """The name of a module in another: blocks are found before what is inside of them is looked at."""
    level, seen = {"": outer}, {outer}
    while level:
        if (name := next((name for name, each in level.items() if each is module), None)) is not None:
            return name
        below = [(f"{name}.{part}".lstrip("."), child) for name, each in level.items() for part, child in each.named_children()]
        level = {name: child for name, child in below if child not in seen}
        seen.update(level.values())
    return None


def after_call(then: Callable[[], None]) -> None:
    """Call ``then``, once, when the outermost call of a compiled function in this thread ends; now if there is none."""
    call = _outermost_call()
    if call is None:
        then()
    elif then not in (cleanups := call.f_locals["cleanups"]):
        cleanups.append(then)


def _outermost_call() -> FrameType | None:
    """The frame of Dynamo in which a function of ``torch.compile`` was called; at its end it calls what is in ``cleanups``."""
    found, frame = None, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "cleanups" in frame.f_locals:
            found = frame
        frame = frame.f_back
    return found


def places(node: fx.Node) -> list[tuple[str, int, str]]:
    """File, line and function of every call on the stack under which a node was traced, outermost first.

    Torch and Python's library are left out: under ``set_default_device`` a file of torch's makes each call, and from torch 2.15
    on the additions of ``sum`` are traced in ``operator.py``.
    """
    found = re.findall(r'File "(.+)", line (\d+), in (.+)', node.meta.get("stack_trace") or "")
    return [(file, int(line), function) for file, line, function in found if not _is_of_library(file)]


def call_of_layer(node: fx.Node) -> str:
    """The call of a layer of ``shard_experts`` in which a node was traced: torch numbers those of a module in a graph."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    return next((call for call, (_, kind) in stack if getattr(kind, "_moeblaze_is_layer", False)), "")


def module_path_of(node: fx.Node) -> str:
    """The path of the module that made a node, empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


@dataclass(frozen=True)
class CallPath:
    """Functions that call each other, outermost first, each as file, line and name; and the ids of modules among them.

    Functions of torch and of Python's library are left out. What remains of a function after a graph break is that function.
    """

    calls: tuple[tuple[str, int, str], ...]
    modules: frozenset[int]


def path_of(node: fx.Node) -> CallPath:
    """Where a node was traced."""
    return _call_path(places(node), node.meta.get("nn_module_stack") or ())


def path_of_tracer(tx: Any) -> CallPath:
    """Where Dynamo's ``tx`` is in what it traces."""
    calls, modules = [], tx.nn_module_stack
    while tx is not None:
        calls.append((tx.f_code.co_filename, tx.lineno, tx.f_code.co_name))
        tx = tx.parent
    return _call_path(reversed(calls), modules)


def path_to(code: CodeType) -> CallPath:
    """How the function came to be called whose frame is compiled now; it is the last one, where it begins, or is resumed."""
    frame, calls, modules = inspect.currentframe(), [], set()
    while frame is not None and not _is_of_torch(frame.f_code.co_filename):  # our hooks
        frame = frame.f_back
    while frame is not None:
        if not _is_of_torch(frame.f_code.co_filename):
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            modules.add(id(_module_of(frame)))
        frame = frame.f_back
    return _call_path([*reversed(calls), (code.co_filename, code.co_firstlineno, code.co_name)], modules)


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module that a method runs for. Up to Python 3.12 a frame keeps values that were asked for: they would live as long."""
    code = frame.f_code
    if "self" in code.co_varnames[: code.co_argcount]:
        name = "self"
    elif "fn" in code.co_freevars:
        name = "fn"  # where Dynamo wraps a module of torch's own
    else:
        return None
    values = frame.f_locals
    own = values.get(name)
    if isinstance(values, dict) and sys.getrefcount(values) <= 3:  # here, of the frame and as asked: the program has none
        values.clear()
    return own if isinstance(own, nn.Module) else None


def is_resumed(code: CodeType) -> bool:
    """True if it is what remains of a function after a graph break."""
    return _RESUMES.match(code.co_name) is not None


def place_in(where: str) -> tuple[str, str, int]:
    """Name, file and line of ``function (file:line)``; what remains of a function after a break has the name of that."""
    function, _, place = where.removesuffix(")").rpartition(" (")
    file, _, line = place.rpartition(":")
    resumes = _RESUMES.match(function)
    return resumes[1] if resumes else function, file, int(line or 0)


_RESUMES = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")


def _is_of_torch(file: str) -> bool:
    return file.startswith(os.path.dirname(torch.__file__) + os.sep)


def _is_of_library(file: str) -> bool:
    return _is_of_torch(file) or os.path.dirname(file) == _STANDARD_LIBRARY


def _call_path(calls: Iterable[tuple[str, int, str]], modules: Iterable[str | int]) -> CallPath:
    kept: list[tuple[str, int, str]] = []
    for file, line, name in calls:
        if _is_of_library(file):
            continue
        if (resumes := _RESUMES.match(name)) is not None:
            name = resumes[1]
            if kept and (kept[-1][0], kept[-1][2]) == (file, name):
                kept.pop()  # the function itself, which calls what remains of it
        kept.append((file, line, name))
    ids = (str(module).partition("@")[0] for module in modules)
    return CallPath(tuple(kept), frozenset(int(own) for own in ids if own.isdigit()))


def place_of(error: Exception) -> str:
    """``file:line`` of the user's code that Dynamo could not trace, or nothing."""
    return innermost(getattr(error, "real_stack", None) or ())


def innermost(stack: Iterable[FrameSummary]) -> str:
    """``file:line`` of the innermost call that is not of torch, or nothing."""
    own = [frame for frame in stack if not _is_of_torch(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def was_in(error: Exception, file: str) -> bool:
    """True if Dynamo was in a function of the file, whose path ends so, or in what that calls."""
    return any(frame.filename.endswith(file) for frame in getattr(error, "real_stack", None) or ())
