"""What the CPU implementations share: the rows of one expert at a time, their routing weights, the dtype of sums."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import require


def segments(offsets_E1: Tensor, num_rows: int, with_empty: bool = False) -> Iterator[tuple[int, slice]]:
    """Each expert and the slice of the ``num_rows`` rows it owns.

    Raises:
        ValueError: the offsets are damaged: rows would belong to no expert or to two, and stay uninitialised.
    """
    offsets = offsets_E1.tolist()
    rises = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= num_rows
    require(rises, "routing", "offsets_E1", f"rise from 0 to at most {num_rows} rows, as dispatch gives it", offsets)
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if with_empty or end > start:
            yield expert, slice(start, end)


def row_weights(weights_TK: Tensor | None, slots: Tensor) -> Tensor | None:
    """The routing weight of each row as a column, in the dtype of the sums."""
    if weights_TK is None:
        return None
    return weights_TK.reshape(-1)[slots.long()].unsqueeze(1).to(sum_dtype(weights_TK))


def sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
