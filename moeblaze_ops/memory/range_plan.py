"""Ranges of rows behind the first one, once it is known where the rows of each expert begin.

By then the weight gradients are allocated, and those of the experts behind a range are not written yet: dh and the activation
of the range fit there, so that it is larger than the limit alone allows. It ends where an expert's rows end, if that is not
much sooner: an expert that is cut has its weight gradient read and written once more.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from moeblaze_ops.memory import row_ranges
from moeblaze_ops.memory.row_ranges import RangeSizes

_ALIGNMENT = 128
"""Elements at a multiple of which a tensor begins in a gradient: more than TMA asks for."""


_SHORTEST = 3
"""A range that ends where an expert does may be shorter by this factor than one that cuts an expert."""


class Plan(NamedTuple):
    """The next range of rows, and flat tensors in which its dh and its activation go; None for one of their own."""

    rows: range
    dh: Tensor | None
    wa: Tensor | None

    def column_bytes(self, sizes: RangeSizes, limit: int) -> int:
        """What is left for the rows that are summed to the gradient of x."""
        return limit - (sizes.dh * len(padded(self.rows)) if self.dh is None else 0)


def padded(rows: range) -> range:
    """The rows that buffers of a range have: few sizes for any routing, and addresses that are aligned."""
    return range(rows.start, rows.start + -(-len(rows) // row_ranges.ROW_BLOCK) * row_ranges.ROW_BLOCK)


class Planner:
    """Takes range after range of the rows up to ``end``.

    Args:
        offsets: where each expert's rows begin and the last one's end, E + 1 numbers.
        gradients: weight gradients that are written expert by expert, [E, ...] each.
        end: the last range's end; no smaller than the last of the offsets.
    """

    def __init__(self, offsets: Sequence[int], gradients: Sequence[Tensor], sizes: RangeSizes, limit: int, end: int) -> None:
        self.offsets, self.sizes, self.limit, self.end = offsets, sizes, limit, end
        self.num_experts = len(offsets) - 1
        # Others are interleaved with those of experts that are written.
        self.flat = [g.as_strided((g.numel(),), (1,)) for g in gradients if _is_expert_by_expert(g)]

    def take(self, start: int) -> Plan:
        """The largest range from ``start`` on that fits, or a smaller one that ends where an expert does."""
        rows, whole = self._largest_cut(start), self._largest_whole(start)
        if rows.stop < self.end and _SHORTEST * len(whole) >= len(rows):
            rows = whole
        places = self._place(rows) or (None, None)
        return Plan(rows, *(None if place is None else self.flat[place[0]][place[1] :] for place in places))

    def _largest_cut(self, start: int) -> range:
        num_blocks = -(-(self.end - start) // row_ranges.ROW_BLOCK)
        too_many = bisect.bisect_left(range(1, num_blocks + 1), True, key=lambda n: self._place(self._rows(start, n)) is None)
        return self._rows(start, max(1, too_many))

    def _largest_whole(self, start: int) -> range:
        ends = self.offsets[bisect.bisect_right(self.offsets, start) :]
        too_many = bisect.bisect_left(ends, True, key=lambda end: self._place(range(start, end)) is None)
        return range(start, ends[too_many - 1] if too_many > 0 else start)

    def _rows(self, start: int, num_blocks: int) -> range:
        return range(start, min(start + num_blocks * row_ranges.ROW_BLOCK, self.end))

    def _place(self, rows: range) -> tuple[tuple[int, int] | None, tuple[int, int] | None] | None:
        """Where dh and the activation go, as a gradient's number and an element of it; None if they exceed the limit."""
        # Experts without rows may begin behind the last row.
        written = self.num_experts if rows.stop == self.end else bisect.bisect_left(self.offsets, rows.stop, hi=self.num_experts)
        free = [(_aligned(flat.numel() // self.num_experts * written), flat.numel()) for flat in self.flat]
        places, own_bytes = [], []
        num_rows = len(padded(rows))
        for row_bytes in (self.sizes.dh, self.sizes.activation):
            need = num_rows * row_bytes // self.sizes.itemsize
            fitting = [(stop - begin, i) for i, (begin, stop) in enumerate(free) if stop - begin >= need]
            if fitting:
                _, i = min(fitting)
                begin, stop = free[i]
                free[i] = _aligned(begin + need), stop
            places.append((i, begin) if fitting else None)
            own_bytes.append(0 if fitting else num_rows * row_bytes)
        dh, wa = own_bytes
        needed = dh + max(wa + num_rows * self.sizes.partials, num_rows * self.sizes.wide_columns)
        return (places[0], places[1]) if needed <= self.limit else None


def _is_expert_by_expert(gradient: Tensor) -> bool:
    """True if an expert's numbers lie together, those of the next expert behind them."""
    strides = sorted(zip(gradient.stride()[1:], gradient.shape[1:], strict=True))
    dense = 1
    for stride, size in strides:
        if size > 1 and stride != dense:
            return False
        dense *= size
    return gradient.stride(0) == dense


def _aligned(element: int) -> int:
    return -(-element // _ALIGNMENT) * _ALIGNMENT
