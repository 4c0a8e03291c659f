"""Programs as people run them, each in processes of its own with the caches of PyTorch on and kept: once cold, then warm."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.door.programs import SPELLINGS, WAYS
from tests.tools import programs

ROOT = Path(__file__).parent.parent.parent
NAMES = ["blocks.0.moe", "blocks.1.moe"]
# Each way once and each spelling at least once; `make test-door-all` runs the other pairs.
DIAGONAL = [(list(SPELLINGS)[i % len(SPELLINGS)], way) for i, way in enumerate(WAYS)]
CLOSE = {"autocast": 0.05}
"""Relative to a loss: experts' products are rounded to bf16 in another order."""


@pytest.fixture
def run(tmp_path) -> Callable[..., dict]:
    """Runs a program of ``programs.py`` in a process of its own, with the caches of the test or of another name.

    Those of the matrix differ in the order of their sets as well, which forks do not.
    """

    def start(program: str, *arguments: str, caches: str = "caches") -> dict:
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / caches)}
        command = ["-m", "tests.door.programs", program, *arguments]
        if program == "matrix":
            command, variables = [sys.executable, *command], {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        else:
            done = programs.run(*command, folder=tmp_path, **variables)
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        assert done.returncode == 0 and results, done.stderr
        return json.loads(results[-1].partition(" ")[2])

    return start


def check(outcomes: dict[str, dict]) -> None:
    """What is explained is what is reported and what runs, and trains like eager mode."""
    said, expected, far = {}, {}, {}
    for cell, found in outcomes.items():
        said[cell] = [found["explained"], found["reported"], found["ran"]]
        expected[cell] = [NAMES, NAMES, len(NAMES)]
        if found["error"] > CLOSE.get(cell.split(", ")[1], 1e-4):
            far[cell] = found["error"]
    assert said == expected and far == {}
    assert {cell: found["graphs"] for cell, found in outcomes.items() if found["graphs"] > 2} == {}


def test_ways_to_run_a_model(run):
    """Cold, and in another process out of the caches."""
    cells = list(map(", ".join, DIAGONAL))
    cold, warm = run("matrix", *cells), run("matrix", *cells)
    check(cold)
    check(warm)
    assert {cell: found["misses"] for cell, found in warm.items() if found["misses"]} == {}


@pytest.mark.skipif("DOOR_BY_HAND" not in os.environ, reason="takes many minutes: `make test-door-all`")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_in_every_way(run, spelling):
    """In one process, in which what one way compiled comes out of the caches for others."""
    check(run("matrix", *(f"{spelling}, {way}" for way in WAYS)))


def test_knobs_and_free_memory_of_another_run(run):
    """What another process had memory for, or was told to keep, is not what this one runs; each setting finds its own code."""
    order = ["preactivation", "input", "much", "little"]
    kept, not_kept = [1, 0], [0, 1]
    ran = dict(zip(order, (kept, not_kept, kept, not_kept), strict=True))
    assert run("knobs", str(1 << 40), *order) == {name: [*expected, 0] for name, expected in ran.items()}
    assert run("knobs", str(1 << 41), *reversed(order)) == {name: [*expected, 1] for name, expected in ran.items()}


def test_what_comes_out_of_a_cache_is_verified(run):
    assert run("verified") == {"compared": 1, "agrees": True, "hits": 0}
    assert run("verified") == {"compared": 1, "agrees": True, "hits": 1}


def test_adapters_and_replay(run):
    cold, warm = run("ours", "1"), run("ours", "2")
    assert cold["error"] < 1e-4 and warm["error"] < 1e-4
    assert cold["hits"] == 0 and warm["hits"] > 0


@pytest.mark.skipif(not hasattr(torch.compiler, "save_cache_artifacts"), reason="this torch has no such file")
def test_cache_in_a_file(run, tmp_path):
    file = str(tmp_path / "artifacts")
    cold, warm = run("mega_cache", file), run("mega_cache", file, caches="others")
    assert cold["error"] < 1e-4 and warm["error"] < 1e-4
    assert [(found["ran"], found["hit"], found["miss"]) for found in (cold, warm)] == [(1, 0, 1), (1, 1, 0)]
