"""Functions of rows whose bits of one row depend neither on how many rows there are, nor on where the row stands.

Matrix libraries choose kernels by the number of rows, and these add in different orders; where rows are no whole vectors, some
add the rows of one product in different orders. ATen's vectorized functions have another formula for what is left over at the
end of a tensor, or of a thread's part of it. So with ``config.batch_invariant`` rows are taken a fixed number at a time, in
buffers of their own that are filled up with zeros:

    product_of_rows(rows, matrix)                        rows @ matrix, 64 rows at a time, 32 n columns wide
    in_pieces(activate, [a_NF], [h_NGF], "swiglu")       activate(a, h, "swiglu") of so few rows that one thread has them
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.kernels.settings import settings

_ROWS = 64
"""Rows of a product: more than the libraries have kernels of their own for."""
_COLUMNS = 32
"""Columns of both operands of a product: what a tile of AMX has in half precision. With a part of one bits depend on the rows."""
_ONE_THREAD = 1 << 15
"""Numbers from which on ATen may part a function among threads."""
_VECTORS = 64
"""A multiple of the numbers that any of ATen's functions takes at a time."""


def product_of_rows(rows_NX: Tensor, matrix_XY: Tensor, out_NY: Tensor | None = None) -> Tensor:
    """``rows @ matrix``, as a library has it or in pieces. Shape [N, Y]."""
    if out_NY is None:
        out_NY = rows_NX.new_empty(rows_NX.shape[0], matrix_XY.shape[1])
    if settings().batch_invariant:
        _product_in_pieces(torch.mm, out_NY, matrix_XY, rows_NX)
    else:
        torch.mm(rows_NX, matrix_XY, out=out_NY)
    return out_NY


def add_product_of_rows(out_NY: Tensor, rows_NX: Tensor, matrix_XY: Tensor) -> None:
    """``out += rows @ matrix``, as a library has it or in pieces."""
    if settings().batch_invariant:
        _product_in_pieces(torch.addmm, out_NY, matrix_XY, out_NY, rows_NX)
    else:
        out_NY.addmm_(rows_NX, matrix_XY)


def _product_in_pieces(product: Callable[..., Any], out_NY: Tensor, matrix_XY: Tensor, *rows: Tensor) -> None:
    """``product(*rows, matrix, out=out)``; its result may be among the rows."""
    wide_NY, wide_XY = _filled(out_NY), _filled(_filled(matrix_XY).t()).t()
    _pieces(lambda out, *own: product(*own, wide_XY, out=out), [wide_NY], [*map(_filled, rows)], _ROWS)
    if wide_NY is not out_NY:
        out_NY.copy_(wide_NY[:, : out_NY.shape[1]])


def _filled(rows: Tensor) -> Tensor:
    """Rows with zeros behind, up to whole vectors."""
    missing = -rows.shape[1] % _COLUMNS
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def in_pieces(
    function: Callable[..., Any], results: Sequence[Tensor | None], operands: Sequence[Tensor | None], *rest: Any
) -> None:
    """``function(*results, *operands, *rest)``, which fills results from operands, both with rows at their first axis.

    A result may be the memory of an operand.
    """
    given = [tensor for tensor in (*results, *operands) if tensor is not None]
    width = max(tensor[:1].numel() for tensor in given) if given[0].shape[0] else 1
    number = next((n for n in (64, 32, 16, 8, 4, 2) if n * width < _ONE_THREAD and n * width % _VECTORS == 0), 1)
    _pieces(lambda *tensors: function(*tensors, *rest), results, operands, number)


def _pieces(
    function: Callable[..., Any], results: Sequence[Tensor | None], operands: Sequence[Tensor | None], number: int
) -> None:
    num_rows = next(tensor.shape[0] for tensor in (*results, *operands) if tensor is not None)
    made, taken = ([None if t is None else t.new_zeros(number, *t.shape[1:]) for t in given] for given in (results, operands))
    for first in range(0, num_rows, number):
        rows = slice(first, min(first + number, num_rows))
        for piece, whole in zip(taken, operands, strict=True):
            if piece is not None and whole is not None:
                piece[: rows.stop - first] = whole[rows]
        function(*made, *taken)
        for piece, whole in zip(made, results, strict=True):
            if piece is not None and whole is not None:
                whole[rows] = piece[: rows.stop - first]
