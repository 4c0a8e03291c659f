"""What the README says can be typed: its Python runs, its commands name what exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"

PRINT_OPERATORS = """
import importlib, pkgutil
import torch, moeblaze_ops

for module in pkgutil.iter_modules(moeblaze_ops.ops.__path__, "moeblaze_ops.ops."):
    importlib.import_module(module.name)
for name in torch._C._dispatch_get_all_op_names():
    if name.startswith("moeblaze::"):
        print(name.removeprefix("moeblaze::"))
"""

if not README.is_file():
    pytest.skip("runs in a checkout only", allow_module_level=True)


def blocks(language):
    """The contents of the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands():
    """Every shell command, without its comment, as a list of words."""
    return [words for block in blocks("bash") for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def run(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_python_runs(tmp_path):
    """All blocks in one interpreter, each building on those before it.

    Before and after are two programs in the README; here they share a process, and so what Dynamo has compiled.
    """
    script = tmp_path / "readme.py"
    script.write_text("\ntorch._dynamo.reset()\n".join(["import torch", *blocks("python"), "assert out.shape == x.shape\n"]))
    assert "1 of 1 MoE layers rewritten" in run(str(script), cwd=tmp_path)


@pytest.mark.parametrize("words", commands(), ids=shlex.join)
def test_readme_command_exists(words):
    program, target, *arguments = words
    if program == "make":
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    assert program == "python"
    described = run(target, "--help", cwd=ROOT)
    assert all(option in described for option in arguments if option.startswith("--"))


def test_readme_names_every_operator(tmp_path):
    names = set(run("-c", PRINT_OPERATORS, cwd=tmp_path).split())
    table = README.read_text().split("## The operators")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == names
