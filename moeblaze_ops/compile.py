"""The switch: ``torch.compile`` rewrites MoE layers to the fused ops, by ``enable()`` or by ``backend="moeblaze"``.

Both run one pass on the graph that Dynamo captured, before autograd. Importing this module registers the backend and a
hook around the compilation of a frame; neither does anything until it is asked for, and ``import moeblaze_ops`` alone
imports nothing of ``torch.compile``.

Loops over experts that select tokens with ``torch.where(mask)`` break Dynamo's graph by default, and with it the whole
frame. So a frame is first traced with such ops allowed in the graph, with numbers of the host, and with branches on data
as if they were always taken (``lowering.tracing``); then, if branches or numbers made a difference, with such ops alone.
Unless rewriting removes every one of them, and whenever anything is not proven or goes wrong, what that gave is dropped and
the frame is compiled as it would have been.
"""

import contextlib
import gc
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import fx

from moeblaze_ops import config, sources
from moeblaze_ops.lowering import torch_internals
from moeblaze_ops.lowering.tracing.branches import Branches, install, tracing

log = logging.getLogger(__name__)

NAME = "moeblaze"
_STAMP = "torch.ops.moeblaze"
_BREAK = "its graph breaks elsewhere, and what remains of it is traced on its own"

_enabled = False


@dataclass
class _Attempt:
    """A frame being compiled with ops in its graphs that only a rewrite can justify."""

    branches: Branches | None
    reports: list = field(default_factory=list)
    assumes: bool = False  # a graph of its has work that is done unasked, or numbers: it is the only one, with a layer in it
    idle: list = field(default_factory=list)  # for each report, the layers whose idle experts get zeros
    left: str | None = None
    failure: Exception | None = None  # of Dynamo, which could not trace the frame
    error: Exception | None = None  # of the rewrite itself, which raises with ``config.strict`` only


_attempt: ContextVar[_Attempt | None] = ContextVar("moeblaze_attempt", default=None)


@dataclass(frozen=True)
class GraphRecord:
    """What became of one graph: the report of its rewrite, and why the frame was compiled without it, if it was.

    ``idle`` are layers whose experts without tokens get gradients of zeros, where the program as written leaves None.
    """

    report: Any
    dropped: str | None = None
    idle: tuple = ()


@dataclass(frozen=True)
class CaptureRecord:
    """Branches that were dropped from the code of a frame, those that were left, and why it was compiled with all."""

    done: tuple[str, ...]
    left: tuple[str, ...]
    dropped: str | None = None


@dataclass(frozen=True)
class FrameRecord:
    """A frame that Dynamo gave up: where it starts, why, and the line (``file:number``) that stopped it, if it is known."""

    where: str
    reason: str
    without_ops: bool = False  # there was nothing to compile
    line: str = ""
    in_loop: bool = False  # which makes Dynamo give up the whole frame


Record = GraphRecord | CaptureRecord | FrameRecord


@dataclass(frozen=True)
class _Tried:
    """What an attempt compiled a frame to, None where it failed or is not justified, and what is to be recorded of it."""

    compiled: Any | None
    records: list[GraphRecord | CaptureRecord]
    failure: Exception | None = None
    differs: bool = False  # another attempt, without branches and numbers, may end in another way


_recent: deque[Record] = deque(maxlen=1024)
_dry_records: ContextVar[list[Record] | None] = ContextVar("moeblaze_dry_records", default=None)  # while a dry run goes on
_recordings: list[list[Record]] = []


class NotJustified(RuntimeError):
    """After rewriting, a graph still holds what only a rewrite of it would have justified."""


def enable() -> None:
    """Rewrite MoE layers in everything that ``torch.compile`` compiles with Inductor from now on, in every thread.

    What is already compiled stays as it is. Needs ``torch._inductor.config.pattern_matcher``; a user's own
    ``pre_grad_custom_pass``, ``mode`` and ``options`` keep their meaning.
    """
    global _enabled
    _enabled = True
    _follow_switch()


