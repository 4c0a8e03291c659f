"""Windows of peer copies on a CPU: ranks are threads, and a fetch happens at the latest moment that the events allow."""

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from moeblaze_ops.ops.sharded import peer_copies

_CALLER, _FETCHING = 1, 2

captures = threading.local()
"""``captures.number``: the capture of a CUDA graph that a rank's streams take part in, 0 or nothing for none."""


def _capture() -> int:
    return getattr(captures, "number", 0)


class _Stream:
    """Runs at once, or as late as an event is waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.pending: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        for call in self.pending[self.done : until]:
            call()
        self.done = max(self.done, until)


class _Event:
    def record(self, stream: _Stream) -> None:
        self._stream, self._until, self._capture = stream, len(stream.pending), _capture()

    def wait(self, stream: _Stream) -> None:
        if self._capture != _capture():
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
        self._stream.run(self._until)


class _Handle:
    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self._barrier.wait(timeout=60)


class _SlowWindow(peer_copies._Window):
    def __init__(self, name: str, rank: int, ranks: int, host: "_Host") -> None:
        self.rank, self.ranks = rank, ranks
        self._name, self._host, self._timeout_ms = name, host, 60_000
        self._memory, self._room, self._begins = None, 0, []
        self._handle = _Handle(host.barrier)
        self._main, self._stream = _Stream(_CALLER), _Stream(_FETCHING)
        self._shown, self._events, self._fetched = _Event(), iter(_Event, None), None
        self._memcpy, self._memset, self._captured = self._copy_bytes, self._fill_bytes, []
        self.under_way = set()

    def _grow(self, size: int) -> None:
        self._host.barrier.wait(timeout=60)
        memory = (ctypes.c_char * size)()
        self._host.memory[self._name, self.rank] = memory
        self._host.barrier.wait(timeout=60)
        # A rank without a thread has the memory of the first one.
        of_all = [self._host.memory.get((self._name, peer), memory) for peer in range(self.ranks)]
        self._begins = [ctypes.addressof(each) for each in of_all]
        self._memory, self._room = of_all, size

    def tensor(self, rank: int, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        return torch.frombuffer(self._memory[rank], dtype=dtype, count=count, offset=place).view(shape)

    def _copy_bytes(self, into: int, address: int, size: int, stream: int) -> int:
        if stream == _FETCHING:
            self._stream.pending.append(lambda: ctypes.memmove(into, address, size))
        else:
            ctypes.memmove(into, address, size)
        return 0

    def _fill_bytes(self, into: int, byte: int, size: int, stream: int) -> int:
        ctypes.memset(into, byte, size)
        return 0

    def _raw_stream(self) -> int:
        return _CALLER

    def _capture(self) -> int:
        return _capture()

    def _caller(self) -> _Stream:
        return self._main


class _Host:
    """What the ranks share."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self.memory: dict[tuple[str, int], ctypes.Array] = {}


@contextlib.contextmanager
def rank_of(ranks: int) -> Iterator[None]:
    """Let this process alone play rank 0; the others have what it has."""
    host, windows = _Host(1), {}

    def window(group: str, name: str) -> _SlowWindow:
        if name not in windows:
            windows[name] = _SlowWindow(name, 0, ranks, host)
        return windows[name]

    with mock.patch.object(peer_copies, "_window", window):
        yield


def run_ranks(ranks: int, function: Callable[[int], object]) -> list:
    """What ``function`` of a rank returns, each in a thread of its own."""
    host, local, results, errors = _Host(ranks), threading.local(), [None] * ranks, []

    def window(group: str, name: str) -> _SlowWindow:
        if name not in local.windows:
            local.windows[name] = _SlowWindow(name, local.rank, ranks, host)
        return local.windows[name]

    def run(rank: int) -> None:
        local.rank, local.windows = rank, {}
        try:
            results[rank] = function(rank)
        except Exception as error:
            errors.append(error)
            host.barrier.abort()

    with mock.patch.object(peer_copies, "_window", window):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        raise error
    return results
