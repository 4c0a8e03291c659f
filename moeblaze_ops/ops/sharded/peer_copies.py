"""Transport by the copy engines of GPUs that see each other's memory: no kernel of a collective runs beside the products.

    lay rows in a window that the ranks see -> barrier -> fetch those of the others, on a stream of its own -> wait

A persistent kernel gives each program the same share of the work, and a program that finds its multiprocessor taken by a
collective starts late. Copy engines take no multiprocessor. What does take one, the barrier and the copies within a GPU, runs on
the stream of the caller, before the products that are to run beside the fetch.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.ops.sharded.groups import members_of, once_a_group, process_group, timeout_of

_ALIGNMENT = 256


def copies_between(group: str) -> bool:
    """Whether ``config.transport`` lets copy engines move what the ranks of a group exchange. The same on every rank."""
    if config.transport == "auto":
        return _are_linked(group)
    return config.transport == "copies"


@once_a_group
def _are_linked(group: str) -> bool:
    """Whether the ranks are processes of one host, one for each GPU, between any two of which there is NVLink.

    It says yes to ``torchrun --nproc-per-node 8`` on a host with NVLink, and no where each process sees one GPU only.
    """
    ranks = members_of(group)
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if per_host < len(ranks) or len({rank // per_host for rank in ranks}) != 1:
        return False
    if torch.cuda.device_count() < per_host or torch.cuda.current_device() != dist.get_rank() % per_host:
        return False
    try:
        links = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # where NVML does not answer, nothing is known of links
        return False
    devices = [rank % per_host for rank in ranks]
    return all(links[a][b] > 0 for a in devices for b in devices if a != b)


def gather(local: list[Tensor], rows: int, group: str, routing: bool) -> list[Tensor]:
    """Start to gather ``rows`` rows of every rank on the first axis: those of ``local``, and behind them any; for ``arrived``.

    Tensors arrive one after the other: the first is there before the second has left. With ``routing`` they arrive at once,
    beside tokens that are under way, and the rows behind those of ``local`` are -1, or 0 of floating dtypes.

    Args:
        local: contiguous, on a GPU; no more than ``rows`` rows.
        rows: the same on every rank.
    """
    window = _window(group, "routing" if routing else "tokens")
    rank = window.rank
    whole = [tensor.new_empty(window.ranks * rows, *tensor.shape[1:]) for tensor in local]
    sizes = [tensor.nbytes // window.ranks for tensor in whole]
    moved = list(zip(local, whole, sizes, window.open(sizes), strict=True))
    started = []
    for together in [moved] if routing else [[each] for each in moved]:
        for tensor, _, size, place in together:
            own = tensor.nbytes
            window.lay(place, tensor.data_ptr(), own)
            if routing:
                window.fill(place + own, size - own, 0 if tensor.is_floating_point() else 0xFF)
        window.show()
        into = [(out.data_ptr(), size, place) for _, out, size, place in together]
        fetches = [(begin + peer * size, peer, place, size) for begin, size, place in into for peer in window.others]
        event = window.fetch(fetches)
        # Beside the fetch.
        for begin, size, place in into:
            window.take(begin + rank * size, place, size)
        started += [_under_way(window, event, out, None) for _, out, _, _ in together]
    return started


def sum_parts(whole: list[Tensor], group: str) -> list[Tensor]:
    """Start to sum tensors over the ranks, of which each gets its part of the first axis; for ``arrived``.

    Sums are computed in fp32 and rounded once; two runs agree bit for bit.

    Args:
        whole: contiguous, on a GPU.
    """
    window = _window(group, "sums")
    rank, ranks = window.rank, window.ranks
    sizes = [tensor.nbytes // ranks for tensor in whole]
    places = window.open([(ranks - 1) * size for size in sizes])
    arriving, fetches = [], []
    for tensor, size, place in zip(whole, sizes, places, strict=True):
        begin = tensor.data_ptr()
        # The parts of the others lie in the order of ranks, without this one's.
        window.lay(place, begin, rank * size)
        window.lay(place + rank * size, begin + (rank + 1) * size, (ranks - 1 - rank) * size)
        arriving.append(tensor.new_empty(ranks, tensor.shape[0] // ranks, *tensor.shape[1:]))
        into = arriving[-1].data_ptr()
        fetches += [(into + peer * size, peer, place + (rank - (rank > peer)) * size, size) for peer in window.others]
    window.show()
    event = window.fetch(fetches)
    # Beside the fetch.
    for tensor, parts, size in zip(whole, arriving, sizes, strict=True):
        window.copy(parts.data_ptr() + rank * size, tensor.data_ptr() + rank * size, size)
    return [_under_way(window, event, parts[0], parts) for parts in arriving]


def arrived(started: Tensor) -> Tensor:
    """What ``gather`` or ``sum_parts`` started, once the current stream has waited for it."""
    return started.transfer.finish()


class _Transfer:
    """A result under way. ``parts``: what it is the sum of, those of all ranks in their order."""

    __slots__ = ("_event", "_parts", "_result", "_window")

    def __init__(self, window: "_Window", event: torch.cuda.Event, result: Tensor, parts: Tensor | None) -> None:
        self._window, self._event = window, event
        self._result: Tensor | None = result
        self._parts = parts

    def finish(self) -> Tensor:
        # What was started may live on, and is not to keep the memory.
        result, parts, self._result, self._parts = self._result, self._parts, None, None
        if result is None:
            raise RuntimeError("sharded experts: what arrived must be taken once, got a second time")
        self._window.wait(self._event)
        self._window.under_way.discard(self)
        return result if parts is None else _sum(parts)


def _under_way(window: "_Window", event: torch.cuda.Event, result: Tensor, parts: Tensor | None) -> Tensor:
    """What stands for ``result`` until ``arrived`` gives it: its shape with an axis of 0, and no memory."""
    started = result.new_empty(*result.shape, 0)
    started.transfer = _Transfer(window, event, result, parts)
    window.under_way.add(started.transfer)
    return started


def _sum(parts: Tensor) -> Tensor:
    return torch.add(*parts) if len(parts) == 2 else parts.sum(0)


class _Window:
    """Memory of this rank that the ranks of a group see. Transfers through it follow each other."""

    def __init__(self, group: str) -> None:
        resolved = process_group(group)
        self.rank, self.ranks = resolved.rank(), resolved.size()
        self._group, self._timeout_ms = group, int(timeout_of(resolved).total_seconds() * 1000)
        self._device = torch.cuda.current_device()
        self._memory: Tensor | None = None
        self._captured: list[Tensor] = []  # memory that CUDA graphs read and write
        self._room = 0
        self._handle: Any = None
        self._begins: list[int] = []  # of the windows of all ranks
        self._stream = torch.cuda.Stream(priority=-1)
        self._shown = torch.cuda.Event()
        # A transfer that waits for an event of a later one, on the same stream, waits for its own as well.
        self._events = itertools.cycle([torch.cuda.Event() for _ in range(4)])
        self._fetched: tuple[int, torch.cuda.Event] | None = None  # and the capture that it belongs to
        self._callers: dict[int, torch.cuda.Stream] = {}
        self._memcpy, self._memset, self._capture_info = _driver()
        self.under_way: set[_Transfer] = set()
        """Results that the fetching stream may still write to."""

    @functools.cached_property
    def others(self) -> list[int]:
        """The other ranks in the order in which this one fetches: no two ranks begin with the same one, nor go on with it."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def open(self, sizes: Iterable[int]) -> list[int]:
        """Have room for so many bytes, one behind the other, that nobody reads any more; their places."""
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._room < end or self._memory is None:
            self._grow(end)
        # Streams are joined where the capture of a CUDA graph begins and ends: no event is waited for across that.
        if self._fetched is not None and self._fetched[0] == self._capture():
            self.wait(self._fetched[1])
            self.under_way.clear()
        self._handle.barrier(0, self._timeout_ms)
        return places

    def lay(self, place: int, address: int, size: int) -> None:
        self.copy(self._begins[self.rank] + place, address, size)

    def fill(self, place: int, size: int, byte: int) -> None:
        """Lay ``size`` bytes of one value."""
        if size:
            _check(self._memset(self._begins[self.rank] + place, byte, size, self._raw_stream()))

    def show(self) -> None:
        """Let the others see what lies here, and see what they laid."""
        self._handle.barrier(0, self._timeout_ms)

    def take(self, into: int, place: int, size: int) -> None:
        """Copy what lies here."""
        self.copy(into, self._begins[self.rank] + place, size)

    def copy(self, into: int, address: int, size: int) -> None:
        """Copy bytes within this GPU; without the tensors that a view of each part would be."""
        if size:
            _check(self._memcpy(into, address, size, self._raw_stream()))

    def fetch(self, copies: Sequence[tuple[int, int, int, int]]) -> torch.cuda.Event:
        """Copy to an address, from a rank's window, a place there, so many bytes; the event says when all are there."""
        self._shown.record(self._caller())
        self._shown.wait(self._stream)
        capture = self._capture()
        if capture and not any(memory is self._memory for memory in self._captured):
            self._captured.append(self._memory)
        raw = self._stream.cuda_stream
        for into, rank, place, size in copies:
            if size:
                _check(self._memcpy(into, self._begins[rank] + place, size, raw))
        event = next(self._events)
        event.record(self._stream)
        self._fetched = capture, event
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait."""
        event.wait(self._caller())

    def _raw_stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device)

    def _capture(self) -> int:
        """The number of the capture of a CUDA graph that the current stream takes part in, 0 for none."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        status, number = ctypes.c_int(), ctypes.c_uint64()
        _check(self._capture_info(self._raw_stream(), ctypes.byref(status), ctypes.byref(number), None, None, None))
        return number.value

    def _caller(self) -> torch.cuda.Stream:
        raw = self._raw_stream()
        if raw not in self._callers:
            self._callers[raw] = torch.cuda.current_stream(self._device)
        return self._callers[raw]

    def _grow(self, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        if torch.cuda.is_current_stream_capturing():
            rule = f"tokens must need at most {self._room} bytes under CUDA graph capture, got {size}"
            raise RuntimeError(f"sharded experts: {rule}; run the layer once before the capture")
        # Nobody reads the memory of before any more once the ranks have met.
        torch.cuda.synchronize()
        try:
            memory = symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", self._device))
            self._handle = symmetric_memory.rendezvous(memory, self._group)
        except RuntimeError as error:
            rule = "GPUs must see each other's memory for copies between them; config.transport = 'nccl' does without"
            raise RuntimeError(f"sharded experts: {rule}, got {error}") from error
        self._begins = [self._handle.buffer_ptrs[rank] for rank in range(self.ranks)]
        self._memory, self._room = memory, size


@once_a_group
def _window(group: str, name: str) -> _Window:
    return _Window(group)


_Call = Callable[..., int]


@functools.cache
def _driver() -> tuple[_Call, _Call, _Call]:
    """What copies and what fills bytes on a stream (address, address or byte, size, stream), and what knows of a capture.

    All return 0 if they did.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    memcpy, memset, capture_info = driver.cuMemcpyAsync, driver.cuMemsetD8Async, driver.cuStreamGetCaptureInfo_v2
    memcpy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    memset.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    capture_info.argtypes = [ctypes.c_void_p] * 6
    return memcpy, memset, capture_info


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError(f"sharded experts: copies between GPUs must be possible, got error {failed} of the CUDA driver")
