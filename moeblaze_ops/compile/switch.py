"""The switch: ``torch.compile`` rewrites MoE layers to the fused ops, by ``enable()`` or by ``backend="moeblaze"``.

Both rewrite the graph that Dynamo captured, whole and with the bodies in it, before anything cuts it, looks it up in a cache or
differentiates it. So what was decided of a frame is in its graph, and with that in the keys of all caches. Importing this module
registers the backend and hooks around the compilation of a frame and before Inductor; none does anything until it is asked for,
and ``import moeblaze_ops`` alone imports nothing of ``torch.compile``.

A frame is first compiled in ways that only rewriting justifies (``attempts``), and as it is written where they fail.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import fx

from moeblaze_ops import config, sources
from moeblaze_ops.arguments.traced_activations import in_dynamo_by
from moeblaze_ops.compile import peft
from moeblaze_ops.compile.attempts import compiled_by_attempts, rewrite, rewrite_alone, rewritten
from moeblaze_ops.compile.records import FrameRecord, keep
from moeblaze_ops.compile.runs import noting_places
from moeblaze_ops.distributed import whole_weights
from moeblaze_ops.kernels.devices import all_that_is_asked
from moeblaze_ops.lowering.graph import operators
from moeblaze_ops.lowering.torch_internals import frames, graphs, inductor
from moeblaze_ops.ops import accumulation
from moeblaze_ops.plain_words import checkpoints_eagerly

_enabled = False


def enable() -> None:
    """Rewrite MoE layers in everything that ``torch.compile`` compiles with Inductor from now on, in every thread.

    What is already compiled stays as it is; what was left to eager mode is looked at once more. A user's own ``mode``,
    ``options`` and passes keep their meaning; passes see graphs in which layers are rewritten.
    """
    global _enabled
    if not _enabled:
        frames.look_again()
    _enabled = True
    peft.set_everywhere(True)
    graphs.install_graph_hook(_rewrite_if_enabled)


def disable() -> None:
    """Undo ``enable``: plain ``torch.compile`` leaves MoE layers alone again."""
    global _enabled
    _enabled = False
    peft.set_everywhere(False)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """A context in which ``torch.compile`` rewrites; a model compiles at its first call, which has to be inside."""
    before = _enabled
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def moeblaze_backend(
    gm: fx.GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None, **keywords: Any
) -> Callable:
    """Inductor with rewriting, whether or not ``enable()`` was called: ``torch.compile(model, backend="moeblaze")``.

    Args:
        gm, example_inputs: the captured graph.
        mode, options: as for Inductor.
    """
    backend = frames.inductor_backend(mode, options, **keywords)
    with rewritten(rewrite_alone(gm)):
        return backend(gm, example_inputs)


def on_trace() -> None:
    """What has to happen before a compiler lowers an op; the ops' fake implementations call it.

    They run while Dynamo traces, which is before any cache is looked up, and again while AOTAutograd traces, which is before
    anything is lowered. So explicit calls of the ops need no ``enable()`` for the lowerings, nor for the hooks of this module.
    """
    if inductor.inductor_is_loaded():
        install_lowerings()


@cache
def follow_functions() -> None:
    """Let compiled calls of ``moe`` take a function as it is now, and compile once more when what it reads has changed."""
    from moeblaze_ops.lowering.tracing.read_functions import comptime, function_in

    in_dynamo_by(comptime, function_in, torch.compiler.disable)


def cache_key(devices: Iterable[torch.device] = ()) -> str:
    """A digest of all that decides what is compiled beside a rewritten graph.

    That is our sources, the versions of torch and Triton, the knobs, whether gradients accumulate in place, operators that were
    declared, and what kernels read of ``devices``.
    """
    versions = f"{torch.__version__} {_triton_version()}"
    answers = sorted((str(device), *all_that_is_asked(device)) for device in devices if device.type == "cuda")
    declared = {name: call.format_node() for name, call in operators.CALLS.items()}
    settings = f"{config.snapshot()} {accumulation.is_in_use()} {declared}"
    return hashlib.sha256(f"{sources.DIGEST} {versions} {settings} {answers}".encode()).hexdigest()


@contextlib.contextmanager
def rewriting(backend: Callable, rewrite: Callable[[fx.GraphModule], Any] = rewrite) -> Iterator[None]:
    """A context in which frames are compiled for ``backend`` as for one that rewrites: it gets what ``rewrite`` makes of them."""
    entry = (backend, rewrite)
    _rewriting_backends.append(entry)
    try:
        yield
    finally:
        _rewriting_backends.remove(entry)


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@cache
def install_lowerings() -> None:
    """Give Inductor the lowerings of the ops, once."""
    from moeblaze_ops.lowering.inductor.lower_ops import register_lowerings

    register_lowerings()


def _before_lookup(devices: Iterable[torch.device]) -> str:
    """What is added to the key of a graph; what runs code from a cache finds torch as what compiled it did."""
    install_lowerings()
    return cache_key(devices)


def _rewriting_first(backend: Callable, asked_for: Callable) -> Callable:
    """``backend``, or where rewriting is asked for, one that rewrites a graph first, as a whole.

    With ``config.verify`` rewritten graphs are compared with what they were in their first run.
    """
    rewrite = _rewrite_for(asked_for)
    if rewrite is None:
        return backend

    def compile_graph(gm: fx.GraphModule, example_inputs: list) -> Callable:
        from moeblaze_ops.comparison import verified_at_first
        from moeblaze_ops.lowering.obligations.branches import always_taken

        captured = always_taken(gm) if config.verify != "off" else None
        report = rewrite(gm)
        with rewritten(report):
            compiled = backend(gm, example_inputs)
        if captured is not None and report.rewritten:
            compiled = verified_at_first(captured, compiled)
        return noting_places(gm, report, compiled)

    return compile_graph


def _rewrite_if_enabled(gm: fx.GraphModule) -> None:
    """Rewrite a graph that reaches Inductor on another way than from a frame: of a backend of the user's, or exported."""
    if _enabled:
        rewrite_alone(gm)


