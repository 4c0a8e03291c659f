"""The examples, at a tiny size."""

import importlib
import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys

import pytest
import torch
import torch._inductor.config

from tests.tools.programs import ROOT, printed_by, run

SCRIPT = ROOT / "examples" / "train_moe_lm.py"
ON_RANKS = ROOT / "examples" / "train_multi_gpu.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def run_demo(monkeypatch, capsys, tmp_path):
    """Runs the example in this process, which has imported torch already; what it prints, and its numbers by way of training.

    A program of its own is the one that is interrupted below.
    """
    monkeypatch.syspath_prepend(str(SCRIPT.parent))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--preset", "tiny", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert stopped.value.code == 0
        numbers = json.loads((tmp_path / "train_moe_lm.json").read_text())
        return capsys.readouterr().out, {result["way"]: result for result in numbers["results"]}

    return run


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: what a script starts in the background ignores it, pytest too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def check_four_ways(run_demo, folder, device, largest_difference):
    output, results = run_demo("--device", device)
    assert list(results) == ["eager", "compile", "moeblaze", "every"]
    table = output[output.index("\n\n") : output.index("\n\nnumbers:")].splitlines()
    assert all(result["label"] in output for result in results.values()) and max(map(len, table)) <= 80
    curves = {way: result["losses"] for way, result in results.items()}
    assert all(math.isfinite(loss) for curve in curves.values() for loss in curve)
    for way in ("compile", "moeblaze", "every"):
        assert curves[way] == pytest.approx(curves["eager"], abs=largest_difference)
    assert results["moeblaze"]["rewritten"] == "1 MoE layers"
    assert results["moeblaze"]["kept_bytes"] < results["compile"]["kept_bytes"]
    assert results["moeblaze"]["kept_bytes"] <= results["every"]["kept_bytes"] / 2
    if importlib.util.find_spec("matplotlib"):
        assert (folder / "train_moe_lm.png").read_bytes().startswith(b"\x89PNG")
    return results


def test_demo_trains_four_ways_alike(run_demo, tmp_path):
    # A loss near 5.5 is rounded to 5e-7; five steps of training multiply that by less than ten.
    with torch._inductor.config.patch(fallback_by_default=True):
        check_four_ways(run_demo, tmp_path, "cpu", largest_difference=5e-6)


@pytest.mark.gpu
def test_demo_trains_four_ways_alike_on_gpu(run_demo, tmp_path):
    # As on a CPU, with float32 matrix products that sum in another order in each way.
    results = check_four_ways(run_demo, tmp_path, "cuda", largest_difference=5e-5)
    assert all(result["peak_bytes"] > result["kept_bytes"] for result in results.values())


def test_demo_says_what_is_missing(run_demo, monkeypatch):
    for package in ("tqdm", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    output, results = run_demo("--device", "cpu", "--ways", "eager")
    assert "tqdm is not installed" in output
    assert "matplotlib is not installed" in output
    assert len(results["eager"]["losses"]) == 5
    assert list(results["eager"]["loads"]) == ["1", "2", "3", "4", "5"]
    for layers in results["eager"]["loads"].values():
        assert len(layers) == 1 and all(sum(shares) == pytest.approx(1) for shares in layers.values())


def test_demo_says_that_there_is_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--ways", "compile"])
    with pytest.raises(SystemExit, match="needs a C\\+\\+ compiler"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize("option", ["--steps=-1", "--steps=0", "--steps=many", "--minutes=0", "--minutes=inf"])
def test_demo_refuses_what_is_no_number_of_steps_or_minutes(option, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), option])
    with pytest.raises(SystemExit) as stopped:  # and no other error, of which Python would print where it came from
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert f"must be a number above 0, got {option.partition('=')[2]}" in capsys.readouterr().err


def test_demo_refuses_an_option_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), "--ways", "magic"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "argument --ways: invalid choice: 'magic'" in done.stderr, done.stderr


