"""Numbers that the processes of a group tell each other, on the host and past the GPU: how many tokens each has.

Processes of one machine write them to memory that they share, a few microseconds; others send them through gloo. A rank waits for
the others as long as the group's timeout says, and says whom it waited for.
"""

import fcntl
import mmap
import os
import secrets
import tempfile
import threading
import time
import weakref
import zlib
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from moeblaze_ops.ops.sharded.groups import members_of, once_a_group, process_group, timeout_of

_WORD = 8
_NUMBER_BITS, _TURN_BITS, _LAYER_BITS, _PATH_BITS = 32, 4, 13, 14
_SPINNING_S, _NAP_S, _LIVENESS_S = 0.01, 0.0002, 0.5
"""How long a rank asks again at once, how long it sleeps between questions then, and how often it looks whether others live."""
_MOMENT_S = 2.0


class _Ways(Protocol):
    turn: int

    def largest(self, mine: int, layer: str, path: str = "") -> int: ...


def largest_number(mine: int, group: str, layer: str, path: str = "") -> int:
    """The largest of the numbers that the ranks of a group have, 0 or more; each waits for the others.

    Args:
        layer: what the number is for, in words. All ranks have to ask for the same.
        path: of the layer in the model, the same on all ranks that know it; others give none.

    Raises:
        RuntimeError: a rank ended, asks for another layer, or did not tell its number within the timeout of the group.
    """
    return _way(group).largest(mine, layer, path)


def prepare(group: str) -> None:
    """Find the way of numbers between the ranks of a group, all of which call this: later some may not come."""
    _way(group)


def questions(group: str) -> int:
    """How often the ranks of a group have told each other their numbers so far, which is the same on all of them."""
    return _way(group).turn


def told(mine: int, group: str) -> list[int]:
    """The number of each rank of a group, all of which call this."""
    messages = _messages(group)
    return [mine] * len(members_of(group)) if messages is None else messages.exchange(mine).flatten().tolist()


@once_a_group
def _way(name: str) -> _Ways:
    messages = _messages(name)
    return _Alone() if messages is None else _shared_memory(messages) or messages


@once_a_group
def _messages(name: str) -> "_Messages | None":
    group = process_group(name)
    if dist.get_backend(group) == "fake":
        return None
    if dist.get_backend(group) != "gloo":
        group = dist.new_group(members_of(name), timeout_of(group), "gloo", use_local_synchronization=True)
    return _Messages(group)


def _silent(whom: str) -> RuntimeError:
    return RuntimeError(f"sharded experts: every rank must run the layer, got no word of {whom}")


def _of_layer(layer: str, path: str) -> int:
    """Both in a number; that of the path is 0 where it is not known."""
    known = zlib.crc32(path.encode()) % ((1 << _PATH_BITS) - 1) + 1 if path else 0
    return zlib.crc32(layer.encode()) % (1 << _LAYER_BITS) << _PATH_BITS | known


def _check_layers(layers: list[int], members: list[int], layer: str, path: str) -> None:
    """Raise where ranks ask for other layers, in words or by their paths as far as these are known."""
    own, of_path = _of_layer(layer, path), (1 << _PATH_BITS) - 1
    for rank, other in zip(members, layers, strict=True):
        if other >> _PATH_BITS != own >> _PATH_BITS or (other & of_path and own & of_path and other != own):
            rule = "every rank must run the same layers in the same order"
            here = f"{path}, {layer}" if path else layer
            raise RuntimeError(f"sharded experts: {rule}, got another one on rank {rank} than here: {here}")


class _Alone:
    """A process that plays one rank of a group that moves nothing: the others have what it has."""

    turn = 0

    def largest(self, mine: int, layer: str, path: str = "") -> int:
        return mine