def disable() -> None:
    """Undo ``enable``: plain ``torch.compile`` leaves MoE layers alone again."""
    global _enabled
    _enabled = False
    _follow_switch()


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

    Raises:
        ValueError: a setting keeps the rewriting pass from running.
    """
    backend: Any = torch_internals.inductor_backend(mode, options, **keywords)
    _install_pass()
    backend.config = _with_pass(backend.config)
    if reason := torch_internals.why_passes_do_not_run(NAME, backend.config):
        raise ValueError(f"backend moeblaze: settings must let pre-grad passes run, got: {reason}")
    return backend(gm, example_inputs)


def on_trace() -> None:
    """What has to happen before a compiler caches or lowers an op; the ops' fake implementations call it.

    They run while Dynamo traces, which is before any cache is looked up, and again while AOTAutograd traces, which is
    before anything is lowered. So explicit calls of the ops need no ``enable()`` for a cache key that changes with our
    sources, nor for the lowerings.
    """
    torch_internals.stamp_cache_key(_STAMP, cache_key())
    if torch_internals.inductor_is_loaded():
        _register_lowerings()


def cache_key() -> str:
    """A digest of all that decides what is compiled: our sources, the versions of torch and Triton, the knobs."""
    versions = f"{torch.__version__} {_triton_version()}"
    return hashlib.sha256(f"{sources.DIGEST} {versions} {config.snapshot()}".encode()).hexdigest()


def recent_records() -> list[Record]:
    """Records of what was compiled most recently, oldest first; ``dry_run`` compiles nothing."""
    return list(_recent)


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """A context that collects the records of what is compiled inside; what PyTorch's caches on disk hold is not compiled."""
    records: list[Record] = []
    _recordings.append(records)
    try:
        yield records
    finally:
        _recordings.remove(records)


def dry_run(
    function: Callable, observe: Callable[[fx.GraphModule, fx.GraphModule, Any], Callable], *args: Any, **kwargs: Any
) -> tuple[Any, list[Record], list[str]]:
    """Call ``function`` with its graphs captured and rewritten as a compile would, but not compiled.

    Args:
        function: what to call; Dynamo must not have seen its code yet.
        observe: called with each graph as captured, as rewritten, and the report; returns what runs in its place.
        args, kwargs: of ``function``.

    Returns:
        What ``function`` returns, the records, and the graph breaks. What Dynamo learnt about code that it had not seen
        before is forgotten.
    """

    from moeblaze_ops.lowering.obligations.branches import always_taken

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        captured = always_taken(gm)
        return observe(captured, gm, _rewrite(gm))

    _rewriting_backends.append(backend)
    records: list[Record] = []
    token = _dry_records.set(records)
    try:
        with torch_internals.forgetting_frames(), torch_internals.counting_breaks() as breaks:
            output = torch.compile(function, backend=backend)(*args, **kwargs)
    finally:
        _dry_records.reset(token)
        _rewriting_backends.remove(backend)
    return output, records, breaks


def why_switch_has_no_effect() -> str | None:
    """The setting of torch.compile that keeps ``enable()`` from rewriting anything, or None."""
    _install_pass()
    return torch_internals.why_passes_do_not_run(NAME, _with_pass({}))


def _keep(record: Record) -> None:
    dry_records = _dry_records.get()
    for records in (_recent, *_recordings) if dry_records is None else (dry_records,):
        records.append(record)


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@cache
def _install_pass() -> None:
    torch_internals.register_pre_grad_pass(NAME, lambda gm: len(_rewrite(gm).rewritten))


@cache
def _register_lowerings() -> None:
    from moeblaze_ops.lowering.inductor.lower_ops import register_lowerings

    register_lowerings()


def _option() -> dict[str, str]:
    return {"version": cache_key()}


