"""Processes that run checks together say why one of them died."""

import os

import torch.distributed as dist

from tests.tools.ranks import run_checks


def check_that_passes() -> None:
    dist.barrier()


def check_that_aborts() -> None:
    os.write(2, b"heap is broken\n")
    os.abort()


def test_a_process_that_a_signal_ends_says_where(tmp_path):
    checks = {"first": check_that_passes, "second": check_that_aborts, "third": check_that_passes}
    outcomes = run_checks(checks, 1, tmp_path)
    assert outcomes["first"] == ["passed"]
    for name in ("second", "third"):
        (outcome,) = outcomes[name]
        assert "SIGABRT" in outcome and "rank 0: began the check second\nheap is broken\n" in outcome
        assert "in check_that_aborts" in outcome and "check first" not in outcome
