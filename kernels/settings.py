"""What the user has set, as far as launchers read it. ``moeblaze_ops`` hands in its settings when it is imported."""

from typing import Literal, Protocol


class Settings(Protocol):
    """The knobs of ``moeblaze_ops.config`` that decide what launchers launch."""

    batch_invariant: bool
    check_expert_ids: bool
    hopper: Literal["auto", "off"]
    max_transient_bytes: int | None


_current: Settings


def set_settings(settings: Settings) -> None:
    """Let launchers read ``settings`` from now on, each time they launch."""
    global _current
    _current = settings


def settings() -> Settings:
    """What was handed in last."""
    return _current
