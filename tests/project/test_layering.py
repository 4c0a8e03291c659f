"""Imports point one way: kernels, ops, lowering, the switch; and what is private to torch or Triton has one reader."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
LOWERING = sorted((ROOT / "lowering").rglob("*.py"))
PACKAGE = sorted((ROOT / "moeblaze_ops").rglob("*.py"))
SWITCH = {"compile.py", "gates.py"}

pytestmark = pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="needs the source tree")


def imports(file: Path, at_top_only: bool = False) -> Iterator[str]:
    """Dotted names that ``file`` imports: modules, and what is taken from them."""
    tree = ast.parse(file.read_text())
    for node in tree.body if at_top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(file: Path) -> Iterator[str]:
    """Dotted names that ``file`` reads, such as ``torch._inductor.config``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def starting_with(names: Iterator[str], *prefixes: str) -> list[str]:
    return [name for name in names if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)]


def by_name(files: list[Path]):
    return pytest.mark.parametrize("file", files, ids=lambda file: file.relative_to(ROOT).as_posix())


@by_name(KERNELS)
def test_kernels_know_torch_triton_and_the_settings_only(file):
    ours = starting_with(imports(file), "moeblaze_ops", "lowering", "tests")
    assert not [name for name in ours if name != "moeblaze_ops.config" and not name.startswith("moeblaze_ops.kernels.")]


def test_settings_know_nothing():
    assert not starting_with(imports(ROOT / "moeblaze_ops" / "config.py"), "moeblaze_ops", "torch")


@by_name(LOWERING)
def test_lowering_does_not_know_the_switch(file):
    assert not starting_with(imports(file), "moeblaze_ops.compile", "moeblaze_ops.explain", "tests")


@by_name([file for file in PACKAGE if file.name not in SWITCH])
def test_only_the_switch_knows_lowering(file):
    assert not starting_with(imports(file), "moeblaze_ops.lowering")


@by_name(PACKAGE)
def test_ops_import_kernels_inside_functions(file):
    top = starting_with(imports(file, at_top_only=True), "moeblaze_ops.kernels", "triton")
    # The block size of the schedule is a number that routing and kernels share; hopper_ops registers ops. Neither
    # imports Triton.
    allowed = "moeblaze_ops.kernels.configs", "moeblaze_ops.kernels.hopper.ops"
    assert not [name for name in top if not name.startswith(allowed)]


@by_name([file for file in PACKAGE if file.name not in SWITCH])
def test_the_switch_is_imported_inside_functions(file):
    assert not starting_with(imports(file, at_top_only=True), "moeblaze_ops.compile")


@by_name([file for file in KERNELS + LOWERING + PACKAGE if file.name != "torch_internals.py"])
def test_one_reader_of_private_compiler_parts(file):
    private = "torch._inductor", "torch._dynamo", "torch._functorch"
    assert not starting_with(imports(file), *private)
    assert not starting_with(attributes(file), *private)


@by_name([file for file in KERNELS + LOWERING + PACKAGE if file.name != "gluon_api.py"])
def test_one_reader_of_gluon(file):
    assert not starting_with(imports(file), "triton.experimental")


@pytest.mark.parametrize("folder", ["kernels", "lowering"])
def test_no_package_of_a_foreign_name(folder):
    """``kernels`` is also the import name of another published package: ours must not shadow it from the root."""
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_every_folder_with_code_is_installed():
    project = pytest.importorskip("tomllib", reason="needs Python 3.11").loads((ROOT / "pyproject.toml").read_text())
    folders = {file.relative_to(ROOT).parent.as_posix() for file in PACKAGE + KERNELS + LOWERING}
    packages = {folder.replace("/", ".").replace("kernels", "moeblaze_ops.kernels", 1) for folder in folders}
    packages = {f"moeblaze_ops.{name}" if name.startswith("lowering") else name for name in packages}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


@by_name(KERNELS + LOWERING + PACKAGE)
def test_absolute_imports_by_their_installed_name(file):
    assert not starting_with(imports(file), "kernels", "lowering")