def _compile_frame(compile_frame: Callable[[CodeType], Any], frame: frames.Frame) -> Any:
    """Compile a frame: first with what rewriting may remove from its graph, if that is asked for."""
    breaks = frames.breaks_since()
    compiled, failure, as_written = compiled_by_attempts(compile_frame, frame) if not frame.export else (None, None, None)
    try:
        if as_written is not None:
            raise as_written
        compiled = compile_frame(frame.code) if compiled is None else compiled
    except Exception as error:
        # What stops Dynamo where it may capture more is nearer to the cause than what it never captures.
        cause = failure or error
        without_ops, in_loop = frames.says_no_ops(error), "loop" in str(error).lower()
        eager = frame.lines if frame.ends_in_eager_mode(error) else None
        reason, line = peft.error_in_its_words(cause)
        keep(FrameRecord(frame.where, reason, without_ops, line, in_loop, eager))
        raise
    for reason in filter(checkpoints_eagerly, breaks()):
        keep(FrameRecord(frame.where, reason))
    return compiled


def _compile_as_traceable(compile_frame: Callable[[CodeType], Any], frame: frames.Frame) -> Any:
    """Compile a frame, where it may be rewritten with other libraries as Dynamo can trace them."""
    if _rewrite_for(frame.backend) is None:
        return compile_frame(frame.code)
    with peft.seen_through():
        return _compile_frame(compile_frame, frame)


def _rewrite_for(backend: Callable) -> Callable[[fx.GraphModule], Any] | None:
    """What rewrites the graphs of frames that are compiled for ``backend``, None where nothing does."""
    if _enabled and frames.is_inductor(backend):
        return rewrite
    compiler = frames.compiler_of(backend)
    return next((rewrite for rewriting, rewrite in _rewriting_backends if rewriting is compiler), None)


_rewriting_backends: list[tuple[Callable, Callable[[fx.GraphModule], Any]]] = [(moeblaze_backend, rewrite)]
frames.install_frame_hook(_compile_as_traceable, _rewriting_first)
graphs.install_key_hook(_before_lookup)
graphs.keep_graphs_with_functions_of("moeblaze_ops")
frames.run_as_written(whole_weights.RunningLayer.run, calls_as_well=False)
for _talks in (whole_weights.RunningLayer.gather, whole_weights.tied):
    frames.run_as_written(_talks, calls_as_well=True)
frames.register_backend(moeblaze_backend, "moeblaze")
