"""Attempts at a frame: compiled with what only a rewrite of its graphs justifies, and dropped where that is not proven.

Loops over experts that select tokens with ``torch.where(mask)`` break Dynamo's graph by default, and with it the whole
frame. So a frame is first traced with such ops allowed in the graph, with numbers of the host, and with branches on data
as if they were always taken (``lowering.tracing``); then, if branches or numbers made a difference, with such ops alone.
Unless rewriting removes every one of them, and whenever anything is not proven or goes wrong, what that gave is dropped and
the frame is compiled as it would have been.
"""

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

from torch import fx

from moeblaze_ops import config
from moeblaze_ops.compile import given_up, peft
from moeblaze_ops.compile.records import CaptureRecord, GraphRecord, Place, keep
from moeblaze_ops.lowering import patches
from moeblaze_ops.lowering.torch_internals import callers, frames
from moeblaze_ops.lowering.torch_internals.callers import CallPath, path_of

try:
    from moeblaze_ops.lowering.tracing.branches import Branches
    from moeblaze_ops.lowering.tracing.canary import why_not_watched
    from moeblaze_ops.lowering.tracing.watch import install, tracing
except (ImportError, AttributeError) as error:
    patches.leave_off("attempts", str(error))
else:
    install()

log = logging.getLogger(__name__)

_BREAK = "its graph breaks, and what follows may write to two tensors that are one, or ask how long a list is"


class NotJustified(RuntimeError):
    """After rewriting, a graph still holds what only a rewrite of it would have justified."""


@dataclass
class _Attempt:
    """A frame being compiled with ops in its graphs that only a rewrite can justify."""

    branches: "Branches | None"
    reports: list = field(default_factory=list)
    assumes: bool = False  # a graph of its has work that is done unasked, or numbers: it is the only one, with a layer in it
    idle: list = field(default_factory=list)  # for each report, the layers whose idle experts get zeros
    left: str | None = None
    causes: list[CallPath] = field(default_factory=list)  # of giving up, where inner frames share them
    failure: Exception | None = None  # of Dynamo, which could not trace the frame
    error: Exception | None = None  # of the compiler, or of the rewrite itself, which raises with ``config.strict`` only

    def records(self, dropped: str | None) -> list[GraphRecord]:
        """What is recorded of its graphs, as far as they were looked at."""
        return [GraphRecord(report, dropped, idle) for report, idle in zip(self.reports, self.idle, strict=False)]

    def give_up(self, reason: str, at: Iterable[fx.Node] = ()) -> NoReturn:
        self.left = reason
        self.causes += map(path_of, at)
        raise NotJustified(reason)


_attempt: ContextVar[_Attempt | None] = ContextVar("moeblaze_attempt", default=None)
_report: ContextVar[Any] = ContextVar("moeblaze_report", default=None)
"""That of the graph which is being compiled, if it was rewritten."""


@dataclass(frozen=True)
class _Tried:
    """What an attempt compiled a frame to, None where it failed or is not justified, and what is to be recorded of it."""

    compiled: Any | None
    records: list[GraphRecord | CaptureRecord]
    failure: Exception | None = None
    is_as_written: bool = False  # Dynamo alone would end as it did
    differs: bool = False  # another attempt, without branches and numbers, may end in another way
    causes: list[CallPath] = field(default_factory=list)
    branch: str | None = None  # that was left, and why


def compiled_by_attempts(
    compile_frame: Callable[[CodeType], Any], frame: frames.Frame
) -> tuple[Any | None, Exception | None, Exception | None]:
    """What the first attempt that is justified compiled a frame to; or None, and what stopped Dynamo in the first that failed.

    Then comes what Dynamo raises of the frame as it is written, where an attempt has shown that: it asked for nothing else.
    None where this torch is another one than those that attempts know.
    """
    if why_no_attempts() is None and (why := why_not_watched()) is not None:
        patches.leave_off("attempts", why)
    if why_no_attempts() is not None:
        return None, None, None
    path, resumes = callers.path_to(frame.code), callers.is_resumed(frame.code)
    tries: list[_Tried] = []
    for follows_branches in (True, False):
        attempt = given_up.Attempt(path, frame.lines, frame.module, resumes, follows_branches)
        if given_up.is_one_too_many():
            break
        if (cause := given_up.known(attempt)) is not None:
            if cause.branch is not None:
                keep(CaptureRecord((), (cause.branch,), cause.branch))
            continue
        tries.append(_try(compile_frame, frame, Branches() if follows_branches else None))
        if tries[-1].compiled is not None or tries[-1].is_as_written:
            break
        given_up.note(attempt, tries[-1].causes, tries[-1].branch, differs=tries[-1].differs)
        if not tries[-1].differs:
            break
    for record in (record for tried in tries for record in tried.records):
        keep(record)
    failures = (tried.failure for tried in tries if tried.failure is not None)
    if not tries:
        return None, None, None
    return tries[-1].compiled, next(failures, None), tries[-1].failure if tries[-1].is_as_written else None


