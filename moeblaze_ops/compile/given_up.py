"""Attempts at frames that were given up while a compiled function is called, and what follows of that for the frames inside.

    layer.forward                   given up: `counts.item()` of its attention stays in the graph
        attention.forward           on the path to it: is not tried again
        moe.forward                 beside it: is tried

What stays as long as a whole function is traced stays where less of it is. The same line on another path may have another
fate, and so may one of another module.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from moeblaze_ops import config
from moeblaze_ops.lowering.torch_internals.callers import CallPath, after_call

log = logging.getLogger(__name__)

MOST = 64
"""Attempts of one call that may be given up; what is compiled afterwards is compiled as it is written."""


@dataclass(frozen=True)
class Attempt:
    """An attempt at a frame, which is called by ``path``; what remains of a function after a graph break is a frame, too."""

    path: CallPath
    lines: range  # of the function
    module: nn.Module | None
    resumes: bool
    follows_branches: bool

    def leads_to(self, cause: "_Cause") -> bool:
        """True if the cause is in a call inside of the frame, and the attempt that met it was at a frame around this one."""
        *callers, (file, line, name) = self.path.calls
        depth = len(callers)
        if depth >= len(cause.path.calls) or self.follows_branches not in cause.ways:
            return False
        at_file, at_line, at_name = cause.path.calls[depth]
        is_inside = at_line > line if self.resumes else depth >= len(cause.attempt.path.calls)
        is_same = (at_file, at_name) == (file, name) and at_line in self.lines and tuple(callers) == cause.path.calls[:depth]
        known = cause.path.modules | self.path.modules
        return is_inside and is_same and (self.module is None or id(self.module) in known)


@dataclass(frozen=True)
class _Cause:
    path: CallPath
    attempt: Attempt
    branch: str | None  # that was left, and why
    ways: tuple[bool, ...]  # in which attempts it is met: those that follow branches, and those that do not


class _GivenUp(threading.local):
    """What was given up in the call that this thread is in."""

    def __init__(self) -> None:
        self.causes: list[_Cause] = []
        self.number = 0


_given_up = _GivenUp()


def note(attempt: Attempt, causes: Iterable[CallPath], branch: str | None, *, differs: bool) -> None:
    """Remember an attempt that was given up, and the paths from its frame to the causes that frames inside share.

    Where branches made no difference, an attempt without them meets the same.
    """
    ways = (attempt.follows_branches,) if differs or not attempt.follows_branches else (True, False)
    callers = attempt.path.calls[:-1]
    paths = dict.fromkeys(CallPath(callers + cause.calls, cause.modules) for cause in causes)
    _given_up.causes += [_Cause(path, attempt, branch, ways) for path in paths]
    _given_up.number += 1
    if _given_up.number == MOST and not config.quiet:
        log.warning("moeblaze: %d attempts at functions of this model were given up; no other one is made in this call", MOST)
    after_call(_forget)


def is_one_too_many() -> bool:
    """True if so many attempts of this call were given up that none is made any more."""
    return _given_up.number >= MOST


def known(attempt: Attempt) -> _Cause | None:
    """Why an attempt would be given up as one around it was, if it would be."""
    return next(filter(attempt.leads_to, _given_up.causes), None)


def _forget() -> None:
    _given_up.causes, _given_up.number = [], 0
