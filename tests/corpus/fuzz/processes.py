"""Seeds, spread over processes. What they give comes as it is ready, so that a run that is stopped keeps what it has."""

import itertools
import logging
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch

Result = TypeVar("Result")


def seeds_of(text: str) -> Iterator[int]:
    """The seeds that ``FIRST:END``, ``FIRST:`` or one number names."""
    first, _, end = text.partition(":")
    return iter(range(int(first), int(end))) if end else itertools.count(int(first)) if ":" in text else iter((int(first),))


@contextmanager
def until_stopped() -> Iterator[None]:
    """A block that an interrupt or a request to end (SIGTERM, as of `timeout`) leaves early, without an error."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("stopped: what follows is of the seeds until then", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)


def results_of(work: Callable[[int], Result], seeds: str, jobs: int, seconds: float, *, block: int = 1) -> Iterator[Result]:
    """What ``work`` gives for each of ``seeds``, in any order, until ``seconds`` are over.

    ``block``: so many seeds in a row are one process's. A process that dies takes the rest of its seeds with it.
    """
    if jobs == 1:
        yield from _results(work, seeds, 0, 1, seconds, block)
        return
    context = multiprocessing.get_context("spawn")
    readers: list[Connection] = []
    processes = []
    try:
        for shard in range(jobs):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(writer, work, seeds, shard, jobs, seconds, block), daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        while readers:
            for reader in wait(readers):
                assert isinstance(reader, Connection)
                try:
                    yield reader.recv()
                except EOFError:
                    readers.remove(reader)
        for process in processes:
            process.join()
            if process.exitcode:
                print(f"a process ended with {process.exitcode}: its other seeds did not run", flush=True)
    finally:
        for process in processes:
            process.terminate()


def _send(
    writer: Connection, work: Callable[[int], object], seeds: str, shard: int, jobs: int, seconds: float, block: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which sends it to all: the parent ends this process
    for result in _results(work, seeds, shard, jobs, seconds, block):
        writer.send(result)


def _results(work: Callable[[int], Result], seeds: str, shard: int, jobs: int, seconds: float, block: int) -> Iterator[Result]:
    warnings.filterwarnings("ignore")
    logging.disable()  # what torch says of programs that it cannot compile
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    for seed in seeds_of(seeds):
        if seed // block % jobs != shard:
            continue
        if time.monotonic() > end:
            return
        yield work(seed)
