"""What became of graphs and frames: the latest records, those of a ``recording``, and those of a dry run, kept apart."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from moeblaze_ops.explanation import module_name
from moeblaze_ops.lowering.torch_internals import callers, frames


@dataclass(frozen=True)
class Place:
    """Of what a graph is a part: the class of the module whose function it is of, its name in the model, the model's id."""

    kind: str
    inside: str
    model: int

    @classmethod
    def of(cls, module: nn.Module | None) -> "Place":
        """That of a graph of a function of ``module``, which is being compiled or runs."""
        if module is None:
            return cls("", "", 0)
        model, name = callers.name_among_callers(module)
        return cls(type(module).__name__, module_name(name), id(getattr(model, "_orig_mod", model)))

    def name_of(self, module_path: str) -> str:
        """The name of a module that Dynamo calls ``module_path``, in the model; that of the class for the model itself."""
        path = module_name(module_path)
        is_own = not module_path or module_path.startswith(("L['self']", "L['fn']"))
        return (".".join(filter(None, (self.inside, path))) or self.kind) if is_own else path


def _mode() -> str:
    module, learns = frames.compiled_module(), torch.is_grad_enabled()
    if module is None:
        return "with gradients" if learns else "without gradients"
    mode = "in training" if module.training else "in evaluation"
    return mode + ("" if module.training is learns else f", {'with' if learns else 'without'} gradients")


@dataclass(frozen=True)
class GraphRecord:
    """What became of one graph: the report of its rewrite, and why the frame was compiled without it, if it was.

    ``idle`` are layers whose experts without tokens get gradients of zeros, where the program as written leaves None.
    """

    report: Any
    dropped: str | None = None
    idle: tuple = ()
    place: Place = field(default_factory=lambda: Place.of(frames.compiled_module()))
    mode: str = field(default_factory=_mode)
    where: str = field(default_factory=lambda: getattr(frames.compiled_frame(), "where", ""))

    @property
    def places(self) -> list[Place]:
        """Those that the code made of the graph was run for."""
        return self.report.runs or [self.place]


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
    eager: range | None = None  # the lines of the function, where it runs in eager mode from now on
    place: Place = field(default_factory=lambda: Place.of(frames.compiled_module()))
    mode: str = field(default_factory=_mode)

    def ends(self, outcome: "Outcome") -> bool:
        """True if this function ran a layer: it, what remains of it after a break, or one around it, in which this was a part.

        forward, torch_dynamo_resume_in_forward_at_31, the forward that called it      but not      one that it calls
        """
        own, of = callers.place_in(self.where), callers.place_in(outcome.record.where)
        if own[:2] == of[:2] and of[2] in (self.eager or ()):
            return True
        place, inside = outcome.place, f"{self.place.inside}."
        is_same = (place.model, outcome.record.mode) == (self.place.model, self.mode)
        is_around = place.inside != self.place.inside and inside.startswith(place.inside)
        return is_same and is_around and f"{place.name_of(outcome.entry.module_path)}.".startswith(inside)


class Outcome(NamedTuple):
    """What became of a layer: its entry in the report of a graph, the record of that, and a place that the graph ran for."""

    entry: Any
    record: GraphRecord
    place: Place
    ended: bool = False  # the code that was compiled ran once, and does not any more

    @property
    def line(self) -> tuple[str, str]:
        """The layer as a place in the code."""
        return self.entry.source, self.record.mode

    @property
    def layer(self) -> tuple[int, str, str, str]:
        """The layer as a part of a model."""
        return self.place.model, self.place.name_of(self.entry.module_path), *self.line


Record = GraphRecord | CaptureRecord | FrameRecord

_recent: deque[Record] = deque(maxlen=1024)
_apart: ContextVar[list[Record] | None] = ContextVar("moeblaze_records_apart", default=None)
_recordings: list[list[Record]] = []
_listeners: list[Callable[[Record], None]] = []


def keep(record: Record) -> None:
    """Add a record to those that are kept: of a dry run to its own alone."""
    apart = _apart.get()
    for records in (_recent, *_recordings) if apart is None else (apart,):
        records.append(record)
    if apart is None:
        for listen in _listeners:
            listen(record)


def listen(listener: Callable[[Record], None]) -> None:
    """Call ``listener`` with each record of what is compiled from now on, but for those of dry runs."""
    _listeners.append(listener)


def outcomes(records: Iterable[Record]) -> Iterator[Outcome]:
    """What became of each layer; of a dropped frame the layers that were seen nowhere else."""
    found = _as_they_run(records)
    # A layer in a frame that was dropped may have been rewritten as a frame of its own, or looked at again.
    kept = [outcome for outcome in found if outcome.record.dropped is None]
    run = {outcome.layer for outcome in kept}
    settled = {outcome.line for outcome in kept if outcome.entry.reason is None}
    declined = {outcome.line for outcome in kept if outcome.entry.reason is not None}
    for _, of_graph in groupby(found, lambda outcome: id(outcome.record)):
        alike = list(of_graph)
        for outcome in alike:
            again = outcome.line in settled or (outcome.entry.reason is not None and outcome.line in declined)
            if outcome.record.dropped is None or not (outcome.layer in run if outcome.ended else again):
                yield outcome
        settled.update(outcome.line for outcome in alike if not outcome.ended)


def _as_they_run(records: Iterable[Record]) -> list[Outcome]:
    """What became of each layer of each graph, whose code may not have run, or run no more."""
    found: list[Outcome] = []
    for record in records:
        if isinstance(record, GraphRecord):
            if record.dropped is None and not record.report.runs:
                record = replace(record, dropped="what it was compiled to has not run")
            entries = record.report.rewritten + record.report.declined
            found += [Outcome(entry, record, place) for place in record.places for entry in entries]
        elif isinstance(record, FrameRecord) and record.eager is not None:
            ended: set[tuple] = set()
            for number, outcome in reversed([*enumerate(found)]):
                if outcome.record.dropped is None and (outcome.layer in ended or record.ends(outcome)):
                    ended.add(outcome.layer)
                    found[number] = outcome._replace(record=replace(outcome.record, dropped=record.reason), ended=True)
    return found


def recent_records() -> list[Record]:
    """Records of what was compiled most recently, oldest first; a dry run compiles nothing."""
    return list(_recent)


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """A context that collects the records of what is compiled inside, or comes out of PyTorch's caches on disk."""
    records: list[Record] = []
    _recordings.append(records)
    try:
        yield records
    finally:
        _recordings.remove(records)


@contextlib.contextmanager
def kept_apart() -> Iterator[list[Record]]:
    """A context of a dry run: its records are in the list, and nowhere else."""
    records: list[Record] = []
    token = _apart.set(records)
    try:
        yield records
    finally:
        _apart.reset(token)
