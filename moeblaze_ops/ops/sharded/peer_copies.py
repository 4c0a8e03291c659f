"""Transport by the copy engines of GPUs that see each other's memory: no kernel of a collective runs beside the products.

    lay rows in a window that the ranks see -> barrier -> fetch those of the others, on a stream of its own -> wait

A persistent kernel gives each program the same share of the work, and a program that finds its multiprocessor taken by a
collective starts late. Copy engines take no multiprocessor. What does take one, the barrier and the copies within a GPU, runs on
the stream of the caller, before the products that are to run beside the fetch.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeblaze_ops import config

_ALIGNMENT = 256
_TIMEOUT_MS = 10 * 60 * 1000
"""A rank that waits so long for another one in a barrier raises."""


def copies_between(group: str) -> bool:
    """Whether ``config.transport`` lets copy engines move what the ranks of a group exchange. The same on every rank."""
    if config.transport == "auto":
        return _are_linked(group)
    return config.transport == "copies"


@functools.cache
def _are_linked(group: str) -> bool:
    """Whether the ranks are processes of one host, one for each GPU, between any two of which there is NVLink.

    It says yes to ``torchrun --nproc-per-node 8`` on a host with NVLink, and no where each process sees one GPU only.
    """
    ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))
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


def gather(local: list[Tensor], rows: int, group: str) -> list[Tensor]:
    """Start to gather ``rows`` rows of every rank on the first axis: those of ``local``, and behind them any; to be waited for.

    Args:
        local: contiguous, on a GPU; no more than ``rows`` rows.
        rows: the same on every rank.
    """
    window = _window(group, "tokens")
    whole = [tensor.new_empty(window.ranks * rows, *tensor.shape[1:]) for tensor in local]
    sizes = [tensor.nbytes // window.ranks for tensor in whole]
    places = window.open(sizes)
    for tensor, place in zip(local, places, strict=True):
        window.lay(place, tensor.data_ptr(), tensor.nbytes)
    window.show()
    fetches: list[tuple[int, int, int, int]] = []
    for tensor, out, size, place in zip(local, whole, sizes, places, strict=True):
        begin = out.data_ptr()
        window.copy(begin + window.rank * size, tensor.data_ptr(), tensor.nbytes)
        fetches += [(begin + peer * size, peer, place, size) for peer in window.others]
    arrived = window.fetch(fetches)
    for out in whole:
        _register(out, arrived, None)
    return whole


def sum_parts(whole: list[Tensor], group: str) -> list[Tensor]:
    """Start to sum tensors over the ranks, of which each gets its part of the first axis; to be waited for.

    Sums are computed in fp32 and rounded once; two runs agree bit for bit.

    Args:
        whole: contiguous, on a GPU.
    """
    window = _window(group, "sums")
    rank, others = window.rank, window.others
    sizes = [tensor.nbytes // window.ranks for tensor in whole]
    places = window.open([len(others) * size for size in sizes])
    own, arriving, fetches = [], [], []
    for tensor, size, place in zip(whole, sizes, places, strict=True):
        begin, shape = tensor.data_ptr(), (tensor.shape[0] // window.ranks, *tensor.shape[1:])
        # The parts of the others lie in the order of ranks, without this one's.
        window.lay(place, begin, rank * size)
        window.lay(place + rank * size, begin + (rank + 1) * size, (len(others) - rank) * size)
        own.append(tensor.new_empty(shape))
        arriving.append(tensor.new_empty(len(others), *shape))
        into = arriving[-1].data_ptr()
        fetches += [(into + i * size, peer, place + (rank - (rank > peer)) * size, size) for i, peer in enumerate(others)]
    window.show()
    for tensor, part, size in zip(whole, own, sizes, strict=True):
        window.copy(part.data_ptr(), tensor.data_ptr() + rank * size, size)
    arrived = window.fetch(fetches)
    for part, parts in zip(own, arriving, strict=True):
        _register(part, arrived, functools.partial(_add, part, parts))
    return own


def _add(total: Tensor, parts: Tensor) -> None:
    if len(parts) == 1:
        total.add_(parts[0])
    else:
        total.copy_(parts.sum(0, dtype=torch.float32).add_(total))


class _Window:
    """Memory of this rank that the ranks of a group see. Transfers through it follow each other."""

    def __init__(self, group: str) -> None:
        resolved = dist.distributed_c10d._resolve_process_group(group)
        self.rank, self.ranks = resolved.rank(), resolved.size()
        self.others = [peer for peer in range(self.ranks) if peer != self.rank]
        self._group = group
        self._device = torch.cuda.current_device()
        self._memory: Tensor | None = None
        self._handle: Any = None
        self._begins: list[int] = []  # of the windows of all ranks
        self._stream = torch.cuda.Stream(priority=-1)
        self._shown = torch.cuda.Event()
        self._fetched: torch.cuda.Event | None = None

    def open(self, sizes: Iterable[int]) -> list[int]:
        """Have room for so many bytes, one behind the other, that nobody reads any more; their places."""
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or self._memory.nbytes < end:
            self._grow(end)
        if self._fetched is not None:
            torch.cuda.current_stream().wait_event(self._fetched)
        self._handle.barrier(0, _TIMEOUT_MS)
        return places

    def lay(self, place: int, address: int, size: int) -> None:
        self.copy(self._begins[self.rank] + place, address, size)

    def show(self) -> None:
        """Let the others see what lies here, and see what they laid."""
        self._handle.barrier(0, _TIMEOUT_MS)

    def copy(self, into: int, address: int, size: int) -> None:
        _copy(into, address, size, torch._C._cuda_getCurrentRawStream(self._device))

    def fetch(self, copies: Sequence[tuple[int, int, int, int]]) -> torch.cuda.Event:
        """Copy to an address, from a rank's window, a place there, so many bytes; the event says when all are there."""
        self._shown.record()
        self._stream.wait_event(self._shown)
        for into, rank, place, size in copies:
            _copy(into, self._begins[rank] + place, size, self._stream.cuda_stream)
        self._fetched = self._stream.record_event()
        return self._fetched

    def _grow(self, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        if torch.cuda.is_current_stream_capturing():
            have = 0 if self._memory is None else self._memory.nbytes
            rule = f"tokens must need at most {have} bytes under CUDA graph capture, got {size}"
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
        self._memory = memory


@functools.cache
def _window(group: str, name: str) -> _Window:
    return _Window(group)


@functools.cache
def _memcpy() -> Callable[[int, int, int, int], int]:
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function


def _copy(into: int, address: int, size: int, stream: int) -> None:
    """Copy bytes between GPUs, or within one, on a stream; without the tensors that a view of each part would be."""
    if size:
        failed = _memcpy()(into, address, size, stream)
        if failed:
            raise RuntimeError(f"sharded experts: copies between GPUs must be possible, got error {failed} of the CUDA driver")


class _Arrival(torch._C._distributed_c10d.Work if dist.is_available() else object):  # type: ignore[misc]
    """What ``wait_tensor`` waits for: an event, and what is left to do then."""

    def __init__(self, event: torch.cuda.Event, finish: Callable[[], None] | None) -> None:
        super().__init__()
        self._event, self._finish = event, finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._event.wait()
        if self._finish is not None:
            self._finish()
        return True


def _register(tensor: Tensor, event: torch.cuda.Event, finish: Callable[[], None] | None) -> None:
    torch._C._distributed_c10d._register_work(tensor, _Arrival(event, finish))
