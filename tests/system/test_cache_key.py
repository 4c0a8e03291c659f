"""Caches on disk must not serve what other sources of ours compiled: each test edits a copy of the package."""

import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops import config, sources
from moeblaze_ops.kernels import devices

_FOLDERS = ("moeblaze_ops", "kernels", "lowering")

# Each line that it reads has a fork of it import the package, which torch does not, and train.
_PROGRAM = """
import os
import sys
import torch._inductor.compile_fx
from torch._dynamo.utils import counters

for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print("END", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

import moeblaze_ops

torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
torch._inductor.config.fallback_by_default = True


def layer(*inputs):
    return moeblaze_ops.moe(*inputs, activation="relu")


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return layer(*inputs)

    @staticmethod
    def backward(ctx, dout):
        return dout, None, None, None, None


def train(function):
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    x, weights = torch.randn(6, 4, requires_grad=True), torch.rand(6, 2)
    experts = torch.arange(12).view(6, 2) % 3
    w_up, w_down = torch.randn(3, 5, 4), torch.randn(3, 4, 5)
    torch.compile(lambda *inputs: function(*inputs))(x, weights, experts, w_up, w_down).sum().backward()
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    print("RESULT", hits, x.grad.abs().sum().item())


train(layer)
train(Layer.apply)
moeblaze_ops.enable()
train(layer)
"""


_BACKWARD = "    dh_NGF = dh_NGF.contiguous()\n"
_OTHER_BACKWARD = "    dh_NGF = 2 * dh_NGF.contiguous()\n"


