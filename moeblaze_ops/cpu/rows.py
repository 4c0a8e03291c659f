"""What the CPU implementations share: blocks of rows, products of one expert after another, routing weights, the dtype of sums.

Rows of consecutive experts are a block: its rows are gathered, activated and summed as one, and only the products, which go
straight to their place, are of one expert each. A block is small enough to stay in a core's cache between these steps.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ops.arguments.activations import with_numbers
from moeblaze_ops.arguments.separate_experts import OneByOne
from moeblaze_ops.arguments.validation import require
from moeblaze_ops.cpu.row_pieces import add_product_of_rows, in_pieces, product_of_rows
from moeblaze_ops.kernels.settings import settings

_BLOCK_NUMBERS = 1 << 17
"""Numbers of one [rows, width] buffer of a block: with half a dozen of such buffers it fills a cache of some megabytes."""


class RowBlock(NamedTuple):
    """Some consecutive experts, all their rows, and how many of them each expert has."""

    experts: slice
    rows: slice
    sizes: list[int]


def row_blocks(offsets_E1: Tensor, num_rows: int, width: int) -> list[RowBlock]:
    """Blocks of all experts, with or without rows, in order.

    Args:
        offsets_E1: as ``dispatch`` gives it. num_rows: rows that there are, those of unused slots included.
        width: columns of the widest buffer that a block's rows have.

    Raises:
        ValueError: the offsets are damaged: rows would belong to no expert or to two, and stay uninitialised.
    """
    offsets = offsets_E1.tolist()
    rises = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= num_rows
    require(rises, "routing", "offsets_E1", f"rise from 0 to at most {num_rows} rows, as dispatch gives it", offsets)
    most_rows = _BLOCK_NUMBERS // max(1, width)
    blocks, first = [], 0
    for expert in range(1, len(offsets)):
        is_last = expert == len(offsets) - 1
        if is_last or offsets[expert + 1] - offsets[first] > most_rows:
            sizes = [end - start for start, end in pairwise(offsets[first : expert + 1])]
            blocks.append(RowBlock(slice(first, expert), slice(offsets[first], offsets[expert]), sizes))
            first = expert
    return blocks


def matrices(weights_EXY: Tensor | OneByOne) -> Sequence[Tensor]:
    """The matrix of each expert."""
    return weights_EXY.unbind(0)


def transposed(weights_EXY: Tensor | OneByOne) -> Sequence[Tensor]:
    """The matrix of each expert, transposed."""
    if isinstance(weights_EXY, Tensor):
        return weights_EXY.transpose(1, 2).unbind(0)
    return [matrix.t() for matrix in weights_EXY.unbind(0)]


def of_each(rows_NX: Tensor, block: RowBlock) -> Sequence[Tensor]:
    """The rows of each expert of a block."""
    return torch.split_with_sizes(rows_NX, block.sizes)


def multiply(rows_NX: Tensor, of_experts: Sequence[Tensor], out_NY: Tensor, block: RowBlock, add: bool = False) -> None:
    """out = rows @ matrix, or out += rows @ matrix, for each expert of a block and its rows."""
    parts = zip(of_each(rows_NX, block), of_experts[block.experts], of_each(out_NY, block), strict=True)
    for (rows, matrix, out), size in zip(parts, block.sizes, strict=True):
        if size == 0:
            continue
        if add:
            add_product_of_rows(out, rows, matrix)
        else:
            product_of_rows(rows, matrix, out)


def dots_of_rows(left_NX: Tensor, right_NX: Tensor) -> Tensor:
    """The inner product of each two rows. Shape [N]."""
    if not settings().batch_invariant:
        return torch.linalg.vecdot(left_NX, right_NX)
    dots_N = left_NX.new_empty(left_NX.shape[0])
    in_pieces(lambda dots, left, right: dots.copy_(torch.linalg.vecdot(left, right)), [dots_N], [left_NX, right_NX])
    return dots_N


def add_biases(rows_NX: Tensor, biases_EX: Tensor | OneByOne, block: RowBlock) -> None:
    for rows, bias in zip(of_each(rows_NX, block), biases_EX.unbind(0)[block.experts], strict=True):
        rows += bias


def row_tokens(slots_N: Tensor, top_k: int) -> Tensor:
    """The token of each row; nothing of a row without a slot."""
    return torch.floor_divide(slots_N, top_k)


def row_weights(weights_TK: Tensor | None, slots: Tensor) -> Tensor | None:
    """The routing weight of each row as a column, in the dtype of the sums."""
    if weights_TK is None:
        return None
    return weights_TK.reshape(-1).index_select(0, slots).unsqueeze(1).to(sum_dtype(weights_TK))


def row_parameters(params_EP: Tensor | None, block: RowBlock) -> Tensor | None:
    """The parameters of the expert of each row of a block, and the row's number, [rows, P + 1]."""
    if params_EP is None:
        return None
    params_NP = params_EP[block.experts].repeat_interleave(torch.tensor(block.sizes), dim=0)
    return with_numbers(params_NP, block.rows.start)


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums, and of all that is computed from router logits."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
