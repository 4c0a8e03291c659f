"""Transport by the copy engines of GPUs that see each other's memory: no kernel of a collective runs beside the products.

    lay rows in a window that the ranks see -> barrier -> fetch those of the others, on a stream of its own -> wait

A persistent kernel gives each program the same share of the work, and a program that finds its multiprocessor taken by a
collective starts late. Copy engines take no multiprocessor. What does take one, the barrier and the copies within a GPU, runs on
the stream of the caller, before the products that are to run beside the fetch.
"""

import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.kernels.configs import COLUMN_UNIT
from moeblaze_ops.ops.sharded.groups import members_of, once_a_group, process_group, timeout_of

_ALIGNMENT = 256

LEAST_BYTES = 16 << 20
"""What is worth a transfer of its own: 45 us of NVLink."""
MOST_PIECES, LEAST_COLUMNS = 4, 512
"""Sums leave in so many pieces at most, of ``LEAST_BYTES`` and so many columns each: what they are made of is read for each."""

_Copy = tuple[int, int, int, int]
"""To an address, from a rank's window, a place there, so many bytes."""
_Events = list[torch.cuda.Event]
"""In the order in which they come."""


def order_of_fetches(rank: int, ranks: int) -> list[int]:
    """The ranks in the order in which one fetches, itself first: no two fetch from the same one at a time."""
    if _is_power_of_two(ranks):
        return [rank ^ step for step in range(ranks)]
    return [(rank + step) % ranks for step in range(ranks)]


