"""Ranges of rows in which backward of an expert layer fits in little more memory than its results take.

Rows are in expert order, and a range of them belongs to whole experts but for the first and the last one: nearly every
weight gradient is computed at once, and nothing is summed in fp32 beside it. Per row, backward holds

    dh     the pre-activation, then its gradient      until the gradients of x and of the up weights have been taken
    wa     the scaled activation                      until the gradient of the down weights has been taken

The first range is larger than the others: as long as a weight gradient has not been allocated, its memory is free for dh.
Those behind it are taken as ``range_plan`` has them where the host can learn of the routing, else as ``row_ranges`` has them.
"""

import bisect
from dataclasses import dataclass

import torch

from moeblaze_ops import config
from moeblaze_ops.arguments.validation import schedule_rows
from moeblaze_ops.kernels.configs import COLUMN_UNIT, ROW_BLOCK
from moeblaze_ops.memory.token_chunks import PARTIAL_COLUMNS, layer_limit, tokens_per_chunk

MOST_RANGES = 16
"""With more of them, what each costs beside its products would be felt: chunks of tokens are taken then."""

_WIDE = 1024
"""Columns from which on it costs next to nothing that not all are computed at once."""


@dataclass(frozen=True)
class RangeSizes:
    """Bytes that decide how many rows a range can have.

    ``dh``, ``activation``, ``partials`` (the sums of dweights beside it), ``columns`` and ``wide_columns`` (the narrowest part
    of the rows that are summed to the gradient of x, and one that is no slower than all) are those of a row; ``dw_up`` and
    ``dw_down`` are the weight gradients that backward allocates.
    """

    itemsize: int
    dh: int
    activation: int
    partials: int
    columns: int
    wide_columns: int
    dw_up: int
    dw_down: int

    @property
    def wa(self) -> int:
        return self.activation + self.partials

    def largest(self, limit: int) -> tuple[int, int]:
        """Rows of the first range and of any other one, if ``limit`` bytes may be allocated beside the results.

        The first range takes the gradient of x, then allocates that of the up weights, frees dh and allocates that of
        the down weights. The others find both allocated, and free wa first.
        """
        others = limit // (self.dh + max(self.wa, self.columns))
        if not self._allocates_both:
            return _whole_blocks(others), _whole_blocks(others)
        first = min(
            (limit + self.dw_up + self.dw_down) // (self.dh + self.wa + self.columns),
            (limit + self.dw_down) // (self.dh + self.wa),
            limit // self.wa,
        )
        return _whole_blocks(first), _whole_blocks(others)

    def takes_down_last(self, rows: range) -> bool:
        """True if the gradient of the down weights is the last one to be taken in a range; else it is the first one."""
        return rows.start == 0 and self._allocates_both

    def keeps_rows(self, limit: int, rows: range) -> bool:
        """True if the rows that are summed to the gradient of x may be there until that of the up weights has been taken."""
        if self.takes_down_last(rows):
            return self._left_beside_up(limit, rows) >= self.wide_columns * len(rows)
        return True

    def _left_beside_up(self, limit: int, rows: range) -> int:
        return limit + self.dw_down - (self.dh + self.wa) * len(rows)

    def forward_column_bytes(self, limit: int, num_rows: int) -> int:
        """What forward has left, beside the activation, until it takes more than backward will."""
        return max(1, limit + self.dw_up + self.dw_down - self.wa * num_rows)

    def column_bytes(self, limit: int, rows: range) -> int:
        """What is left in a range for the rows that are summed to the gradient of x."""
        if self.takes_down_last(rows):
            return self._left_beside_up(limit, rows) + (0 if self.keeps_rows(limit, rows) else self.dw_up)
        return limit - self.dh * len(rows)

    def whole_column_bytes(self, limit: int, num_rows: int) -> int | None:
        """``column_bytes`` where all rows are taken at once, with the gradients in the order of ``expert_mlp``.

        That is the gradient of the down weights, that of x, and beside dh that of the up weights. None if there is no room.
        """
        dh = self.dh * num_rows
        left = limit + self.dw_up - dh
        return left if dh <= limit and max(self.wa, self.columns) * num_rows <= left else None

    @property
    def _allocates_both(self) -> bool:
        return self.dw_up > 0 and self.dw_down > 0


