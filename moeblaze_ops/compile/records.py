"""What became of graphs and frames: the latest records, those of a ``recording``, and those of a dry run, kept apart."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

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


def outcomes(records: Iterable[Record]) -> Iterator[tuple[Any, GraphRecord]]:
    """What became of each layer, and the record of its graph; of a dropped frame the layers that were seen nowhere else."""
    graphs = [record for record in records if isinstance(record, GraphRecord)]
    # A layer in a frame that was dropped may have been rewritten as a frame of its own, or looked at again.
    kept = [(entry, record) for record in graphs if record.dropped is None for entry in record.report.candidates]
    settled = {(entry.source, record.mode) for entry, record in kept if entry.reason is None}
    declined = {(entry.source, record.mode) for entry, record in kept if entry.reason is not None}
    for record in graphs:
        entries = record.report.rewritten + record.report.declined
        for entry in entries:
            line = entry.source, record.mode
            again = line in settled or (entry.reason is not None and line in declined)
            if record.dropped is None or not again:
                yield entry, record
        settled.update((entry.source, record.mode) for entry in entries)


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
