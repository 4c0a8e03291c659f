"""Dynamo's frames: the hook before one is traced, what came of one, and which backend was asked for."""

import builtins
import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import fx, nn
from torch._dynamo import convert_frame, exc
from torch._dynamo.backends import registry
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    cached_backends,
    innermost_backend,
    reset_code,
    set_code_exec_strategy,
    skip_code,
)
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters, graph_break_reasons
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols

from moeblaze_ops.lowering import patches
from moeblaze_ops.lowering.torch_internals import callers
from moeblaze_ops.lowering.torch_internals.room import call_with_room

__all__ = ["counters", "dynamo_config"]

_looked_at_again = convert_frame.Tracker()

_seen_frames: ContextVar[list[CodeType] | None] = ContextVar("moeblaze_seen_frames", default=None)

_compiled_frame: ContextVar["Frame | None"] = ContextVar("moeblaze_compiled_frame", default=None)


def marked_dynamic(placeholder: fx.Node) -> set[int]:
    """The axes of an input of Dynamo's graph that ``torch._dynamo.mark_dynamic`` was called for: a guard on one is an error."""
    argument = placeholder.meta.get("grapharg")
    return getattr(None if argument is None else argument.example, "_dynamo_dynamic_indices", set())


@dataclass(frozen=True)
class Frame:
    """A Python frame that Dynamo is about to compile."""

    code: CodeType
    backend: Callable
    export: bool
    fullgraph: bool
    module: nn.Module | None

    @property
    def where(self) -> str:
        return f"{self.code.co_name} ({self.code.co_filename}:{self.code.co_firstlineno})"

    @property
    def lines(self) -> range:
        numbers = [line for *_, line in self.code.co_lines() if line is not None]
        return range(min(numbers), max(numbers) + 1)

    def ends_in_eager_mode(self, error: Exception) -> bool:
        """True if Dynamo skips all that runs this code from now on, what it was compiled to before as well."""
        return (is_of_program(error) or dynamo_config.suppress_errors) and not self.fullgraph


