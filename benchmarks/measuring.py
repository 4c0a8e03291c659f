"""What measurements share: times of a call, its memory and errors, what became of its layers, and contenders that fail."""

import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeblaze_ops import compile as switch

MIB = 2**20


@contextmanager
def noting_failure(row: Any) -> Iterator[None]:
    """A contender that fails is a result, of which ``row`` has the words, and the others still run."""
    try:
        yield
    except Exception as failure:
        traceback.print_exc()
        row.failure = f"{type(failure).__name__}: {str(failure)[:300]}"


def became(records: Iterable[object]) -> list[str]:
    """What the layers of compiled graphs became, or why nothing, of the records of a compile."""
    reports = [record.report for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None]
    return [layer.became or f"{layer.reason}: {layer.detail}" for report in reports for layer in report.candidates]


def counted(became: list[str]) -> str:
    """How many layers became what."""
    return "; ".join(f"{became.count(kind)} x {kind}" for kind in dict.fromkeys(became))


def event_time(run: Callable[[], object], iterations: int, device: str = "cuda") -> list[float]:
    """Milliseconds of each of some calls in a row; on a CPU, for a check of a script, those on the clock."""
    if device != "cuda":
        marks = [time.perf_counter()]
        for _ in range(iterations):
            run()
            marks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(marks)]
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def interleaved_medians(
    runs: dict[str, Callable[[], object]], rounds: int, round_ms: float, device: str = "cuda"
) -> dict[str, float]:
    """Median time of each run, taken in turns so that drift of the device hits all alike; every second round goes backwards."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    iterations = {}
    for name, run in runs.items():
        once = statistics.median(event_time(run, 3, device))
        iterations[name] = max(3, min(200, int(round_ms / once)))
    for number in range(rounds):
        turns = list(runs.items())
        for name, run in turns[::-1] if number % 2 else turns:
            samples[name] += event_time(run, iterations[name], device)
    return {name: statistics.median(times) for name, times in samples.items()}


def load_device(seconds: float = 1.0) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.time() + seconds
    while time.time() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def graph_of(run: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls, after some that compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def memory(layer: nn.Module, x: Tensor, dout: Tensor) -> tuple[float, float]:
    """(kept, peak) MiB of one training step."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = layer(x)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    out.backward(dout)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return kept / MIB, peak / MIB


def peak(run: Callable[[], object]) -> float:
    """MiB beyond what is allocated before a call, at its highest."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


@torch.no_grad()
def relative_error(got: Tensor, expected: Tensor) -> float:
    """The distance of two tensors, relative to the norm of the second one if that is not 0; infinite where one is NaN."""
    norm = expected.float().norm()
    error = float((got.float() - expected.float()).norm() / torch.where(norm == 0, 1.0, norm))
    return math.inf if math.isnan(error) else error


def join_ranks(device: str) -> None:
    """Let this process be one of those that torchrun started, on a GPU of its own."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=120))