def arriving_together(rank: int, ranks: int) -> list[range]:
    """Ranks whose rows are taken together, in that order: its own, one, two, four; each alone where they are no power of two."""
    order = order_of_fetches(rank, ranks)
    if not _is_power_of_two(ranks):
        return [range(peer, peer + 1) for peer in order]
    ends = [1 << level for level in range(ranks.bit_length())]
    together = [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [range(min(peers), max(peers) + 1) for peers in together]


def _is_power_of_two(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


def copies_between(group: str) -> bool:
    """True if ``config.transport`` lets copy engines move what the ranks of a group exchange. The same on every rank."""
    if config.transport == "auto":
        return _are_linked(group)
    return config.transport == "copies"


@once_a_group
def _are_linked(group: str) -> bool:
    """True if the ranks are processes of one host, one for each GPU, between any two of which there is NVLink.

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
    rank, ranks = window.rank, window.ranks
    whole = [tensor.new_empty(ranks * rows, *tensor.shape[1:]) for tensor in local]
    sizes = [tensor.nbytes // ranks for tensor in whole]
    moved = list(zip(local, whole, sizes, window.open(sizes), strict=True))
    if routing:
        for tensor, _, size, place in moved:
            window.lay(place, tensor.data_ptr(), tensor.nbytes)
            window.fill(place + tensor.nbytes, size - tensor.nbytes, 0 if tensor.is_floating_point() else 0xFF)
        window.show()
        for tensor, out, _, place in moved:
            shape = (rows, *tensor.shape[1:])
            torch.cat([window.tensor(peer, place, shape, tensor.dtype) for peer in range(ranks)], out=out)
        return [_gathered(window, [], out) for out in whole]
    started = []
    for tensor, out, size, place in moved:
        window.lay(place, tensor.data_ptr(), tensor.nbytes)
        window.show()
        order = [rank, *window.others]
        events = window.fetch([(out.data_ptr() + peer * size, peer, place, size) for peer in order])
        started.append(_gathered(window, events, out))
    return started


def _gathered(window: "_Window", arrivals: _Events, rows: Tensor) -> Tensor:
    return _under_way(window, rows.shape, _Transfer(window, arrivals, rows, []), rows)


def sum_parts(whole: list[Tensor], group: str, by_columns: bool = False) -> list[Tensor]:
    """Start to sum tensors over the ranks, of which each gets its part of the first axis; for ``arrived``.

    Sums are computed in fp32 and rounded once; two runs agree bit for bit.

    Args:
        whole: contiguous, on a GPU. One matrix with ``by_columns``.
        by_columns: other ranks may compute what they add as ``SumByColumns`` does, in ``column_ranges``.
    """
    window = _window(group, "sums")
    shape = whole[0].shape[0] // window.ranks, *whole[0].shape[1:]
    ranges = column_ranges(shape, whole[0].element_size()) if by_columns else []
    if len(ranges) > 1:
        sums = SumByColumns(whole[0], shape, [], group)
        for columns in ranges:
            for token, out in sums.columns(columns.start, len(columns))(0, len(columns)):
                out.copy_(whole[0][token : token + len(out), columns.start : columns.stop])
        return sums.started
    parts = _Parts(window, whole, window.open([_foreign_bytes(tensor, window) for tensor in whole]))
    window.show()
    return parts.under_way(window.fetch(parts.fetches))


def column_ranges(shape: Sequence[int], itemsize: int) -> list[range]:
    """Columns of a rank's sums that leave together, of sums of a shape: alike on all ranks, which know it."""
    rows, width = shape
    most = min(MOST_PIECES, rows * width * itemsize // LEAST_BYTES, width // LEAST_COLUMNS)
    size = -(-width // max(1, most) // COLUMN_UNIT) * COLUMN_UNIT
    return [range(first, min(first + size, width)) for first in range(0, width, size)]


class SumByColumns:
    """A sum over the ranks of rows whose columns are computed in turns, and sums as by ``sum_parts`` beside it.

    Some columns are written where the ranks that they are for fetch them, and are fetched while the next ones are computed.
    """

    def __init__(self, like: Tensor, shape: tuple[int, int], whole: list[Tensor], group: str) -> None:
        """Begin the sum of so many rows and columns for each rank, of a tensor's dtype, and those of ``whole``."""
        self._window = window = _window(group, "sums")
        self._like, self._shape = like, shape
        num_bytes = math.prod(shape) * like.element_size() * (window.ranks - 1)
        self._place, *places = window.open([num_bytes, *(_foreign_bytes(each, window) for each in whole)])
        self._whole = _Parts(window, whole, places)
        self._parts: list[_Part] = []
        self.started = [_under_way(window, shape, _Transfer(window, [], None, self._parts), like)]
        """For ``arrived``, once all columns have been written."""

    def columns(self, first: int, width: int) -> Callable[[int, int], Iterator[tuple[int, Tensor]]]:
        """Of some of these columns, the first one and their number, where they are to be written: the first token, and the sums
        of it and those behind, this rank's at last.

        All columns are fetched together, once the last of them have been written. They are the same on every rank.
        """
        window, rows, dtype = self._window, self._shape[0], self._like.dtype
        rank, ranks, size = window.rank, window.ranks, rows * width * dtype.itemsize
        received = self._like.new_empty(ranks, rows, width)
        # The parts of the others lie in the order of ranks, without this one's.
        place = self._place + (ranks - 1) * rows * first * dtype.itemsize
        written = []
        for begin, end in ((0, rank), (rank + 1, ranks)):
            if end > begin:
                shape = ((end - begin) * rows, width)
                written.append((begin * rows, window.tensor(rank, place + min(begin, rank) * size, shape, dtype)))

        def of_some(inner: int, inner_width: int) -> Iterator[tuple[int, Tensor]]:
            for token, sums in written:
                yield token, sums.narrow(1, inner, inner_width)
            if inner + inner_width == width:
                self._send(first, received, place)
            yield rank * rows, received[rank].narrow(1, inner, inner_width)

        return of_some

    def _send(self, first: int, received: Tensor, place: int) -> None:
        window = self._window
        window.show()
        self._parts.append(_Part(first, received, window.fetch(_foreign_parts(window, received, place))))
        if first + received.shape[2] == self._shape[1]:
            self.started += self._whole.under_way(window.fetch(self._whole.fetches))


class _Parts:
    """The parts of tensors for the other ranks, once they are laid, and those of the others, once they are fetched."""

    def __init__(self, window: "_Window", whole: list[Tensor], places: list[int]) -> None:
        self._window, self._whole = window, whole
        rank, ranks = window.rank, window.ranks
        self._received = [tensor.new_empty(ranks, tensor.shape[0] // ranks, *tensor.shape[1:]) for tensor in whole]
        self.fetches: list[_Copy] = []
        for tensor, received, place in zip(whole, self._received, places, strict=True):
            begin, size = tensor.data_ptr(), tensor.nbytes // ranks
            window.lay(place, begin, rank * size)
            window.lay(place + rank * size, begin + (rank + 1) * size, (ranks - 1 - rank) * size)
            self.fetches += _foreign_parts(window, received, place)

    def under_way(self, events: _Events) -> list[Tensor]:
        """The sums, for ``arrived``. This rank's own parts are copied beside the fetch."""
        window, rank = self._window, self._window.rank
        for tensor, received in zip(self._whole, self._received, strict=True):
            size = tensor.nbytes // window.ranks
            window.copy(received.data_ptr() + rank * size, tensor.data_ptr() + rank * size, size)
        transfers = [_Transfer(window, [], None, [_Part(0, received, events)]) for received in self._received]
        pairs = zip(self._received, transfers, strict=True)
        return [_under_way(window, received.shape[1:], transfer, received) for received, transfer in pairs]


def _foreign_parts(window: "_Window", received: Tensor, place: int) -> list[_Copy]:
    """The copies of the other ranks' parts. They lie at one place of all windows, in the order of ranks, without a rank's own."""
    rank, size = window.rank, received.nbytes // window.ranks
    into = received.data_ptr()
    return [(into + peer * size, peer, place + (rank - (rank > peer)) * size, size) for peer in window.others]


def _foreign_bytes(whole: Tensor, window: "_Window") -> int:
    return whole.nbytes // window.ranks * (window.ranks - 1)


def arrived(started: Tensor) -> Tensor:
    """What ``gather`` or ``sum_parts`` started, once the current stream has waited for it."""
    return started.transfer.finish()


def arriving(started: Tensor) -> tuple[Tensor, Iterator[range]]:
    """What ``gather`` started, and ranks of ``arriving_together`` once the current stream has waited for their rows."""
    return started.transfer.arriving()


class _Part(NamedTuple):
    """Columns of a sum from ``first`` on: what the ranks add, in their order, once all events have come."""

    first: int
    received: Tensor
    events: _Events


class _Transfer:
    """What is under way: rows that come from ranks in the order of ``arrivals``, or without them the sum of ``parts``."""

    __slots__ = ("_arrivals", "_is_taken", "_parts", "_rows", "_window")

    def __init__(self, window: "_Window", arrivals: _Events, rows: Tensor | None, parts: list[_Part]) -> None:
        self._window, self._arrivals, self._rows, self._parts = window, arrivals, rows, parts
        self._is_taken = False

    def arriving(self) -> tuple[Tensor, Iterator[range]]:
        assert self._rows is not None, "sums arrive as a whole"
        return self._rows, self._ranks()

    def _ranks(self) -> Iterator[range]:
        arrivals = iter(self._arrivals)
        for ranks in arriving_together(self._window.rank, self._window.ranks):
            self._window.wait_last(list(itertools.islice(arrivals, len(ranks))))
            yield ranks
        self.finish()

    def finish(self) -> Tensor:
        if self._is_taken:
            raise RuntimeError("sharded experts: what arrived must be taken once, got a second time")
        self._is_taken = True
        self._window.wait_last(self._arrivals)
        result = self._sum() if self._rows is None else self._rows
        # What was started may live on, and is not to keep the memory.
        self._rows, self._parts = None, []
        self._window.under_way.discard(self)
        return result

    def _sum(self) -> Tensor:
        """The parts of the first columns are added while those of the others come."""
        _, received, events = self._parts[0]
        if len(self._parts) == 1:
            self._window.wait_last(events)
            return _sum(received)
        out = received.new_empty(received.shape[1], sum(part.received.shape[2] for part in self._parts))
        for first, received, events in self._parts:
            self._window.wait_last(events)
            _sum(received, out=out.narrow(1, first, received.shape[2]))
        return out


def _under_way(window: "_Window", shape: Sequence[int], transfer: _Transfer, like: Tensor) -> Tensor:
    """What stands for a result of a shape until ``arrived`` gives it: one with an axis of 0 more, and no memory."""
    started = like.new_empty((*shape, 0))
    started.transfer = transfer
    window.under_way.add(transfer)
    return started


def _sum(parts: Tensor, **out: Tensor) -> Tensor:
    return torch.add(*parts, **out) if len(parts) == 2 else torch.sum(parts, 0, **out)


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
        self._events = itertools.cycle([torch.cuda.Event() for _ in range(16 * self.ranks)])
        self._fetched: tuple[int, torch.cuda.Event] | None = None  # and the capture that it belongs to
        self._callers: dict[int, torch.cuda.Stream] = {}
        self._memcpy, self._memset, self._capture_info = _driver()
        self.under_way: set[_Transfer] = set()
        """Results that the fetching stream may still write to."""

    @functools.cached_property
    def others(self) -> list[int]:
        """The other ranks in the order in which this one fetches."""
        return order_of_fetches(self.rank, self.ranks)[1:]

    def open(self, sizes: Iterable[int]) -> list[int]:
        """Have room for so many bytes, one behind the other, that nobody reads any more; their places."""
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._room < end or self._memory is None:
            self._grow(end)
        if self._capture() and not any(memory is self._memory for memory in self._captured):
            self._captured.append(self._memory)
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

    def tensor(self, rank: int, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What lies in a rank's window, where it lies."""
        return self._handle.get_buffer(rank, shape, dtype, place // dtype.itemsize)

    def copy(self, into: int, address: int, size: int) -> None:
        """Copy bytes within this GPU; without the tensors that a view of each part would be."""
        if size:
            _check(self._memcpy(into, address, size, self._raw_stream()))

    def fetch(self, copies: Sequence[_Copy]) -> _Events:
        """Copy one after the other; the events say when each is there."""
        self._shown.record(self._caller())
        self._shown.wait(self._stream)
        raw, capture, events = self._stream.cuda_stream, self._capture(), []
        for into, rank, place, size in copies:
            if size:
                _check(self._memcpy(into, self._begins[rank] + place, size, raw))
            events.append(next(self._events))
            events[-1].record(self._stream)
            self._fetched = capture, events[-1]
        return events

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait."""
        event.wait(self._caller())

    def wait_last(self, events: _Events) -> None:
        """Let it wait for the last of events in their order, if there are any."""
        for event in events[-1:]:
            self.wait(event)

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