def install_frame_hook(
    hook: Callable[[Callable[[CodeType], Any], Frame], Any], around: Callable[[Callable, Callable], Callable]
) -> None:
    """Let ``hook(compile_frame, frame)`` compile every frame from now on, by calling ``compile_frame(frame.code)``.

    It may pass other code with the same arguments and cells. Graphs go to ``around(backend, asked_for)``: what compiles them,
    and the backend that the user asked for.

    ``torch.compile`` has no public hook that runs before a frame is traced and knows its backend: a backend is called
    with finished graphs, attributes of a backend given by name are not looked at, and ``torch._dynamo.reset`` clears
    the compile callbacks. ``compile_frame`` has kept its signature from torch 2.11 to 2.15.
    """

    def compile_frame(original: Callable, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        arguments = bound.arguments
        backend = _asked_for(arguments["compiler_fn"])
        arguments["compiler_fn"] = _in_place_of(arguments["compiler_fn"], around(arguments["compiler_fn"], backend))
        code = arguments["code"]
        seen = _seen_frames.get()
        if seen is not None and not _debug_get_cache_entry_list(code):
            seen.append(code)

        def compile_code(code: CodeType) -> Any:
            arguments["code"] = code
            return original(*bound.args, **bound.kwargs)

        given = (arguments["locals"].get(name) for name in ("self", "fn"))  # "fn" where Dynamo wraps a module of torch's own
        module = next((value for value in given if isinstance(value, nn.Module)), None)
        frame = Frame(code, backend, arguments.get("export", False), arguments["one_graph"], module)
        token = _compiled_frame.set(frame)
        try:
            return call_with_room(lambda: hook(compile_code, frame))
        finally:
            _compiled_frame.reset(token)

    patches.install("frames", {"convert_frame.compile_frame": compile_frame})


def run_as_written(function: Callable, *, calls_as_well: bool) -> None:
    """Let Dynamo compile no frame of ``function`` from now on, nor what it calls; it still traces a call of it in a frame.

    ``torch.compiler.disable`` would break the graph of that frame.
    """
    if calls_as_well:
        set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    else:
        skip_code(function.__code__)


def trace_alone(function: Callable, backend: Callable) -> None:
    """Let Dynamo trace a function without arguments while it compiles a frame, and give the graph to ``backend``.

    Modes of torch functions that the program is in do not hold for it, and counters stay as they are.
    """
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr as modes

    compile_frame, names, entered = inspect.unwrap(convert_frame.compile_frame), dict(function.__globals__), modes.stack
    modes.stack = []
    try:
        with counting_breaks(), contextlib.ExitStack() as without:
            for _ in range(torch._C._len_torch_function_stack()):  # torch 2.11 reads them here
                without.enter_context(torch.overrides._pop_mode_temporarily())
            compile_frame(function.__code__, names, {}, vars(builtins), (), backend, True, set())
    finally:
        modes.stack = entered


def compiled_frame() -> Frame | None:
    """The frame that is being compiled."""
    return _compiled_frame.get()


def compiled_module() -> nn.Module | None:
    """The module whose function is being compiled."""
    frame = _compiled_frame.get()
    return None if frame is None else frame.module


def is_of_module(placeholder: fx.Node) -> bool:
    """True if an input of Dynamo's graph is a parameter or a buffer of a module: another one where another module calls."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return source is not None and (source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_fsdp_module())


def is_of_host(node: fx.Node) -> bool:
    """True if ``node`` reads a number that the program has on the host, which Dynamo hands to the graph as a tensor.

        self.temperature that changes from call to call      but not      scores.max().item()
    """
    source, number = node.args[0] if node.args else None, node.meta.get("example_value")
    argument = source.meta.get("grapharg") if isinstance(source, fx.Node) else None
    return getattr(argument, "pass_arg_as_tensor", False) and not free_unbacked_symbols(number)


def _in_place_of(original: Callable, backend: Callable) -> Callable:
    """``backend`` as something that Dynamo takes for ``original``: with its name, and attributes that name the backend inside."""
    if backend is not original:
        backend.__name__ = getattr(original, "__name__", "?")
        vars(backend).update(getattr(original, "__dict__", {}))
        backend._torchdynamo_orig_backend = original
    return backend


def _asked_for(backend: Callable) -> Callable:
    """The backend that the user asked for, inside of what Dynamo wraps around it."""
    backend = innermost_backend(backend)
    optimizer = getattr(backend, "__self__", None)
    return innermost_backend(optimizer.backend_compile_fn) if isinstance(optimizer, DDPOptimizer) else backend


def is_of_program(error: Exception) -> bool:
    """True if Dynamo found something in the program that it does not trace."""
    return isinstance(error, (exc.SkipFrame, exc.Unsupported, exc.UserError))


def says_no_ops(error: Exception) -> bool:
    """True if Dynamo gave a frame up for having no tensor operations in it."""
    return isinstance(error, exc.SkipFrame) and str(error).startswith("No ops traced")


def ends_in_break(gm: fx.GraphModule) -> bool:
    """True if a graph that Dynamo captured stops before the end of its frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def look_again() -> None:
    """Let Dynamo look once more at the frames of which it compiled nothing: what breaks a plain graph may be captured now."""
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None and code not in _looked_at_again and not _debug_get_cache_entry_list(code):
            _looked_at_again.add(code)
            reset_code(code)


@contextlib.contextmanager
def forgetting_frames(backend: Callable) -> Iterator[None]:
    """A context after which Dynamo knows neither ``backend`` nor the frames that this thread first showed it inside."""
    seen: list[CodeType] = []
    token = _seen_frames.set(seen)
    try:
        yield
    finally:
        _seen_frames.reset(token)
        for code in seen:
            reset_code(code)
        for number in [number for number, kept in list(cached_backends.items()) if compiler_of(kept) is backend]:
            del cached_backends[number]


@contextlib.contextmanager
def counting_breaks() -> Iterator[list[tuple[str, str]]]:
    """A context that collects the reasons of graph breaks and their lines, and leaves Dynamo's counters as they were."""
    breaks: list[tuple[str, str]] = []
    forget, before = counted_since(), len(graph_break_reasons)
    counters.clear()
    try:
        yield breaks
    finally:
        stacks = [(each.reason, callers.innermost(each.user_stack)) for each in graph_break_reasons[before:]]
        for reason in counters["graph_break"]:
            breaks += dict.fromkeys(each for each in stacks if each[0] == reason) or [(reason, "")]
        forget()


def counted_since() -> Callable[[], None]:
    """A function that sets Dynamo's counters back to what they are now."""
    before = copy.deepcopy(counters)

    def forget() -> None:
        counters.clear()
        counters.update(before)

    return forget


def breaks_since() -> Callable[[], list[str]]:
    """A function that says why graphs have broken since it was made."""
    before = dict(counters.get("graph_break", {}))
    return lambda: [reason for reason, count in counters.get("graph_break", {}).items() if count > before.get(reason, 0)]


def restarts(error: Exception) -> bool:
    """True if an error says that Dynamo is to trace the frame once more."""
    return isinstance(error, exc.RestartAnalysis)


def asks_for_data(error: BaseException | None) -> bool:
    """True if a compiler gave up because it needs a number that only the data tell, as Dynamo's graph alone never has one."""
    while error is not None and not isinstance(error, GuardOnDataDependentSymNode):
        error = error.__cause__ or error.__context__
    return error is not None


def register_backend(backend: Callable, name: str) -> None:
    """Register ``backend`` by name, unless its entry point is known: then ``lookup_backend`` registers what it loads."""
    if name not in registry._BACKENDS:
        registry.register_backend(backend, name=name)


def compiler_of(backend: Callable) -> Callable:
    """The function behind what ``torch.compile`` makes of its ``backend`` argument."""
    return getattr(backend, "compiler_fn", backend)


def is_inductor(backend: Callable) -> bool:
    """True if a backend is Inductor, with ``options`` and ``mode`` or without."""
    return type(backend) is torch._TorchCompileInductorWrapper or backend is registry._COMPILER_FNS.get("inductor")


def inductor_backend(mode: str | None, options: Mapping[str, Any] | None, **keywords: Any) -> Callable:
    """Inductor as ``torch.compile(mode=mode, options=options)`` would make it."""
    return torch._TorchCompileInductorWrapper(mode, options, None, **keywords)