@pytest.fixture(scope="module")
def copy_of_package(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    source = Path(moeblaze_ops.__file__).parent.parent
    for folder in _FOLDERS:
        origin = source / folder if (source / folder).is_dir() else source / "moeblaze_ops" / folder
        shutil.copytree(origin, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pyproject.toml").touch()
    (root / "lowering" / "rewrite" / "rewrite.py").write_text(
        "from types import SimpleNamespace\n\n\n"
        "def rewrite_graph(gm):\n    return SimpleNamespace(candidates=(), direct=(), runs=[], rewritten=(), declined=())\n"
    )
    return root


@contextmanager
def trainer(root: Path, cache: Path) -> Iterator[Callable[[], list[tuple[int, float]]]]:
    """Gives, in a new process for each call, of one training step each the cache hits and the size of the gradient.

    The steps: explicit, in a function, with the switch.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    command, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
    with (
        open(cache / "errors", "w") as errors,
        subprocess.Popen(command, env=environment, cwd=cache, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):

        def train() -> list[tuple[int, float]]:
            print(file=process.stdin, flush=True)
            lines = []
            while not lines or lines[-1][:1] not in ([], ["END"]):
                lines.append(process.stdout.readline().split())
            assert lines.pop() == ["END", "0"], (cache / "errors").read_text()
            return [(int(hits), float(gradient)) for kind, hits, gradient in lines if kind == "RESULT"]

        yield train


def test_edited_backward_misses_the_caches(copy_of_package, tmp_path):
    """With the switch and without, which share what they compiled of a graph in which nothing is rewritten, and where a custom
    autograd function of the user's calls the ops.
    """
    edited = copy_of_package / "moeblaze_ops" / "ops" / "expert_up.py"
    original = edited.read_text()
    assert _BACKWARD in original
    with trainer(copy_of_package, tmp_path) as train:
        cold, warm = train(), train()
        edited.write_text(original.replace(_BACKWARD, _OTHER_BACKWARD))
        other = train()
    assert [hits > 0 for hits, _ in cold] == [False, False, True]
    assert [hits > 0 for hits, _ in warm] == [True] * 3
    assert [hits > 0 for hits, _ in other] == [False, False, True]
    explicit, in_function, switched = (gradient for _, gradient in cold)
    assert [gradient for _, gradient in warm] == [explicit, in_function, switched]
    assert [gradient for _, gradient in other] == pytest.approx([2 * explicit, in_function, 2 * switched])


def test_key_holds_every_knob(monkeypatch):
    keys = {moeblaze_compile.cache_key()}
    for knob, value in config.snapshot().items():
        kind = get_type_hints(config)[knob]
        others = get_args(kind) if get_origin(kind) is Literal else (not value,) if kind is bool else (12345,)
        with monkeypatch.context() as patch:
            patch.setattr(config, knob, next(other for other in others if other != value))
            keys.add(moeblaze_compile.cache_key())
    assert len(keys) == 1 + len(config.snapshot())


def test_key_holds_what_kernels_ask_of_a_gpu(monkeypatch):
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    questions = [name for name in vars(devices) if name in ("capability", "multiprocessors", "memory_bytes")]
    for name in questions:
        monkeypatch.setattr(devices, name, lambda device: 1)
    keys = {moeblaze_compile.cache_key(), moeblaze_compile.cache_key(gpus[:1]), moeblaze_compile.cache_key(gpus)}
    for name in questions:
        with monkeypatch.context() as patch:
            patch.setattr(devices, name, lambda device: 2)
            keys.add(moeblaze_compile.cache_key(gpus))
    assert len(keys) == 6


def test_nothing_else_is_asked_of_the_machine():
    """What decides about code and is neither in its graph nor in the key would have a machine run the code of another."""
    asked = re.compile(r"os\.(environ|getenv|sysconf)|get_device_(properties|capability)|mem_get_info|device_count")
    root = Path(moeblaze_ops.__file__).parent.parent
    found = {
        file.relative_to(root).as_posix()
        for folder in _FOLDERS
        for file in (root / folder).rglob("*.py")
        if asked.search(file.read_text())
    }
    assert found == {
        "kernels/devices.py",  # in the key
        "kernels/repeated.py",  # while a program runs
        "moeblaze_ops/arguments/validation_calls.py",  # for an error
        "moeblaze_ops/comparison.py",  # of what was compiled already
        "moeblaze_ops/memory/estimate.py",  # which operators there are: the graph has them
        "moeblaze_ops/ops/sharded/hosts.py",  # for a warning
        "moeblaze_ops/ops/sharded/peer_copies.py",  # an argument of operators
        "moeblaze_ops/report/__main__.py",  # who prints
    }


@pytest.mark.parametrize("library", ["torch", "triton"])
def test_key_holds_versions(monkeypatch, library):
    before = moeblaze_compile.cache_key()
    monkeypatch.setattr(pytest.importorskip(library), "__version__", "0.0")
    assert moeblaze_compile.cache_key() != before


def test_key_holds_the_sources(monkeypatch):
    before = moeblaze_compile.cache_key()
    monkeypatch.setattr(sources, "DIGEST", "another")
    assert moeblaze_compile.cache_key() != before


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("depth", ["", "room", "room/inner"])
@pytest.mark.parametrize("folder", _FOLDERS)
def test_digest_holds_every_source(tmp_path, folder, depth, installed):
    """In a checkout ``kernels`` and ``lowering`` are beside the package, once installed inside."""
    package = tmp_path / "moeblaze_ops"
    path = [str(package)] if installed else [str(package), str(tmp_path)]
    files = {name: (package if installed else tmp_path) / name / depth / "file.py" for name in ("kernels", "lowering")}
    files["moeblaze_ops"] = package / depth / "file.py"
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    before = sources.digest(path, "1")
    files[folder].write_text("pass")
    edited = sources.digest(path, "1")
    files[folder].rename(files[folder].with_name("renamed.py"))
    renamed = sources.digest(path, "1")
    (files[folder].parent / "moved").mkdir()
    files[folder].with_name("renamed.py").rename(files[folder].parent / "moved" / "renamed.py")
    assert len({before, edited, renamed, sources.digest(path, "1")}) == 4


def test_digest_is_taken_at_import():
    """And covers this very checkout: sources edited since would make this fail, so it reads them in a new process."""
    program = (
        "import moeblaze_ops, sys; from pathlib import Path; sources = sys.modules['moeblaze_ops.sources']\n"
        "assert sources.DIGEST == sources.digest(moeblaze_ops.__path__, '') != sources.digest(['/nowhere'], '')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("frozen", ["zip", "zip of bytecode", "bytecode", "executable"])
def test_digest_of_an_application_without_source_files(tmp_path, frozen):
    """Another version never has the key of this one, and so what was compiled for it: no digest is that of nothing."""
    digests = []
    for version, body in enumerate(("pass", "pass", "answer = 42")):
        package = tmp_path / str(version) / "moeblaze_ops"
        (package / "kernels").mkdir(parents=True)
        for file in (package / "module.py", package / "kernels" / "kernel.py"):
            file.write_text(body)
            os.utime(file, (1e9, 1e9))
            if "bytecode" in frozen:
                py_compile.compile(str(file), str(file.with_suffix(".pyc")), dfile="module.py")
                file.unlink()
        path = [str(package)]
        if frozen.startswith("zip"):
            archive = shutil.make_archive(str(tmp_path / f"app{version}"), "zip", package.parent)
            path = [f"{archive}/moeblaze_ops"]
        elif frozen == "executable":
            path = ["/inside/of/an/executable/moeblaze_ops"]
        digests.append(sources.digest(path, "1" if version < 2 else "2"))
    same, again, other = digests
    assert same == again != other
    assert hashlib.sha256().hexdigest() not in digests


def test_package_in_a_zip_file(tmp_path):
    """Imported by Python's own zip importer, it takes the digest that its files would have."""
    installed = tmp_path / "moeblaze_ops"
    package, *checkout = map(Path, moeblaze_ops.__path__)
    shutil.copytree(package, installed, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "lowering"):
        for parent in checkout:
            shutil.copytree(parent / name, installed / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    expected = sources.digest([str(installed)], "")
    archive = shutil.make_archive(str(tmp_path / "app"), "zip", tmp_path, "moeblaze_ops")
    shutil.rmtree(installed)
    program = "import moeblaze_ops, sys; print(moeblaze_ops.__file__, sys.modules['moeblaze_ops.sources'].DIGEST)"
    environment = {**os.environ, "PYTHONPATH": archive}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    file, found = done.stdout.split()
    assert file.startswith(archive) and found == expected
