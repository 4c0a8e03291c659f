"""Transport by the copy engines of GPUs that see each other's memory: no kernel of a collective runs beside the products.

    lay rows in a window that the ranks see -> barrier -> fetch those of the others, on a stream of its own -> wait

A persistent kernel gives each program the same share of the work, and a program that finds its multiprocessor taken by a
collective starts late. Copy engines take no multiprocessor. What does take one, the barrier and the copies within a GPU, runs on the stream
of the caller, before the products that are to run beside the fetch.
"""

import functools
import os
from collections.abc import Callable, Iterable
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
    links = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    devices = [rank % per_host for rank in ranks]
    return all(links[a][b] > 0 for a in devices for b in devices if a != b)


def gather(tensors: list[Tensor], group: str, window: str) -> list[Tensor]:
    """Start to gather tensors of the same shape on every rank on their first axis; to be waited for.

    Args:
        tensors: contiguous, on a GPU.
        window: name of the memory that they pass through. A transfer waits for the last one through its window.
    """
    shared = _window(group, window)
    whole = [tensor.new_empty(shared.ranks, *tensor.shape) for tensor in tensors]
    places = shared.lay(tensors)
    for tensor, out in zip(tensors, whole, strict=True):
        out[shared.rank].copy_(tensor)
    fetches = [
        (out[peer], shared.seen(peer, place, tensor.shape, tensor.dtype))
        for tensor, out, place in zip(tensors, whole, places, strict=True)
        for peer in shared.others
    ]
    arrived = shared.fetch(fetches)
    results = [out.flatten(0, 1) for out in whole]
    for result in results:
        _register(result, arrived, None)
    return results


def sum_parts(tensors: list[Tensor], group: str, window: str) -> list[Tensor]:
    """Start to sum tensors over the ranks, of which each gets its part of the first axis; to be waited for.

    Sums are computed in fp32 and rounded once; two runs agree bit for bit.
    """
    shared = _window(group, window)
    parts = [tensor.unflatten(0, (shared.ranks, -1)) for tensor in tensors]
    sent = [_without(part, shared.rank) for part in parts]
    places = shared.lay(sent)
    arriving = [torch.empty_like(part) for part in sent]
    fetches = []
    for part, place, out in zip(sent, places, arriving, strict=True):
        for peer, into in zip(shared.others, out, strict=True):
            fetches.append((into, shared.seen(peer, place, part.shape, part.dtype)[shared.rank - (shared.rank > peer)]))
    own = [part[shared.rank].clone() for part in parts]
    arrived = shared.fetch(fetches)
    for total, others in zip(own, arriving, strict=True):
        _register(total, arrived, functools.partial(_add, total, others))
    return own


def _without(parts: Tensor, rank: int) -> Tensor:
    """The parts of the other ranks, in their order."""
    before, behind = parts[:rank], parts[rank + 1 :]
    return torch.cat([before, behind]) if len(before) and len(behind) else before if len(before) else behind


def _add(total: Tensor, others: Tensor) -> None:
    if len(others) == 1:
        total += others[0]
    else:
        total.copy_(others.sum(0, dtype=torch.float32).add_(total))


class _Window:
    """Memory of this rank that the ranks of a group see."""

    def __init__(self, group: str) -> None:
        self._group = group
        resolved = dist.distributed_c10d._resolve_process_group(group)
        self.rank, self.ranks = resolved.rank(), resolved.size()
        self.others = [peer for peer in range(self.ranks) if peer != self.rank]
        self._handle: Any = None
        self._size = 0
        self._seen: dict[tuple, Tensor] = {}
        self._stream = torch.cuda.Stream(priority=-1)
        self._fetched: torch.cuda.Event | None = None

    def lay(self, tensors: list[Tensor]) -> list[int]:
        """Copy tensors here, one behind the other, where all ranks see them then; returns their places in bytes."""
        places, end = [], 0
        for tensor in tensors:
            places.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._grow(end)
        if self._fetched is not None:
            torch.cuda.current_stream().wait_event(self._fetched)
        # All ranks have fetched what is here.
        self._handle.barrier(0, _TIMEOUT_MS)
        for tensor, place in zip(tensors, places, strict=True):
            self.seen(self.rank, place, tensor.shape, tensor.dtype).copy_(tensor)
        self._handle.barrier(0, _TIMEOUT_MS)
        return places

    def seen(self, rank: int, place: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """What a rank has laid at a place of its window."""
        key = (rank, place, shape, dtype)
        tensor = self._seen.get(key)
        if tensor is None:
            self._seen[key] = tensor = self._handle.get_buffer(rank, shape, dtype, place // dtype.itemsize)
        return tensor

    def fetch(self, copies: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Copy to the first of each pair, behind what the stream of the caller does; the event says when all are there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for into, seen in copies:
                into.copy_(seen, non_blocking=True)
            self._fetched = self._stream.record_event()
        return self._fetched

    def _grow(self, size: int) -> None:
        if size <= self._size:
            return
        import torch.distributed._symmetric_memory as symmetric_memory

        if torch.cuda.is_current_stream_capturing():
            rule = f"tokens must need at most {self._size} bytes under CUDA graph capture, got {size}"
            raise RuntimeError(f"sharded experts: {rule}; run the layer once before the capture")
        # Nobody reads the memory of before any more once the ranks have met.
        torch.cuda.synchronize()
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        handle = symmetric_memory.rendezvous(memory, self._group)
        self._memory, self._handle, self._size, self._seen = memory, handle, size, {}


@functools.cache
def _window(group: str, name: str) -> _Window:
    return _Window(group)


class _Arrival(torch._C._distributed_c10d.Work if dist.is_available() else object):
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
