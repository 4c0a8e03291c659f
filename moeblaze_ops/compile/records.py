"""What became of graphs and frames: the latest records, those of a ``recording``, and those of a dry run, kept apart."""

import contextlib
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


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

_recent: deque[Record] = deque(maxlen=1024)
_apart: ContextVar[list[Record] | None] = ContextVar("moeblaze_records_apart", default=None)
_recordings: list[list[Record]] = []


def keep(record: Record) -> None:
    """Add a record to those that are kept: of a dry run to its own alone."""
    apart = _apart.get()
    for records in (_recent, *_recordings) if apart is None else (apart,):
        records.append(record)


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
