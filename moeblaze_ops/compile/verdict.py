"""One line on what was compiled: of how many layers were rewritten, and which were left, when the call that compiled them ends.

A call is the outermost one of a function of ``torch.compile``. Functions behind graph breaks are compiled inside of it, so a
layer that was dropped with one function may still be rewritten with another. A line that was said is not said again: neither for
the next of 48 blocks that are compiled one by one, whose name has another number, nor when something is compiled anew.
"""

import logging
import re
import sys
import threading

from moeblaze_ops import config
from moeblaze_ops.compile.records import CaptureRecord, FrameRecord, Record, listen, outcomes
from moeblaze_ops.explanation import folded, frame_name, short_place
from moeblaze_ops.lowering.torch_internals import callers
from moeblaze_ops.plain_words import checkpoints_eagerly

log = logging.getLogger(__name__)

_SHOWN = 3
"""Names that a line holds at most."""

_said: set[str] = set()


class _Unsaid(threading.local):
    """Records of the calls that this thread is in."""

    def __init__(self) -> None:
        self.records: list[Record] = []


_unsaid = _Unsaid()


def say_after_calls() -> None:
    """Log a line after each call that compiled layers: at warning level where some were left, at info level else."""
    listen(_take)


def _take(record: Record) -> None:
    _unsaid.records.append(record)
    callers.after_call(_say)


def _say() -> None:
    records, _unsaid.records = _unsaid.records, []
    if config.quiet or sys.exc_info()[0] is not None:  # an error says more
        return
    line, left = verdict(records)
    pattern = re.sub(r"\.\d+\b", ".*", line)
    if line and pattern not in _said:
        _said.add(pattern)
        log.log(logging.WARNING if left else logging.INFO, "%s", line)


def verdict(records: list[Record]) -> tuple[str, bool]:
    """The line on these records, empty where there was nothing like a layer; and whether anything was left."""
    rewritten, left = [], []
    for entry, record, place, _ in outcomes(records):  # blocks of equal code share a graph
        name = place.name_of(entry.module_path) or short_place(entry.source)
        if entry.reason is None and record.dropped is None:
            rewritten.append(name)
        else:
            left.append((name, entry.reason or "its function runs as written"))
    eager, changing = _eager(records), _changing(records)
    if not (rewritten or left or eager or changing):
        return "", False
    parts = [f"{len(rewritten)} of {len(rewritten) + len(left)} layers rewritten" if rewritten or left else "no layer was found"]
    if left:
        reasons = dict.fromkeys(reason for _, reason in left)
        named = [f"{name} ({reason})" for reason in reasons for name in folded(n for n, r in left if r == reason)]
        parts.append(f"{len(left)} left: {_shown(named)}")
    if eager:
        parts.append(f"left to eager mode, for a branch on data: {_shown(eager)}")
    if changing:
        parts.append(f"left to eager mode, with all that it checkpoints: {_shown(changing)}")
    if left or eager or changing:
        parts.append("moeblaze_ops.report() says more")
    else:
        parts[0] += f": {_shown(folded(rewritten))}"
    return f"moeblaze: {'; '.join(parts)}", bool(left or eager or changing)


def _eager(records: list[Record]) -> list[str]:
    """Functions that Dynamo gave up, with branches on data that no proof dissolved: they may be loops over experts."""
    found: dict[str, None] = {}
    has_branch = False
    for record in records:
        if isinstance(record, CaptureRecord):
            has_branch |= bool(record.left)
        elif isinstance(record, FrameRecord):
            if has_branch and not (record.without_ops or checkpoints_eagerly(record.reason)):
                found[frame_name(record.where)] = None
            has_branch = False
    return list(found)


def _changing(records: list[Record]) -> list[str]:
    """Functions of which Dynamo compiles nothing that they checkpoint: there may be layers in it."""
    frames = [record for record in records if isinstance(record, FrameRecord)]
    return list(dict.fromkeys(frame_name(frame.where) for frame in frames if checkpoints_eagerly(frame.reason)))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
