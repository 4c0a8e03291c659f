"""How expert weights are stored, and the one logical form that the ops take.

The ops take every weight as ``[E, G, F, D]`` (up) or ``[E, F, D]`` (down), with any strides: the storage
layouts people use are views of it, and the backward of such a view is a view too, so neither a weight nor its
gradient is ever copied. Gate and up are one tensor with G = 2, or two tensors with G = 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class UpShape(NamedTuple):
    """Sizes of an up-projection: experts E, halves G (2 when gated), hidden width F, model width D."""

    E: int
    G: int
    F: int
    D: int


def up_shape(w_up: list[Tensor]) -> UpShape:
    """Sizes of up weights in the ops' form: one ``[E, G, F, D]`` tensor, or gate and up as ``[E, 1, F, D]``."""
    E, G, F, D = w_up[0].shape
    return UpShape(E, G * len(w_up), F, D)


def up_halves(stored: list[Tensor]) -> list[Tensor]:
    """Views ``[E, F, D]`` of each half of an up weight, (gate, up) when gated, else (up,); ``[E, F]`` of its bias."""
    return [half for tensor in stored for half in tensor.unbind(1)]


def packed_up(w: Tensor, *, gated: bool, interleaved: bool, transposed: bool = False) -> Tensor:
    """View one stored up weight as ``[E, G, F, D]``, or its bias as ``[E, G, F]``.

    Args:
        w: as stored. Shape [E, G*F, D] (rows are outputs, as in ``nn.Linear``), or [E, D, G*F] if ``transposed``; of
            a bias [E, G*F].
        gated: the weight holds gate and up together.
        interleaved: gate and up alternate (gate_0, up_0, gate_1, ...) instead of standing one after the other.
        transposed: outputs are the last axis.
    """
    rows_E_GF_D = w.transpose(1, 2) if transposed else w
    if not gated:
        return rows_E_GF_D.unsqueeze(1)
    if interleaved:
        return torch.unflatten(rows_E_GF_D, 1, (-1, 2)).transpose(1, 2)
    return torch.unflatten(rows_E_GF_D, 1, (2, -1))


def down(w: Tensor, *, transposed: bool) -> Tensor:
    """View a stored down weight, [E, D, F] or [E, F, D] if ``transposed``, as ``[E, F, D]``."""
    return w if transposed else w.transpose(1, 2)