def test_each_preset_is_an_option(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    assert sorted(runpy.run_path(str(SCRIPT))["PRESETS"]) == importlib.import_module("train_options").PRESET_NAMES


def test_demo_stops_in_time(run_demo):
    # The time is over before the first step, on any machine: what remains are the steps that are always made.
    output, results = run_demo("--device", "cpu", "--ways", "eager", "--steps", "2000", "--minutes", "1e-9")
    assert "stops after 1e-09 minutes" in output
    assert len(results["eager"]["losses"]) == 5


def test_demo_begins_nothing_when_the_time_is_over(run_demo):
    output, results = run_demo("--device", "cpu", "--ways", "eager", "moeblaze", "--minutes", "1e-9")
    assert "The time is over: left out moeblaze." in output
    assert list(results) == ["eager"]


def test_demo_keeps_what_was_finished_when_interrupted(tmp_path):
    command = [sys.executable, "-u", str(SCRIPT), "--preset", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--ways", "eager", "compile"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores the signal, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        # The progress of the second way begins before its compilation, which takes seconds.
        seen = ""
        while "compile" not in seen and (piece := process.stderr.read(1)):
            seen += piece
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted during compile: what follows is what was finished" in output
    assert "Traceback" not in errors
    assert [result["way"] for result in json.loads((tmp_path / "train_moe_lm.json").read_text())["results"]] == ["eager"]


@pytest.mark.usefixtures("interruptible")
def test_demo_writes_all_when_interrupted_at_its_table(run_demo, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    report = importlib.import_module("train_report")
    for name in ("format_table", "save_numbers", "save_plot"):
        write = getattr(report, name)
        monkeypatch.setattr(report, name, lambda *args, write=write: (signal.raise_signal(signal.SIGINT), write(*args))[1])
    output, results = run_demo("--device", "cpu", "--ways", "eager", "--steps", "2")
    assert "last loss" in output and "plot: " in output and list(results) == ["eager"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_demo_keeps_what_was_finished_when_interrupted_after_a_way(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr("gc.collect", lambda: signal.raise_signal(signal.SIGINT))
    options = ["--preset", "tiny", "--steps", "2", "--ways", "eager", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 130 and "last loss" in capsys.readouterr().out


def test_table_has_ratios_to_the_first_row(tmp_path):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from train_report import Result, format_table
    finally:
        sys.path.remove(str(SCRIPT.parent))
    ways = [
        Result("eager", "eager", [5.0, 4.0], 0.3, 1.0, 300, None, "-"),
        Result("moeblaze", "moeblaze", [5.0], 0.1, 1.0, 100, None, "1 MoE layers"),
    ]
    rows = {line[:17].strip(): line[17:].split() for line in format_table(ways).splitlines()}
    assert "peak memory" not in rows
    assert rows["step"] == ["300.0", "ms", "100.0", "ms"] and rows["faster"] == ["-", "3.00x"]


def train_on_two_ranks(folder):
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", ON_RANKS, "--preset", "tiny", "--steps", "2"]
    printed = printed_by(*command, folder=folder)
    first, last = (float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.MULTILINE))
    assert last < first
    (speed,) = re.findall(r"^([\d,]+) tokens/s on 2 ranks$", printed, re.MULTILINE)
    assert speed != "0"
    return printed


def test_experts_over_two_processes(tmp_path):
    assert "shard_experts: 3 parameters sharded" in train_on_two_ranks(tmp_path)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_experts_over_two_gpus(tmp_path):
    printed = train_on_two_ranks(tmp_path)
    exposed, whole = map(float, re.findall(r"^exposed communication: ([\d.]+) of ([\d.]+) ms", printed, re.MULTILINE)[0])
    assert 0 <= exposed < whole and "MiB kept for backward" in printed


def test_time_that_intervals_cover(monkeypatch):
    monkeypatch.syspath_prepend(str(ON_RANKS.parent))
    covered = runpy.run_path(str(ON_RANKS))["covered"]
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("script", ["examples/train_moe_lm.py", "benchmarks/bench_compile.py", "benchmarks/bench_fsdp.py"])
def test_a_gpu_that_is_not_there(script, tmp_path):
    if "import transformers" in (ROOT / script).read_text():
        pytest.importorskip("transformers")
    done = run(ROOT / script, "--device", "cuda", folder=tmp_path)
    assert done.returncode == 2 and "argument --device: torch sees no GPU here, take --device cpu" in done.stderr, done.stderr
