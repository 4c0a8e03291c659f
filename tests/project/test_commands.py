"""``python -m moeblaze_ops.bench`` and ``python -m moeblaze_ops.report``, at a small size on a CPU."""

import os
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest
import torch._inductor.config

import moeblaze_ops
from moeblaze_ops import bench
from tests.tools.programs import printed_by, run

ROOT = Path(moeblaze_ops.__file__).parents[1]
REPORT = "moeblaze_ops.report"

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, D=16, F_=24, E=4, K=2):
        super().__init__()
        self.K, self.router = K, nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, F_, D) / 4)
        self.down = nn.Parameter(torch.randn(E, D, F_) / 4)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(self.K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            y = F.linear(F.silu(F.linear(x, self.up[e])), self.down[e])
            out = out + y * (weights * (chosen == e)).sum(dim=-1, keepdim=True)
        return out
"""

SCRIPT = """
import sys
import torch._inductor.config
from model import Layer

torch._inductor.config.fallback_by_default = True
torch.compile(Layer())(torch.randn(32, 16)).sum().backward()
print(__name__, sys.argv)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _no_loops_in_cxx():
    with torch._inductor.config.patch(fallback_by_default=True):
        yield


def table(printed: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith(("compile", "moeblaze  "))}


@pytest.mark.parametrize("sizes", [["32", "16", "24", "4", "2"], ["32", "16"]], ids=["with_sizes", "without"])
def test_bench_of_a_model(sizes, tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    bench.main([*sizes, "--model", f"{tmp_path / 'model.py'}:Layer", "--device", "cpu", "--seconds", "0.01"])
    printed = capsys.readouterr().out
    assert "1 of 1 MoE layers rewritten" in printed and "against torch.float64" in printed
    rows = table(printed)
    assert rows["compile"][2] == "1.00x" and float(rows["moeblaze"][3]) < float(rows["compile"][3])
    assert all(float(row[-1]) < 1e-5 for row in rows.values())


def test_bench_of_its_own_layer(tmp_path, capsys):
    drawn = tmp_path / "layer.svg"
    bench.main(["64", "32", "48", "4", "2", "--device", "cpu", "--seconds", "0.01", "--picture", str(drawn)])
    printed = capsys.readouterr().out
    rows = table(printed)
    # What is kept tells that the second way was rewritten although the first one is left to eager mode.
    assert float(rows["moeblaze"][3]) < float(rows["compile"][3]), printed
    bars = [float(width) for width in re.findall(r'<rect [^>]*width="(\d+)"', drawn.read_text())]
    assert len(bars) == 4 and bars[3] < bars[2] and "kept for backward" in drawn.read_text()
    xml.dom.minidom.parse(str(drawn))


def test_bench_of_a_model_that_takes_sequences(tmp_path, capsys):
    shaped = "\n\nclass OfSequences(Layer):\n    def forward(self, x):\n        b, l, d = x.shape\n"
    (tmp_path / "model.py").write_text(MODEL + shaped + "        return super().forward(x.reshape(-1, d)).view(b, l, d)\n")
    model = f"{tmp_path / 'model.py'}:OfSequences"
    bench.main(["32", "16", "--batch", "4", "--model", model, "--device", "cpu", "--seconds", "0.01"])
    assert "1 of 1 MoE layers rewritten" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["32", "16", "--batch", "5", "--model", model])
    assert "--batch: must divide T = 32, got 5" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["nowhere.py:Layer", f"{__file__}:Nothing"])
def test_bench_refuses_a_model_that_is_not_there(model, capsys):
    with pytest.raises(SystemExit):
        bench.main(["32", "16", "--model", model])
    assert f"--model: must be FILE:NAME of a file and a name in it, got {model}" in capsys.readouterr().err


def test_bench_says_why_a_checkpointed_layer_keeps_nothing(tmp_path, capsys):
    run = "checkpoint(super().forward, x, use_reentrant=False)"
    checkpointed = f"\n\nclass Checkpointed(Layer):\n    def forward(self, x):\n        return {run}\n"
    (tmp_path / "model.py").write_text("from torch.utils.checkpoint import checkpoint\n" + MODEL + checkpointed)
    bench.main(["32", "16", "--model", f"{tmp_path / 'model.py'}:Checkpointed", "--device", "cpu", "--seconds", "0.01"])
    _, _, after_compile = capsys.readouterr().out.partition("\ncompile ")
    assert after_compile.splitlines()[1].startswith("        kept 0.0 KiB: no more than its input and parameters")


def test_bars_of_nothing_have_no_width():
    assert 'width="0"' in bench.bars(0, 100, "kept for backward", "MiB", {"compile": 0.0, "moeblaze": 0.0})[1]


@pytest.mark.parametrize("sizes", [["32"], ["32", "16", "24"], ["32", "0"]])
def test_bench_refuses_other_sizes(sizes, capsys):
    with pytest.raises(SystemExit):
        bench.main(sizes)
    assert f"must be T D F E K or T D, each at least 1, got {' '.join(sizes)}" in capsys.readouterr().err


def test_report_runs_a_script_and_says_what_was_rewritten(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", REPORT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command += [str(tmp_path / "train.py"), "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"__main__ {[str(tmp_path / 'train.py'), '--steps', '2']}\n", done.stderr
    assert done.returncode == 3
    assert "moeblaze: 1 of 1 MoE layers rewritten" in done.stderr


def test_report_runs_a_module_and_other_ranks_are_silent(tmp_path):
    (tmp_path / "plain.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = run("-m", REPORT, "-m", "plain", "a", folder=tmp_path)
    assert done.stdout == "['a']\n" and done.returncode == 0, done.stderr
    assert "enable() compiles nothing itself" in done.stderr
    assert "moeblaze:" not in run("-m", REPORT, "-m", "plain", folder=tmp_path, RANK="1").stderr


def test_report_says_how_it_is_called(tmp_path):
    for arguments, said in ([], ""), (["nowhere.py"], "SCRIPT must be a file that is there, got nowhere.py"):
        done = run("-m", REPORT, *arguments, folder=tmp_path)
        assert done.returncode == 1 and re.match("usage: ", done.stderr) and done.stderr.endswith(f"{said}\n")


def test_report_stays_a_function(tmp_path):
    program = "import moeblaze_ops.report, moeblaze_ops\nassert 'nothing was compiled' in str(moeblaze_ops.report())"
    printed_by("-c", program, folder=tmp_path)
