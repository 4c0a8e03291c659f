"""``torch.compile`` with rewriting: the switch and the backend, attempts at a frame, and records of what became of it.

Importing it registers the backend, and hooks that do nothing until they are asked for.
"""

from moeblaze_ops.compile.attempts import NotJustified, rewrite, why_no_attempts
from moeblaze_ops.compile.dry_runs import dry_run, eager_random_numbers
from moeblaze_ops.compile.records import CaptureRecord, FrameRecord, GraphRecord, Record, outcomes, recent_records, recording
from moeblaze_ops.compile.switch import (
    cache_key,
    disable,
    enable,
    enabled,
    follow_functions,
    moeblaze_backend,
    on_trace,
    rewriting,
)
from moeblaze_ops.compile.verdict import say_after_calls

__all__ = [
    "CaptureRecord",
    "FrameRecord",
    "GraphRecord",
    "NotJustified",
    "Record",
    "cache_key",
    "disable",
    "dry_run",
    "eager_random_numbers",
    "enable",
    "enabled",
    "follow_functions",
    "moeblaze_backend",
    "on_trace",
    "outcomes",
    "recent_records",
    "recording",
    "rewrite",
    "rewriting",
    "why_no_attempts",
]

say_after_calls()
