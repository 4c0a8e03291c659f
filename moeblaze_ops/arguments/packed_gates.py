"""From a method of an experts module, which takes gate and up packed in one tensor, to the formula that it computes.

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)                                # or gate_up[..., ::2], gate_up[..., 1::2]
        return self.act_fn(gate.clamp(max=self.limit)) * up                # "silu(clamp(g, None, 7.0)) * u"

The method is traced as any activation is, on rows that can be taken apart in these two ways and in no other, and on a module
that has the numbers which it may read. What it does besides (a branch on values, an attribute that is set) is no formula.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from moeblaze_ops.arguments.traced_activations import trace_activation


@functools.cache
def formula_of_gate(
    gate: Callable, numbers: tuple[tuple[str, Any], ...], act_fn: Callable | None
) -> tuple[str, bool] | str:
    """The activation that ``gate(self, gate_up)`` is, and whether it packs the halves interleaved; else why it is none.

    Args:
        gate: a method as found on its class.
        numbers: names and values of what it may read of ``self`` besides ``act_fn``.
        act_fn: ``self.act_fn`` as a function of tensors; None where there is none.
    """
    rows: list[_PackedRows] = []

    def of_halves(gate_half: Tensor, up_half: Tensor) -> Tensor:
        rows.append(_PackedRows(gate_half, up_half))
        return gate(_Frozen(**dict(numbers), **({} if act_fn is None else {"act_fn": act_fn})), rows[-1])

    of_halves.__qualname__ = gate.__qualname__
    try:
        text = trace_activation(of_halves)
    except ValueError as error:
        return str(error)
    return (text, rows[-1].interleaved) if rows[-1].interleaved is not None else "its halves are not taken apart"


class _Frozen(SimpleNamespace):
    """The gate's ``self``: what it may read, and nothing that it may write."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"it sets {name}")


class _PackedRows:
    """The packed rows: they can be taken apart in two halves, in one of two ways."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self._halves = gate, up
        self.interleaved: bool | None = None

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, Tensor]:
        if (chunks, dim) != (2, -1):
            raise ValueError(f"it takes chunk({chunks}, {dim}) of what is packed")
        return self._taken(interleaved=False)

    def __getitem__(self, index: Any) -> Tensor:
        for half, every_other in zip(self._taken(interleaved=True), _EVERY_OTHER, strict=True):
            if index in every_other:
                return half
        raise ValueError(f"it takes [{index}] of what is packed")

    def _taken(self, *, interleaved: bool) -> tuple[Tensor, Tensor]:
        if self.interleaved not in (None, interleaved):
            raise ValueError("it takes the halves apart in two ways")
        self.interleaved = interleaved
        return self._halves


_EVERY_OTHER = [(..., slice(None, None, 2)), (..., slice(0, None, 2))], [(..., slice(1, None, 2))]
"""Subscripts that give the gate, and those that give the up half."""
