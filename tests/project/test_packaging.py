"""The package as a user gets it: every way to install it, beside another package that is called `kernels`."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import moeblaze_ops
from tests.tools.documents import blocks, shown_outputs

ROOT = Path(__file__).resolve().parents[2]
DIST = os.environ.get("DIST")
"""A folder with an sdist and a wheel, as `make release` leaves it, which are tested in place of new ones."""
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "outputs", "*.egg-info", "shared")


def installed_version(package: str) -> int:
    """Major version, 0 if missing. Metadata only: looking for pip's module would switch setuptools to stdlib distutils."""
    try:
        return int(importlib.metadata.version(package).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


if not installed_version("pip"):
    pytest.skip("needs pip", allow_module_level=True)
if installed_version("setuptools") < 77:
    pytest.skip("needs setuptools 77 or newer, which reads our pyproject.toml", allow_module_level=True)

CHECK = """
import sys, importlib.util
from pathlib import Path

expected, other = Path(sys.argv[1]), Path(sys.argv[2])
import kernels
import moeblaze_ops
import moeblaze_ops.integrations
import moeblaze_ops.kernels.configs
import moeblaze_ops.lowering.graph.functional_view

assert kernels.IS_ANOTHER_PACKAGE, kernels
assert Path(moeblaze_ops.__file__).parent == expected / "moeblaze_ops", moeblaze_ops.__file__
assert moeblaze_ops.kernels.configs.ROW_BLOCK == 128
assert importlib.util.find_spec("lowering") is None or Path.cwd() == expected
"""

# A finder that knows what the wheel asks for, and what that asks for, but nothing else that is installed.
DECLARED_ALONE = r"""
import importlib.machinery, importlib.metadata as metadata, re, sys

def asked_for(package):
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return set()
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines if "extra ==" not in line}

def normal(name):
    return re.sub("[-_.]+", "-", name).lower()

known, new = {"moeblaze"}, {"moeblaze"}
while new:
    new = set().union(*map(asked_for, new)) - known
    known |= new

installed = metadata.packages_distributions()
undeclared = {module for module, packages in installed.items() if not known & set(map(normal, packages))}
assert "numpy" in undeclared and "torch" not in undeclared, undeclared

installed_in = str(metadata.distribution("torch").locate_file("")).rstrip("/")

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in undeclared:  # but what setuptools brings along is elsewhere
            path = [folder for folder in sys.path if folder.rstrip("/") != installed_in]
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""

RUN_PAGE = """
names = {"__name__": "__main__"}
for file in sys.argv[1:]:
    exec(compile(open(file).read(), file, "exec"), names)
assert "numpy" not in sys.modules
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources: a build leaves files beside them."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "moeblaze", ignore=NOT_SOURCES)


@pytest.fixture(scope="module")
def other_kernels(tmp_path_factory):
    """A folder that holds a package named `kernels`."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("IS_ANOTHER_PACKAGE = True\n")
    return folder


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    return one(DIST, "*.tar.gz") if DIST else build("build_sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel built from the sdist, which is what an index would serve."""
    if DIST:
        return one(DIST, "*.whl")
    unpacked = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, unpacked)
    return build("build_wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


def build(hook, source, folder):
    """Calls a hook of the build backend in `source` and returns the file that it wrote in `folder`."""
    code = f"from setuptools import build_meta; build_meta.{hook}({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=source)
    return next(folder.iterdir())


def one(folder, pattern):
    (found,) = Path(folder).glob(pattern)
    return found


def metadata_of(wheel):
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()


def pip_install(*arguments):
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", *arguments)


def run(*command, cwd=None):
    """Runs a command that finds what is installed, and not what PYTHONPATH adds to that; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_import(expected, other_kernels, *, install_folder=None, cwd):
    """Imports the package in a fresh interpreter that knows torch, `install_folder` and the other `kernels` only.

    Without site (-S), a moeblaze that is installed beside torch in editable mode stays out.
    """
    folders = [str(folder) for folder in (other_kernels, install_folder) if folder]
    setup = f"import site, sys; sys.path.append({str(Path(torch.__file__).parent.parent)!r})\n"
    setup += "".join(f"sys.path.insert(0, {folder!r}); site.addsitedir({folder!r})\n" for folder in folders)
    setup += f"sys.path.insert(0, {str(cwd)!r})\n"
    run(sys.executable, "-S", "-c", setup + CHECK, str(expected), str(other_kernels), cwd=cwd)


def test_wheel_holds_the_package_and_nothing_else(wheel, checkout):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(checkout).as_posix() for path in (checkout / "moeblaze_ops").rglob("*.py")}
    for folder in ("kernels", "lowering"):
        sources |= {f"moeblaze_ops/{path.relative_to(checkout).as_posix()}" for path in (checkout / folder).rglob("*.py")}
    # What gives torch's logs their name is a package of its own.
    sources = sources - {"moeblaze_ops/torch_logs/__init__.py"} | {"moeblaze/__init__.py"}
    assert names == sources | {"moeblaze_ops/py.typed"}


def test_sdist_holds_the_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"tests/conftest.py", "tests/project/test_packaging.py", "constraints.txt", "Makefile", "LICENSE"} <= names


def test_wheel_imports_beside_another_kernels(wheel, other_kernels, tmp_path):
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip_install("--target", str(target), str(wheel))
    check_import(target, other_kernels, install_folder=target, cwd=elsewhere)


# A torch for a CPU asks for no Triton: then it is missing in either case.
@pytest.mark.parametrize("missing", ["triton", *([""] if "triton" in str(importlib.metadata.requires("torch")) else [])])
def test_readme_runs_with_what_the_wheel_asks_for(wheel, tmp_path, missing):
    """Nothing that tests or other packages brought along; and without Triton, which a CPU does not need."""
    pip_install("--target", str(tmp_path / "target"), str(wheel))
    files = []
    for number, block in enumerate(block for block in blocks(ROOT / "README.md") if block.language == "python"):
        files.append(tmp_path / (block.title or f"step_{number}.py"))
        files[-1].write_text(block.content)
    setup = f"import sys; sys.path += [{str(tmp_path / 'target')!r}, {str(Path(torch.__file__).parent.parent)!r}]\n"
    setup += DECLARED_ALONE + (f"sys.modules[{missing!r}] = None\n" if missing else "")
    printed = run(sys.executable, "-S", "-c", setup + RUN_PAGE, *map(str, files), cwd=tmp_path)
    assert "1 of 1 MoE layers rewritten" in printed


class NewVenv:
    """A venv with nothing but what an index would bring: torch and its like are those of the Python that runs the tests."""

    def __init__(self, python, folder, *, torch_too):
        run(python, "-m", "venv", str(folder))
        self.bin = folder / "bin"
        if torch_too:
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
            for old in packages.glob("setuptools*"):  # up to Python 3.11 a venv has one that does not read our pyproject.toml
                shutil.rmtree(old)

    def run(self, *command, cwd):
        """Runs a command that finds the venv's programs first."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # pip's way to say that there is no index, and that setuptools is there already.
        environment |= {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        program = shutil.which(command[0], path=environment["PATH"])
        done = subprocess.run([program, *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def new_venv(checkout, tmp_path_factory):
    """README's first command, in a copy of the checkout."""
    venv = NewVenv(sys.executable, tmp_path_factory.mktemp("venv") / "venv", torch_too=True)
    (command,) = [line.partition("#")[0].split() for block in blocks(ROOT / "README.md") for line in pip_commands(block)]
    source = shutil.copytree(checkout, tmp_path_factory.mktemp("clone") / "moeblaze")
    venv.run(*command, cwd=source)
    return venv


def pip_commands(block):
    return [line for line in block.content.splitlines() if block.language == "bash" and line.startswith("pip ")]


def test_readme_in_a_new_venv(new_venv, tmp_path):
    """Every block in order prints what the page shows, by the package that `pip install .` put there."""
    files = []
    for number, block in enumerate(block for block in blocks(ROOT / "README.md") if block.language == "python"):
        files.append(tmp_path / (block.title or f"step_{number}.py"))
        files[-1].write_text(block.content)
    run_page, _, _ = RUN_PAGE.partition("assert")
    program = f"import sys\n{run_page}import moeblaze_ops\nprint(moeblaze_ops.__file__)"
    printed = new_venv.run("python", "-c", program, *(file.name for file in files), cwd=tmp_path)
    *shown, place = printed.replace(f"{Path(torch.__file__).parents[1]}/", "").splitlines()
    assert shown == "".join(block.content for _, block in shown_outputs(ROOT / "README.md")).splitlines()
    assert Path(place).is_relative_to(new_venv.bin.parent)


def test_commands_in_a_new_venv(new_venv, tmp_path):
    """Those of getting started are there; what they do is that of a checkout, and of the page above."""
    (tmp_path / "train.py").write_text("import torch\ntorch.compile(torch.nn.Linear(2, 2))\n")
    new_venv.run("python", "-m", "moeblaze_ops.report", "train.py", cwd=tmp_path)
    assert "--seconds" in new_venv.run("python", "-m", "moeblaze_ops.bench", "--help", cwd=tmp_path)


def found_python(name):
    """A Python of PATH or beside the one that runs the tests which starts: a name of pyenv's may lead nowhere."""
    beside = Path(sys.base_prefix).parent.glob(f"{name.removeprefix('python')}*/bin/{name}")
    for python in filter(None, [shutil.which(name), *map(str, beside)]):
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("minor", [10, 13])
def test_each_python_takes_the_wheel(wheel, tmp_path, minor):
    """pip installs it, and each of its files is code of the oldest Python and of the strictest one, examples included."""
    python = found_python(f"python3.{minor}")
    if python is None:
        pytest.skip(f"Python 3.{minor} is not on this machine, nor in a folder of PATH")
    venv = NewVenv(python, tmp_path / "venv", torch_too=False)
    venv.run("pip", "install", "--quiet", "--no-deps", str(wheel), cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    sources = str(packages / "moeblaze_ops"), str(shutil.copytree(ROOT / "examples", tmp_path / "examples"))
    venv.run("python", "-W", "error", "-m", "compileall", "-q", "-f", *sources, cwd=tmp_path)


def test_editable_install_imports_beside_another_kernels(checkout, other_kernels, tmp_path):
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip_install("--target", str(target), "--editable", str(checkout))
    check_import(checkout, other_kernels, install_folder=target, cwd=elsewhere)


def test_checkout_imports_beside_another_kernels(checkout, other_kernels):
    check_import(checkout, other_kernels, cwd=checkout)


def test_entry_point_names_the_backend(wheel):
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "moeblaze = moeblaze_ops.compile:moeblaze_backend" in archive.read(name).decode()
    assert callable(importlib.metadata.EntryPoint("moeblaze", "moeblaze_ops.compile:moeblaze_backend", "").load())


def release(checkout, out):
    command = [sys.executable, ".ci/release", "--repository", "https://example.org/moeblaze", "--out", str(out)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_release_is_the_last_commit_under_its_number(checkout, tmp_path):
    checkout = shutil.copytree(checkout, tmp_path / "moeblaze", ignore=NOT_SOURCES)
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "--message", "a"]):
        run("git", *command, cwd=checkout)
    (checkout / "README.md").write_text("another")
    assert "must be as committed" in release(checkout, tmp_path / "dist").stderr
    run("git", "checkout", "README.md", cwd=checkout)
    done = release(checkout, tmp_path / "dist")
    assert done.returncode == 0, done.stdout + done.stderr
    version = moeblaze_ops.__version__.removesuffix(".dev0")
    metadata = metadata_of(tmp_path / "dist" / f"moeblaze-{version}-py3-none-any.whl")
    assert version != moeblaze_ops.__version__ and f"\nVersion: {version}\n" in metadata
    assert "Project-URL: Repository, https://example.org/moeblaze" in metadata
    assert not re.search(r"\]\((?!https://|#)", metadata.partition("\n\n")[2])
    assert f"(https://example.org/moeblaze/blob/v{version}/DESIGN.md)" in metadata


def test_versions_agree():
    """What is cited, what the changes are listed under, and what a checkout is on its way to."""
    version = moeblaze_ops.__version__.removesuffix(".dev0")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
