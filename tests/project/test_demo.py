"""The example, run as a user runs it, at a tiny size."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_moe_lm.py"

WITHOUT_PACKAGES = """
import runpy, sys
sys.modules["tqdm"] = sys.modules["matplotlib"] = None
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


def run_demo(folder, *arguments, command=(str(SCRIPT),)):
    """Runs the example into `folder` and returns its output and its numbers by way of training."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command, "--preset", "tiny", "--out", str(folder), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((folder / "train_moe_lm.json").read_text())
    return done.stdout, {result["way"]: result for result in numbers["results"]}


def check_three_ways(folder, device, largest_difference):
    output, results = run_demo(folder, "--device", device)
    assert list(results) == ["eager", "compile", "moeblaze"]
    assert all(result["label"] in output for result in results.values())
    curves = {way: result["losses"] for way, result in results.items()}
    assert all(math.isfinite(loss) for curve in curves.values() for loss in curve)
    for way in ("compile", "moeblaze"):
        assert curves[way] == pytest.approx(curves["eager"], abs=largest_difference)
    assert results["moeblaze"]["rewritten"] == "1 MoE layers"
    assert results["moeblaze"]["kept_bytes"] <= results["compile"]["kept_bytes"] / 2
    return results


def test_demo_trains_three_ways_alike(tmp_path):
    # A loss near 5.5 is rounded to 5e-7; five steps of training multiply that by less than ten.
    check_three_ways(tmp_path, "cpu", largest_difference=5e-6)


@pytest.mark.gpu
def test_demo_trains_three_ways_alike_on_gpu(tmp_path):
    # As on a CPU, with float32 matrix products that sum in another order in each way.
    results = check_three_ways(tmp_path, "cuda", largest_difference=5e-5)
    assert all(result["peak_bytes"] > result["kept_bytes"] for result in results.values())


def test_demo_draws_its_plot(tmp_path):
    pytest.importorskip("matplotlib")
    run_demo(tmp_path, "--device", "cpu", "--ways", "eager")
    assert (tmp_path / "train_moe_lm.png").read_bytes().startswith(b"\x89PNG")


def test_demo_says_what_is_missing(tmp_path):
    code = WITHOUT_PACKAGES.format(folder=str(SCRIPT.parent), script=str(SCRIPT))
    output, results = run_demo(tmp_path, "--device", "cpu", "--ways", "eager", command=("-c", code))
    assert "tqdm is not installed" in output
    assert "matplotlib is not installed" in output
    assert len(results["eager"]["losses"]) == 5


def test_demo_says_that_there_is_no_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--ways", "compile"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "needs a C++ compiler" in done.stderr