class _Messages:
    """Numbers travel in messages of gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.members = group.rank(), dist.get_process_group_ranks(group)
        self.timeout_s = timeout_of(group).total_seconds()
        self._group = weakref.ref(group)
        self.turn = 0
        self._failure: str | None = None

    def largest(self, mine: int, layer: str, path: str = "") -> int:
        self.turn += 1
        numbers, layers = self.exchange(mine, _of_layer(layer, path)).unbind(1)
        _check_layers(layers.tolist(), self.members, layer, path)
        return int(numbers.max())

    def exchange(self, *mine: int) -> torch.Tensor:
        """[R, n]: the n numbers of each rank."""
        own = torch.tensor([mine], dtype=torch.int64, device="cpu")
        everyone = own.repeat(len(self.members), 1)
        try:
            self._group()._allgather_base(everyone, own).wait()
        except RuntimeError as error:
            self._failure = self._failure or f"{self._silent_ranks()} ({error})"
            raise _silent(self._failure) from error
        return everyone

    def _silent_ranks(self) -> str:
        """Those that say nothing where all others tell each other that messages fail, which is within a moment."""
        silent = list(self.members)
        asking = threading.Thread(target=self._ask, args=(silent,), daemon=True)
        asking.start()
        asking.join(2 * _MOMENT_S)
        known = silent and not asking.is_alive()
        return f"rank {', '.join(map(str, silent))}" if known else "some rank"

    def _ask(self, silent: list[int]) -> None:
        """Take from the ranks those that answer. torch's store waits for ever where the network of its process is gone."""
        key, end = "moeblaze/failed/{}", time.monotonic() + _MOMENT_S
        try:
            store = dist.distributed_c10d._get_process_group_store(self._group())
            store.set(key.format(self.members[self.rank]), "")
            while silent and time.monotonic() < end:
                silent[:] = [rank for rank in silent if not store.check([key.format(rank)])]
                time.sleep(_MOMENT_S / 20)
        except RuntimeError:  # the process that keeps the store has ended
            silent[:] = self.members[:1]


class _Board:
    """Numbers stand in memory that all processes see, each in one word with the turn in which it was written.

    Two rows take turns. Nobody writes to one of them before all have read it: who begins the next turn has read all of this one.
    Each rank holds a lock while it lives: the system frees it when the process ends, however it ends.
    """

    def __init__(self, file, memory: mmap.mmap, messages: _Messages) -> None:
        self._file, self._words = file, memoryview(memory).cast("q")
        self._rank, self._members, self._timeout_s = messages.rank, messages.members, messages.timeout_s
        self.turn = 0
        self._failure: str | None = None
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)

    def largest(self, mine: int, layer: str, path: str = "") -> int:
        if self._failure is not None:
            raise RuntimeError(self._failure)
        self.turn += 1
        ranks, turn = len(self._members), self.turn % (1 << _TURN_BITS)
        first = self.turn % 2 * ranks
        asked = _of_layer(layer, path) << _TURN_BITS | turn
        self._words[first + self._rank] = asked << _NUMBER_BITS | mine
        try:
            words = [self._word(first, peer, turn) for peer in range(ranks)]
            if any(word >> _NUMBER_BITS != asked for word in words):
                _check_layers([word >> _NUMBER_BITS + _TURN_BITS for word in words], self._members, layer, path)
        except RuntimeError as error:
            self._failure = str(error)
            raise
        return max(word & (1 << _NUMBER_BITS) - 1 for word in words)

    def _word(self, first: int, peer: int, turn: int) -> int:
        """What a rank wrote in this turn."""
        started = looked = None
        while (told := self._words[first + peer]) >> _NUMBER_BITS & (1 << _TURN_BITS) - 1 != turn:
            now = time.monotonic()
            started, looked = started or now, looked or now
            if now - looked > _LIVENESS_S:
                looked = now
                # It may have written and ended in between.
                if self._has_ended(peer) and self._words[first + peer] == told:
                    raise _silent(f"rank {self._members[peer]}, which has ended")
            if now - started > self._timeout_s:
                raise _silent(f"rank {self._members[peer]} for {self._timeout_s:g} s")
            time.sleep(_NAP_S if now - started > _SPINNING_S else 0)
        return told

    def _has_ended(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, peer)
        return True


def _shared_memory(messages: _Messages) -> _Board | None:
    """A board of the processes of a group, if all of them see the memory of the first one."""
    size = 2 * len(messages.members) * _WORD
    token = secrets.token_hex(_WORD) if messages.rank == 0 else ""
    shown = messages.exchange(int(token or "0", 16) - (1 << 63))[0]
    token = f"{int(shown) + (1 << 63):016x}"
    path = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir(), f"moeblaze-{token}")
    if messages.rank == 0:
        path.touch(mode=0o600, exist_ok=False)
        os.truncate(path, size)
    messages.exchange(0)
    board = _board(path, size, messages)
    everyone = messages.exchange(int(board is not None))
    if messages.rank == 0:
        path.unlink()
    return board if everyone.all() else None


def _board(path: Path, size: int, messages: _Messages) -> _Board | None:
    try:
        file = path.open("r+b")
        return _Board(file, mmap.mmap(file.fileno(), size), messages)
    except OSError:
        return None