def range_sizes(
    D: int, F: int, E: int, dtype: torch.dtype, gated: bool, has_dw_up: bool = True, has_dw_down: bool = True
) -> RangeSizes:
    """The sizes of a layer, of which some weights may be frozen or have a gradient that is added to."""
    number, G = dtype.itemsize, 2 if gated else 1
    return RangeSizes(
        itemsize=number,
        dh=number * G * F,
        activation=number * F,
        partials=4 * (-(-F // PARTIAL_COLUMNS) + 1),
        columns=number * min(D, COLUMN_UNIT),
        wide_columns=number * min(D, _WIDE),
        dw_up=number * E * G * F * D if has_dw_up else 0,
        dw_down=number * E * F * D if has_dw_down else 0,
    )


def capped(column_bytes: int) -> int:
    """Bytes of the rows from which the output or the gradient of x is summed, under ``config.max_transient_bytes`` too."""
    return column_bytes if config.max_transient_bytes is None else min(column_bytes, config.max_transient_bytes)


def routing_bytes(num_slots: int, E: int) -> int:
    """Bytes of the routing of a range with its slots, and of the routing weights' gradient in fp32."""
    return 4 * (2 * num_slots + 3 * E + 2 + 2 * schedule_rows(num_slots, E))


def row_ranges(num_rows: int, E: int, sizes: RangeSizes, limit: int) -> list[range] | None:
    """Ranges that cover N rows in order, each but the last one a multiple of 128 rows long; one empty range if N is 0.

    None where a range of 128 rows takes more than ``limit``.
    """
    first, others = sizes.largest(max(0, limit - routing_bytes(num_rows, E)))
    if num_rows <= first or num_rows == 0:
        return [range(num_rows)]
    if first == 0 or others == 0:
        return None
    count = -(-(num_rows - first) // others)
    size = -(-(num_rows - first) // count // ROW_BLOCK) * ROW_BLOCK
    starts = [0, *range(first, num_rows, size)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_rows], strict=True)]


def tokens_in_ranges(D: int, F: int, E: int, K: int, dtype: torch.dtype, gated: bool, limit: int) -> int:
    """Tokens up to which a layer that must not allocate more than a limit goes through ranges of rows in backward.

    At most ``MOST_RANGES`` of them, and as long as the activation of all rows, which forward allocates, takes no more memory
    than the weight gradients in backward.
    """
    sizes = range_sizes(D, F, E, dtype, gated)

    def too_many(T: int) -> bool:
        ranges = row_ranges(T * K, E, sizes, limit)
        return ranges is None or len(ranges) > MOST_RANGES

    largest = (sizes.dw_up + sizes.dw_down) // (dtype.itemsize * F * K)
    return bisect.bisect_left(range(largest + 1), True, key=too_many) - 1


def choose_parts(
    T: int, D: int, F: int, E: int, K: int, dtype: torch.dtype, gated: bool, device: torch.device
) -> tuple[str, int]:
    """How a layer that keeps x goes through its tokens, and the number that its op takes.

    ``("whole", 0)`` as long as the limit of ``config.max_layer_transient_bytes`` allows it, else ``("ranges", limit in
    bytes)``, which are for backward, up to ``tokens_in_ranges`` and ``("chunks", tokens of one)`` beyond, and always without
    gradients. With ``config.batch_invariant`` gradients are taken as a whole: a range rounds the gradient of x wherever the rows
    of other tokens let it end.
    """
    if config.batch_invariant and torch.is_grad_enabled():
        return "whole", 0
    chunk_tokens = tokens_per_chunk(D, F, K, dtype, gated, device)
    if chunk_tokens >= T:
        return "whole", 0
    limit = layer_limit(device)
    if torch.is_grad_enabled() and tokens_in_ranges(D, F, E, K, dtype, gated, limit) >= T:
        return "ranges", limit
    return "chunks", chunk_tokens


# What `torch.compiler.assume_constant_result` does, without importing the compiler with this package.
tokens_in_ranges._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _whole_blocks(num_rows: int) -> int:
    return num_rows // ROW_BLOCK * ROW_BLOCK
