"""What tracing leaves in the graph that is to be proven: branches on data, numbers of tokens, experts that were hit.

The ends of a branch are proven away before the graph is compiled: whoever runs one has a graph that nobody has checked. The
other functions may run: they give what the program asked for once what they assume is proven.
"""

from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.lowering.graph.operators import OURS

LEAF = "moeblaze_leaf"
"""Where the metadata of a tensor that was asked for with a gradient of its own say whether gradients were on."""


def branch_forks() -> None:
    """From here to `branch_begins` stands what the program runs where the work is not done."""
    raise RuntimeError("a branch on data was traced on both sides, and never proven")


def branch_begins(condition: Any, works_if: bool, fork: None) -> None:
    """From here to `branch_ends` runs what the program runs where ``condition`` is ``works_if`` only."""
    raise RuntimeError("a branch on data was traced as if it were always taken, and never proven")


def branch_ends(begin: None, without: tuple, with_: tuple, added: tuple) -> None:
    """Here the two ways join: where the work is not done, each of ``with_`` must be what the same of ``without`` is.

    And each of ``added``, which a list that is only concatenated has more of, must have no rows then.
    """
    raise RuntimeError("a branch on data was traced as if it were always taken, and never proven")


def some_taken(ways: tuple, truth: bool) -> Tensor:
    """``truth`` if all conditions of one of ``ways`` hold: each is a flag, and what it is where the work of a branch is done."""
    raise RuntimeError("what branches on data add up to was asked, and never proven")


def counts_below(ids: Tensor, num_experts: int) -> Tensor:
    """``torch.bincount(ids, minlength=num_experts)``, where all ids are proven to be below that: as many counts as experts."""
    return ids.new_zeros(num_experts, dtype=torch.int64).scatter_add_(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))


def one_hot_below(ids: Tensor, num_classes: int) -> Tensor:
    """``F.one_hot(ids, num_classes)``, of a number that only the data tell, where it is asserted that ids are below it."""
    return (ids.unsqueeze(-1) == torch.arange(num_classes, device=ids.device)).long()


def rows_between(x: Tensor, start: int, stop: int, size: int) -> Tensor:
    """``x[start:stop]``, of bounds that only the data tell, where there was a slice of ``size`` rows with the same bounds."""
    return x.as_strided((size, *x.shape[1:]), x.stride(), x.storage_offset() + start * x.stride(0))


def rows_joined(parts: tuple[Tensor, ...], size: int) -> Tensor:
    """``torch.cat(parts)``, of parts with numbers of rows that only the data tell, which are ``size`` in all."""
    joined = torch.cat(parts)
    return joined.as_strided((size, *joined.shape[1:]), joined.stride())


def left_as_it_is(x: Tensor) -> Tensor:
    """``x``, to which nobody may write from here on: the host has its numbers, or another tensor stands for a part of it."""
    return x.view_as(x)


def is_hit(hits: Tensor, expert: int) -> Tensor:
    """True if an expert is among the numbers of those that have tokens."""
    return (hits == expert).any()


def hit_number(hits: Tensor, expert: int) -> Tensor:
    """The element of ``hits`` that is the number of an expert which is among them: [] of hits [n], [1] of hits [n, 1]."""
    return hits.new_full(hits.shape[1:], expert)


OURS.update((
    branch_forks, branch_begins, branch_ends, counts_below, one_hot_below, rows_between, rows_joined, left_as_it_is, is_hit,
    hit_number, some_taken,
))  # fmt: skip
