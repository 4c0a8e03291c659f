"""The rows of a projection to the model width, a range of columns at a time in one buffer.

Such rows, ``[N, D]``, are only summed over each token's slots. A column of them depends on one column of the weights, so
ranges of columns are computed and summed one after the other: same tiles of rows, same order of every sum, same bits.
"""

from collections.abc import Iterator

from torch import Tensor

from moeblaze_ops.kernels.configs import choose_column_ranges
from moeblaze_ops.kernels.launch import size_hint, static_size
from moeblaze_ops.kernels.settings import settings


def row_chunks(like: Tensor, num_rows: int, D: int, max_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
    """Ranges that cover D columns, each with a buffer for that part of the rows.

    Args:
        like: gives the dtype and the device.
        num_rows: N; of a symbolic one the hint decides how many ranges there are, without a guard.
        D: columns; a symbolic number of them is not cut.
        max_bytes: of the buffer, unless COLUMN_UNIT columns take more; None for ``config.max_transient_bytes``.

    Yields:
        The first column of a range and rows_ND: shape [N, columns of the range], contiguous, uninitialised. All share
        one buffer.
    """
    if static_size(D) is None:
        yield 0, like.new_empty((num_rows, D))
        return
    max_bytes = settings().max_transient_bytes if max_bytes is None else max_bytes
    ranges = choose_column_ranges(size_hint(num_rows), D, like.element_size(), max_bytes)
    widest = len(ranges[0])
    rows_ND = like.new_empty((num_rows, widest))
    for columns in ranges:
        width = len(columns)
        yield columns.start, rows_ND if width == widest else rows_ND.as_strided((num_rows, width), (width, 1))
