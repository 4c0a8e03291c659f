"""Every knob of the package, with its default. Set them before the first call that they should affect.

A graph that ``torch.compile`` has compiled keeps the values it was compiled with; the values are part of the key of
the caches on disk, so another value never gets code that was compiled for this one.
"""

from typing import Literal

check_expert_ids: bool = False
"""Raise for expert ids other than -1 outside [0, E), at the price of a host sync in ``dispatch``."""

hopper: Literal["auto", "off"] = "auto"
"""Which kernels run on Hopper GPUs: ``auto`` takes the Gluon kernels where they cover the shapes, ``off`` never does."""


def snapshot() -> dict[str, object]:
    """The value of every knob, by name."""
    return {name: globals()[name] for name in sorted(__annotations__)}