def why_no_attempts() -> str | None:
    """What of this torch keeps attempts from being made, and what is lost by that; None where they are."""
    return patches.why_off("attempts")


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
def rewrite(gm: fx.GraphModule) -> Any:
    """Rewrite ``gm`` in place, and return the report; raises where a frame has to be compiled in another way.

    What became of a frame is known to all that see a part of its graph later: it is not rewritten again.
    """
    from moeblaze_ops.lowering.inductor.pinned_routing import pin_before_partition
    from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph

    pin_before_partition()
    if (report := _report.get()) is not None:
        return report
    attempt = _attempt.get()
    if attempt is not None:
        return _rewrite_attempted(gm, attempt)
    report = rewrite_graph(gm)
    keep(GraphRecord(report))
    return report


def rewrite_alone(gm: fx.GraphModule) -> Any:
    """As ``rewrite``, where nothing tells when the code of the graph runs: it is taken to run."""
    is_part = _report.get() is not None
    report = rewrite(gm)
    if not is_part:
        report.runs.append(Place.of(frames.compiled_module()))
    return report


@contextlib.contextmanager
def rewritten(report: Any) -> Iterator[None]:
    """A context in which the graph that ``report`` is of, or parts of it, are compiled."""
    token = _report.set(report)
    try:
        yield
    except Exception as error:
        if (attempt := _attempt.get()) is not None and not frames.restarts(error):
            if frames.asks_for_data(error):
                attempt.left = f"the compiler needs a number that only the data tell: {str(error).partition(chr(10))[0]}"
            else:
                attempt.error = error
        raise
    finally:
        _report.reset(token)


def _rewrite_attempted(gm: fx.GraphModule, attempt: _Attempt) -> Any:
    from moeblaze_ops.lowering.obligations import branches, check
    from moeblaze_ops.lowering.obligations.idle_experts import guarded_inputs, idle_experts
    from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph
    from moeblaze_ops.lowering.tracing.conversions import drop_writes_of_itself

    drop_writes_of_itself(gm)
    traced = attempt.branches
    work: dict[fx.Node, fx.Node] = {}
    unproven = check.unproven(gm)  # of conditions, too, which are not there any more when they are discharged
    if traced is not None:
        is_seen = frames.ends_in_break(gm) and (traced.longer or branches.may_share_memory(gm))
        discharged = branches.discharge(gm)
        if reason := traced.left or discharged.reason:
            traced.left = reason
            attempt.give_up(reason, filter(None, [discharged.at]))
        work = discharged.work
        attempt.assumes |= bool(traced.done) or check.has_numbers(gm)
        if is_seen:
            attempt.give_up(_BREAK)
    if unproven is not None:
        attempt.give_up(unproven)
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
        is_defect = any(entry.reason == "INTERNAL" for entry in report.declined)
        shared = () if is_defect else sources
        attempt.give_up(f"{', '.join(check.named(sources))} would stay in the graph: {why}", shared)
    if effects := check.remaining_effects(gm, work):
        attempt.give_up(f"{', '.join(effects)} would run where the program skips it")
    if attempt.assumes and not report.rewritten:
        attempt.give_up("no layer is rewritten")
    if attempt.idle[-1] and config.idle_expert_grads == "none":
        attempt.give_up("config.idle_expert_grads is 'none', and experts without tokens would get gradients of zeros")
    return report


def _say_if_defect(error: Exception, where: str) -> None:
    """Say, or raise with ``config.strict``, that an attempt ended in an error of our own code."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    if innermost.f_globals.get("__name__", "").partition(".")[0] != "moeblaze_ops":
        return
    if config.strict:
        raise error
    log.warning("%s: compiled as it is written after an error of ours, please report it:", where, exc_info=error)


def _try(compile_frame: Callable[[CodeType], Any], frame: frames.Frame, branches: "Branches | None") -> _Tried:
    """Compile a frame with data-dependent shapes in its graphs, and with ``branches`` on data and numbers of the host, too."""
    attempt, watched = _Attempt(branches), branches or Branches(traces=False)
    token, forget = _attempt.set(attempt), frames.counted_since()
    compiled = None
    try:
        with tracing(watched):
            compiled = compile_frame(frame.code)
    except Exception as error:
        if attempt.error is not None:
            for record in attempt.records(None):
                keep(record)
            raise
        if not (attempt.left or watched.left):
            attempt.failure = error
            _say_if_defect(error, frame.where)
        attempt.left = attempt.left or str(error)
    finally:
        _attempt.reset(token)
    left = peft.branch_in_its_words(watched.left)
    dropped = attempt.left = left or attempt.left
    differs = branches is not None and (branches.differs or attempt.assumes)
    is_asked = differs or watched.takes_sizes or left
    is_as_written = not is_asked and attempt.failure is not None and frames.is_of_program(attempt.failure)
    if dropped is not None:
        compiled = None
        if not is_as_written:
            forget()
        log.debug("%s: compiling without what only a rewrite justifies: %s", frame.where, dropped)
    records: list[GraphRecord | CaptureRecord] = [*attempt.records(dropped)]
    if branches and (branches.done or left):
        what = "compiled without the branch; proven to make no difference"
        done = tuple(f"{line}: {what}" for line in branches.done)
        records.append(CaptureRecord(done if compiled is not None else (), (left,) if left else (), dropped))
    elif attempt.assumes and compiled is not None:
        done = (f"{frame.where}: captured with numbers of tokens in its graph: the layer has none",)
        records.append(CaptureRecord(done, ()))
    return _Tried(compiled, records, attempt.failure, is_as_written, differs, [*attempt.causes, *watched.causes], left)
