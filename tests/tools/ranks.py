"""Processes on the CPU that run the checks of a test file together: one start of them serves all of its tests."""

import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def run_checks(checks: dict[str, Callable[[], None]], ranks: int, folder: str) -> dict[str, list[str]]:
    """Run every check in each of ``ranks`` processes; what became of it there: ``passed``, or the error with its traceback.

    Checks are functions of a module, and run with fp64, a seed and one thread.
    """
    torch.multiprocessing.spawn(_work, (ranks, checks, str(folder)), nprocs=ranks)
    outcomes = [torch.load(f"{folder}/{rank}") for rank in range(ranks)]
    return {name: [of_rank[name] for of_rank in outcomes] for name in checks}


def _work(rank: int, ranks: int, checks: dict[str, Callable[[], None]], folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    outcomes = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            check()
            outcomes[name] = "passed"
        except Exception:
            outcomes[name] = traceback.format_exc()
    torch.save(outcomes, f"{folder}/{rank}")
    dist.destroy_process_group()
