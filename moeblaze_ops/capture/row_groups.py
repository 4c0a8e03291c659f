"""Rows of tokens in groups, one of each expert, without any number on the host.

What ``capture`` puts in the place of slices such as ``x[start:end]``, of the concatenation of what became of them, and
of the numbers that occur among ids or count them. Dynamo traces these functions; they only run as they are where a graph breaks.
"""

from typing import Any

import torch
from torch import Tensor


def kept(numbers: Tensor) -> Tensor:
    """``numbers`` as they are now, where a copy to the host would have kept them."""
    return numbers.clone()


def numbers(ids: Tensor, count: int) -> range:
    """The numbers below ``count``, where a loop is over those that occur among ``ids``: all of them are below it.

    Whoever captures this proves that, and removes the check.

    Args:
        ids: numbers of experts. Any shape, integer.
        count: how many experts there are.
    """
    inside = (ids >= 0) & (ids < count)
    torch._assert_async(inside.all())
    return range(count)


def hit_numbers(mask: Tensor, ids: Tensor, count: int) -> range:
    """The numbers of experts, where a loop is over those that ``mask`` hits and every round takes one of ``count`` things.

    A mask with more rows may hit none of these: all ids are below ``count``, which is proven as for ``numbers``.

    Args:
        mask: ``ids`` as one-hot rows. Shape [E, K, T], integer.
        ids: numbers of experts. Any shape, integer.
        count: how many things there are to take.
    """
    return range(mask.shape[0]) if mask.shape[0] <= count else numbers(ids, count)


def masked_numbers(mask: Tensor, axis: int, rank: int) -> range:
    """The numbers of experts, where a loop is over those of which the sum of a mask is above zero.

    Where no element is negative the mask of every other expert is empty. Whoever captures this proves that, and removes the
    check.

    Args:
        mask: Shape with E at ``axis``, any dtype.
        axis: that of the experts.
        rank: how many axes there are.

    Raises:
        ValueError: ``mask`` has another number of axes.
    """
    if mask.dim() != rank:
        raise ValueError(f"row_groups: mask must have {rank} axes, got {mask.dim()}")
    torch._assert_async((mask >= 0).all())
    return range(mask.shape[axis])


def item(of: Any, number: int) -> Any:
    """``of[index]``, where ``index`` was a tensor of shape [1] that held ``number``."""
    return of[number : number + 1] if isinstance(of, Tensor) else of[number]


def beside(number: int, rows: Any) -> int | Tensor:
    """An index next to ``rows``, where it was a tensor of shape [1] that held ``number``."""
    takes_their_shape = isinstance(rows, Tensor) and rows.dtype != torch.bool and rows.dim() > 0
    return number if takes_their_shape else torch.full((1,), number)


def counts(ids: Tensor, count: int) -> Tensor:
    """``torch.bincount(ids, minlength=count)`` of ``ids`` below ``count``, which is proven as for ``numbers``.

    Args:
        ids: numbers of experts. Shape [N], integer.
        count: how many experts there are.

    Returns:
        How many ids each number is. Shape [count], int64.

    Raises:
        ValueError: ``ids`` has another number of axes.
    """
    if ids.dim() != 1:
        raise ValueError(f"row_groups: ids must have one axis, got {ids.dim()}")
    numbers(ids, count)
    return (ids[:, None] == torch.arange(count, device=ids.device)).sum(0)


def rows(ends: Tensor, group: int, like: Tensor) -> Tensor:
    """The rows from ``ends[group - 1]``, 0 for the first group, to ``ends[group]``, of those that ``like`` has.

    Args:
        ends: where each group ends, never falling. Shape [E], integer.
        group: a number from 0 on.
        like: its first axis is that of the rows.

    Returns:
        Positions in rising order, int64.
    """
    group_of_row = torch.searchsorted(ends, torch.arange(like.shape[0], dtype=ends.dtype, device=ends.device), right=True)
    return torch.where(group_of_row == group)[0]


def take(x: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """A copy of some rows of ``x``.

    Raises:
        ValueError: ``x`` has other rows than ``like``, from which ``rows`` are.
    """
    if x.shape[0] != like.shape[0]:
        raise ValueError(f"row_groups: x must have {like.shape[0]} rows, got {x.shape[0]}")
    return x[rows]


def appended(parts: list[Tensor], part: Tensor, rows: Tensor) -> list[Tensor]:
    """A longer list: ``parts``, and one that has as many rows as a group, where it was left out for a group without rows.

    Raises:
        ValueError: ``part`` has another number of rows.
    """
    if part.shape[0] != rows.shape[0]:
        raise ValueError(f"row_groups: part must have {rows.shape[0]} rows, got {part.shape[0]}")
    return parts + [part]  # as a sum: unpacking would write to a list, which is seen as an effect


def put(out: Tensor | None, part: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """``out``, zeros at first, with ``part`` at some rows; parts of all groups give their concatenation.

    Raises:
        ValueError: ``part`` has another number of rows.
    """
    if out is None:
        out = part.new_zeros(like.shape[:1] + part.shape[1:])
    return out.index_copy(0, rows, part)
