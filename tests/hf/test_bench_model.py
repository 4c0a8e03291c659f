"""``benchmarks/bench_model.py`` on two processes, and what it derives."""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers.distributed.expert_parallel")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_model.py"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return argparse.Namespace(**runpy.run_path(str(SCRIPT)))


def arguments(**given):
    whole = {"tiny": False, "vocabulary": 151936, "length": 4096, "without_attention": False}
    return argparse.Namespace(**{**whole, **given})


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo")
def test_gradients_are_those_of_one_process(tmp_path):
    sides = ["moeblaze", "shard_experts", "all_to_all", "moeblaze@tp", "all_reduce"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), "--tiny"]
    command += ["--device", "cpu", "--layers", "2", "--length", "16", "--check", "--sides", *sides]
    command += ["--json", str(tmp_path / "rows.json")]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())["measurements"]
    assert [row["side"] for row in rows] == sides and not [row["failure"] for row in rows if row["failure"]]
    assert all(0 < row["gradient_error"] < 1e-5 for row in rows), rows


def test_work_of_a_token(bench):
    """Megatron-LM's count of Qwen3-30B-A3B, which published TFLOP/s and tokens a second agree with."""
    assert bench.gflop_a_token(arguments(), 48) == pytest.approx(23.0, abs=0.1)
    experts = bench.gflop_a_token(arguments(without_attention=True), 48)
    assert experts == pytest.approx(23.0 - 48 * 6 * (2048 * 9216 + 4096 * 4096) / 1e9, abs=0.1)


def test_the_whole_model_is_derived_from_two_numbers_of_layers(bench):
    known = [(side, layers, 20.0 + ms * layers) for side, ms in (("a", 1), ("b", 2)) for layers in (8, 16)]
    rows = [bench.Measurement(side, layers, 1, 0, step_ms=step_ms) for side, layers, step_ms in known]
    (row,) = bench.derived(rows, arguments())
    assert (row.side, row.layers, row.derived_from, row.step_ms) == ("b", 48, [8, 16], 116.0)
    assert row.tokens_per_s == round(4096 / 0.116)
    assert bench.derived(rows[:3], arguments()) == []
