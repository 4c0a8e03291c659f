"""Numbers that the processes of a group tell each other, on the host and past the GPU: how many tokens each has.

Processes of one machine write them to memory that they share, a few microseconds; others send them through gloo.
"""

import functools
import mmap
import os
import secrets
import tempfile
import time
from typing import Protocol

import torch
import torch.distributed as dist

_WORD = 8
_NUMBER_BITS = 40
_PATIENCE_S = 10 * 60
_TOKEN_BYTES = 16


class _Ways(Protocol):
    def largest(self, mine: int) -> int: ...


def largest_number(mine: int, group: str) -> int:
    """The largest of the numbers that the ranks of a group have, 0 or more; each waits for the others.

    Raises:
        RuntimeError: a rank did not tell its number for ten minutes.
    """
    return _way(group).largest(mine)


@functools.cache
def _way(name: str) -> _Ways:
    group = dist.distributed_c10d._resolve_process_group(name)
    if dist.get_backend(group) != "gloo":
        group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    return _shared_memory(group) or _Messages(group)


class _Messages:
    """Numbers travel in messages of gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def largest(self, mine: int) -> int:
        everyone = torch.empty(self._group.size(), dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, torch.tensor([mine], dtype=torch.int64), group=self._group)
        return int(everyone.max())


class _Board:
    """Numbers stand in memory that all processes see, each in one word with the turn in which it was written.

    Two rows take turns. Nobody writes to one of them before all have read it: who begins the next turn has read all of this one.
    """

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int) -> None:
        self._words = memoryview(memory).cast("q")
        self._rank, self._ranks, self._turn = rank, ranks, 0

    def largest(self, mine: int) -> int:
        self._turn += 1
        row = range(first := self._turn % 2 * self._ranks, first + self._ranks)
        self._words[row[self._rank]] = self._turn << _NUMBER_BITS | mine
        return max(self._number(word) for word in row)

    def _number(self, word: int) -> int:
        deadline = None
        while (told := self._words[word]) >> _NUMBER_BITS < self._turn:
            now = time.monotonic()
            deadline = deadline or now + _PATIENCE_S
            if now > deadline:
                raise RuntimeError(f"sharded experts: every rank must run the layer, got no word of rank {word % self._ranks}")
            time.sleep(0)
        return told & (1 << _NUMBER_BITS) - 1


def _shared_memory(group: dist.ProcessGroup) -> _Board | None:
    """A board of the processes of ``group``, if all of them see the memory of the first one."""
    rank, ranks = group.rank(), group.size()
    size = _TOKEN_BYTES + 2 * ranks * _WORD
    where: list[tuple[str, bytes] | None] = [None]
    if rank == 0:
        token = secrets.token_bytes(_TOKEN_BYTES)
        handle, path = tempfile.mkstemp(prefix="moeblaze-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.write(handle, bytes(size - _TOKEN_BYTES) + token)
        os.close(handle)
        where = [(path, token)]
    dist.broadcast_object_list(where, group=group, group_src=0)
    path, token = where[0]
    memory = _mapped(path, size)
    is_same = memory is not None and memory[size - _TOKEN_BYTES : size] == token
    everyone = torch.tensor([int(is_same)])
    dist.all_reduce(everyone, op=dist.ReduceOp.MIN, group=group)
    if rank == 0:
        os.unlink(path)
    return _Board(memory, rank, ranks) if everyone.item() else None


def _mapped(path: str, size: int) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None
