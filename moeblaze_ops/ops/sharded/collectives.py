"""Collectives of the ranks that share a layer's experts, and what a host has to know before tokens move.

Transport is torch's functional collectives by the name of a process group: they start at once and are waited for by name.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from moeblaze_ops.ops.register import number_of_data, register_plain_op

Size = int | torch.SymInt

_functional = torch.ops._c10d_functional


def start_gather(local: Tensor, rows: Size, ranks: int, group: str) -> Tensor:
    """Start to gather ``rows`` rows of every rank on the first axis: those of ``local``, and behind them -1.

    The result is to be waited for, and has no gradient.
    """
    with torch.no_grad():
        sent = local.detach()
        sent = sent.contiguous() if _is_same(local.shape[0], rows) else with_rows(sent, rows)
        return _functional.all_gather_into_tensor(sent, ranks, group)


def start_gather_of_tokens(x_TD: Tensor, rows: int | Tensor, ranks: int, group: str) -> Tensor:
    """``start_gather`` with so many rows, or with as many as a tensor has."""
    return start_gather(x_TD, rows if isinstance(rows, int) else rows.shape[0], ranks, group)


def start_reduce_scatter(whole: Tensor, ranks: int, group: str) -> Tensor:
    """Start to sum ``whole`` over the ranks, of which each gets its part of the first axis; to be waited for."""
    return _functional.reduce_scatter_tensor(whole.contiguous(), "sum", ranks, group)


def wait(started: Tensor) -> Tensor:
    return _functional.wait_tensor(started)


def first_rows(tensor: Tensor, rows: Size) -> Tensor:
    """Without the rows that ``start_gather`` put behind those of this rank."""
    if _is_same(tensor.shape[0], rows):
        return tensor
    torch._check_value(rows <= tensor.shape[0], lambda: _too_many(rows, tensor.shape[0]))
    return tensor.narrow(0, 0, rows)


def _too_many(own: Size, most: Size) -> str:
    return f"sharded experts: tokens must be at most config.tokens_per_rank={most} on every rank, got {int(own)}"


def _is_same(size: Size, other: Size) -> bool:
    """Whether two sizes are numbers and the same: a size of one rank alone gets no guard."""
    return isinstance(size, int) and isinstance(other, int) and size == other


def local_shard(sharded: Tensor) -> Tensor:
    """What this rank stores of a DTensor; its gradient is that of the shard."""
    return sharded.to_local()


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


@functools.cache
def _host_group(name: str) -> dist.ProcessGroup:
    """A group of the same ranks for numbers of the host."""
    group = process_group(name)
    if dist.get_backend(group) == "gloo":
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def _most_tokens(x_TD: Tensor, group: str) -> Tensor:
    host, mine = _host_group(group), x_TD.shape[0]
    everyone = torch.empty(host.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, torch.tensor([mine], dtype=torch.int64), group=host)
    return x_TD.new_empty(max(1, int(everyone.max())), 0)


def _most_tokens_fake(x_TD: Tensor, group: str) -> Tensor:
    most = number_of_data()
    torch._check(most >= 1)
    torch._check(most >= x_TD.shape[0])
    return x_TD.new_empty(most, 0)


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    own = tensor.shape[0]
    if own > rows:
        raise ValueError(_too_many(own, rows))
    padded = tensor.new_empty(rows, *tensor.shape[1:])
    padded[:own] = tensor
    padded[own:] = -1
    return padded


def _with_rows_fake(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty(rows, *tensor.shape[1:])


most_tokens = register_plain_op("most_tokens", "(Tensor x_TD, str group) -> Tensor", _most_tokens, _most_tokens_fake)
"""[M, 0], no data: M is the largest number of tokens that a rank of the group has, 1 at least. The hosts tell each other."""

with_rows = register_plain_op("with_rows", "(Tensor tensor, SymInt rows) -> Tensor", _with_rows, _with_rows_fake)
"""A copy with so many rows, the last ones filled with -1: no expert's id.

Raises:
    ValueError: the tensor has more rows.
"""