def _with_pass(patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor configuration patches with our pass among the ones they ask for."""
    key = torch_internals.FUSION_OPTIONS
    options = patches.get(key, getattr(torch_internals.inductor_config, key))
    return {**patches, key: {**options, NAME: _option()}}


def _verifying(backend: Callable, asked_for: Callable) -> Callable:
    """``backend``, or with ``config.verify`` one whose rewritten graphs are compared with what they were in their first run."""
    if config.verify == "off" or _dry_records.get() is not None or not _rewrites(asked_for):
        return backend

    def compile_graph(gm: fx.GraphModule, example_inputs: list) -> Callable:
        from moeblaze_ops.comparison import verified_at_first
        from moeblaze_ops.lowering.obligations.branches import always_taken

        captured, before = always_taken(gm), torch_internals.counters["moeblaze"]["rewritten"]
        compiled = backend(gm, example_inputs)
        return compiled if torch_internals.counters["moeblaze"]["rewritten"] == before else verified_at_first(captured, compiled)

    return compile_graph


def _follow_switch() -> None:
    """Bring the calling thread's configuration in line with the switch."""
    if _enabled:
        _install_pass()
        torch_internals.stamp_cache_key(_STAMP, cache_key())
    torch_internals.set_fusion_option(NAME, _option() if _enabled else None)


def _compile_frame(compile_frame: Callable[[CodeType], Any], frame: torch_internals.Frame) -> Any:
    """Compile a frame: first with what rewriting may remove from its graph, if that is asked for."""
    _follow_switch()
    tries: list[_Tried] = []
    if _may_capture(frame):
        tries = [_try(compile_frame, frame, Branches())]
        if tries[-1].compiled is None and tries[-1].differs:
            tries.append(_try(compile_frame, frame, None))
        for record in (record for tried in tries for record in tried.records):
            _keep(record)
        if tries[-1].compiled is not None:
            return tries[-1].compiled
    try:
        return compile_frame(frame.code)
    except Exception as error:
        # What stops Dynamo where it may capture more is nearer to the cause than what it never captures.
        cause = next((tried.failure for tried in tries if tried.failure is not None), error)
        without_ops, in_loop = torch_internals.says_no_ops(error), "loop" in str(error).lower()
        _keep(FrameRecord(frame.where, str(cause), without_ops, torch_internals.place_of(cause), in_loop))
        raise


def _try(compile_frame: Callable[[CodeType], Any], frame: torch_internals.Frame, branches: Branches | None) -> _Tried:
    """Compile a frame with data-dependent shapes in its graphs, and with ``branches`` on data and numbers of the host, too."""
    attempt, watched = _Attempt(branches), branches or Branches(traces=False)
    token = _attempt.set(attempt)
    compiled = None
    try:
        with tracing(watched):
            compiled = compile_frame(frame.code)
        if attempt.assumes and torch_internals.resumes(compiled):
            attempt.left = _BREAK
    except Exception as error:
        if attempt.error is not None:
            raise
        attempt.failure = None if attempt.left or watched.left else error
        attempt.left = attempt.left or str(error)
    finally:
        _attempt.reset(token)
    dropped = attempt.left = watched.left or attempt.left
    if dropped is not None:
        compiled = None
        log.debug("%s: compiling without what only a rewrite justifies: %s", frame.where, dropped)
    records: list[GraphRecord | CaptureRecord] = [
        GraphRecord(*entry) for entry in zip(attempt.reports, repeat(dropped), attempt.idle, strict=False)
    ]
    if branches and (branches.done or branches.left):
        what = "traced as always taken: its work does nothing where the program skips it"
        done = tuple(f"{line}: {what}" for line in branches.done)
        records.append(CaptureRecord(done if compiled is not None else (), (branches.left,) if branches.left else (), dropped))
    elif attempt.assumes and compiled is not None:
        done = (f"{frame.where}: captured with numbers of tokens in its graph: the layer has none",)
        records.append(CaptureRecord(done, ()))
    differs = branches is not None and (branches.differs or attempt.assumes)
    return _Tried(compiled, records, attempt.failure, differs)


def _give_up(reason: str) -> NoReturn:
    attempt = _attempt.get()
    assert attempt is not None
    attempt.left = reason
    raise NotJustified(reason)


def _may_capture(frame: torch_internals.Frame) -> bool:
    return not frame.export and not torch_internals.captures_dynamic_shapes() and _rewrites(frame.backend)


def _rewrites(backend: Callable) -> bool:
    compiler = torch_internals.compiler_of(backend)
    if any(compiler is rewriting for rewriting in _rewriting_backends):
        return True
    patches = torch_internals.inductor_patches(backend) if _enabled else None
    return patches is not None and torch_internals.why_passes_do_not_run(NAME, patches) is None


def _rewrite_before_cut(gm: fx.GraphModule, backend: Callable) -> None:
    if _rewrites(backend):
        _rewrite(gm)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """A context in which no garbage is looked for: a rewrite makes hardly any, and Dynamo holds millions of objects by then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collecting()
def _rewrite(gm: fx.GraphModule) -> Any:
    """Rewrite ``gm`` in place, and return the report; raises where a frame has to be compiled in another way."""
    from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph

    attempt = _attempt.get()
    if attempt is None:
        report = rewrite_graph(gm)
        _keep(GraphRecord(report))
        return report
    from moeblaze_ops.lowering.graph.fake_values import needs_gradient
    from moeblaze_ops.lowering.obligations import branches, check
    from moeblaze_ops.lowering.obligations.idle_experts import gradient_beside_layers, guarded_inputs, idle_experts

    traced, ends_in_break = attempt.branches, torch_internals.ends_in_break(gm)
    work: set[fx.Node] = set()
    graded: list[fx.Node] = []
    unproven = check.unproven(gm)  # of conditions, too, which are not there any more when they are discharged
    if traced is not None:
        discharged = branches.discharge(gm)
        if reason := traced.left or discharged.reason:
            traced.left = reason
            _give_up(reason)
        work, graded = discharged.work, discharged.graded
        attempt.assumes |= bool(traced.done) or check.has_numbers(gm)
    if attempt.assumes and ends_in_break:
        _give_up(_BREAK)
    if unproven is not None:
        _give_up(unproven)
    guarded = guarded_inputs(gm, work)
    try:
        report = rewrite_graph(gm)
    except Exception as error:
        attempt.error = error
        raise
    attempt.reports.append(report)
    attempt.idle.append(tuple(idle_experts(gm, guarded)))
    if sources := check.data_dependent_shapes(gm, numbers=traced is not None):
        why = check.why_they_stay(gm, rewritten=bool(report.rewritten))
        _give_up(f"{', '.join(sources)} would stay in the graph: {why}")
    if effects := check.remaining_effects(gm, work):
        _give_up(f"{', '.join(effects)} would run where the program skips it")
    if (leak := gradient_beside_layers([*filter(needs_gradient, guarded), *graded])) is not None:
        _give_up(f"a gradient would flow through {check.name_of(leak)} where the program skips it")
    if attempt.assumes and any(layer.T == 0 for layer in report.rewritten):
        _give_up("there are no tokens: the program skips all work, and its output needs no gradient")
    if attempt.assumes and not report.rewritten:
        _give_up("no layer is rewritten")
    if attempt.idle[-1] and config.idle_expert_grads == "none":
        _give_up("config.idle_expert_grads is 'none', and experts without tokens would get gradients of zeros")
    return report


_rewriting_backends: list[Callable] = [moeblaze_backend]
install()
torch_internals.install_frame_hook(_compile_frame, _verifying)
torch_internals.install_cut_hook(_rewrite_before_cut)
torch_internals.register_backend(moeblaze_backend, NAME)
