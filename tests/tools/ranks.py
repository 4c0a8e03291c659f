"""Processes that run the checks of a test file together: one start of them serves all of its tests."""

import faulthandler
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from moeblaze_ops.lowering.torch_internals.room import call_with_room
from tests.tools.compiling import compile_quickly, keep_what_is_imported

_SILENT_S = 60
"""After so long a check shows where it is."""
_BEGINS, _MOST_CHARACTERS = "began the check ", 6000
"""Of what a process writes to stderr: how a check is announced, and how much is shown where a signal ends it."""


def run_checks(checks: dict[str, Callable[[], None]], ranks: int, folder: str, device: str = "cpu") -> dict[str, list[str]]:
    """Run every check in each of ``ranks`` processes; what became of it there: ``passed``, or the error with its traceback.

    Checks are functions of a module, and run with a seed: on the CPU with fp64 and one thread, or each on a GPU of its own.
    """
    died = ""
    try:
        if device == "cpu":
            start_ranks(_work, (ranks, checks, str(folder), device), ranks)
        else:  # which no forked process can begin to use, if its parent looked at it
            torch.multiprocessing.spawn(_work, (ranks, checks, str(folder), device), nprocs=ranks)
    except ProcessExitedException as error:
        died = "\n".join([f"not run, or cut off: {error}", *(_last_words(folder, rank) for rank in range(ranks))])
    outcomes = [torch.load(file) if (file := Path(folder, str(rank))).exists() else {} for rank in range(ranks)]
    return {name: [of_rank.get(name, died) for of_rank in outcomes] for name in checks}


def assert_passed(outcomes: list[str]) -> None:
    """A check passed in every process."""
    for outcome in outcomes:
        assert outcome == "passed", outcome


def start_ranks(work: Callable[..., None], arguments: tuple, ranks: int) -> None:
    """Runs ``work(rank, *arguments)`` in ``ranks`` processes, forks of one that has done nothing but import the compiler and us.

    To import it takes a process longer than most checks.
    """
    compiler = ["torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"]
    multiprocessing.set_forkserver_preload([*compiler, "moeblaze_ops.compile", "moeblaze_ops.distributed", "pytest"])
    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


def _last_words(folder: str, rank: int) -> str:
    """What a process wrote to stderr since it began its last check: why and where a signal ended it."""
    file = Path(folder, f"{rank}.stderr")
    text = file.read_text(errors="replace") if file.exists() else ""
    return f"rank {rank}: {text[max(text.rfind(_BEGINS), 0) :][:_MOST_CHARACTERS]}"


def _work(rank: int, ranks: int, checks: dict[str, Callable[[], None]], folder: str, device: str) -> None:
    shown = os.dup(2)
    with open(f"{folder}/{rank}.stderr", "wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    if device == "cpu":
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        compile_quickly()
        # Calls of operators are what ranks have to agree on; to build loops of theirs in C++ takes longer than all else.
        torch._inductor.config.fallback_by_default = True
        keep_what_is_imported()
    else:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    transport = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(transport, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
    outcomes = {}
    for name, check in checks.items():
        start = time.perf_counter()
        os.write(2, f"{_BEGINS}{name}\n".encode())
        faulthandler.dump_traceback_later(_SILENT_S, file=shown)
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            call_with_room(check)
            outcomes[name] = "passed"
        except Exception:
            outcomes[name] = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        became = outcomes[name].splitlines()[-1]
        print(f"rank {rank}: {name}: {became}, after {time.perf_counter() - start:.1f} s", flush=True)
        torch.save(outcomes, f"{folder}/{rank}")
    dist.destroy_process_group()
