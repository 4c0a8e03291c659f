"""Every knob of the package, with its default. Set them before the first call that they should affect.

A graph that ``torch.compile`` has compiled keeps the values it was compiled with; the values are part of the key of
the caches on disk, so another value never gets code that was compiled for this one.
"""

from typing import Literal

check_expert_ids: bool = False
"""Raise for expert ids other than -1 outside [0, E), at the price of a host sync in ``dispatch``."""

hopper: Literal["auto", "off"] = "auto"
"""Which kernels run on Hopper GPUs: ``auto`` takes the Gluon kernels where they cover the shapes, ``off`` never does."""

keep: Literal["preactivation", "input", "auto"] = "preactivation"
"""What an expert layer keeps for backward where the call does not say; the values are those of ``moe(keep=...)``."""

layers_in_flight: int = 1
"""Expert layers whose kept tensors exist at the same time: ``keep="auto"`` makes that many fit the free memory."""


def snapshot() -> dict[str, object]:
    """The value of every knob, by name."""
    return {name: globals()[name] for name in sorted(__annotations__)}
