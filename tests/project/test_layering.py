"""The rooms of the code and which way imports point between them; and what is private to torch or Triton has one reader.

A room is a folder of the first level inside a package, or a file that lies beside them. Each test lists all offenders.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The floors of each package, from the ground up. A room imports rooms of lower floors only, whether at import time or
# inside functions. A new room gets its place here.
FLOORS = {
    "kernels": [
        ["configs", "devices", "eight_bits", "formulas", "known_calls", "multiprocessors", "tracing", "settings"],
        ["activations", "launch", "tiles"],
        ["repeated"],
        ["hopper", "routing", "rows"],
        ["select"],
        ["experts"],
    ],
    "lowering": [
        ["patches"],
        ["torch_internals"],
        ["graph"],
        ["index_notation", "inductor", "undoable_edits"],
        ["facts"],
        ["evaluate", "forms"],
        ["match", "obligations"],
        ["router", "statement", "tracing"],
        ["rewrite"],
    ],
    "moeblaze_ops": [
        ["config", "sources", "adapters", "arguments", "explanation", "logs", "plain_words", "torch_logs", "unchanged"],
        ["cpu", "memory", "comparison"],
        ["ops"],
        ["distributed"],
        ["functional", "routing"],
        ["module"],
        ["compile"],
        ["integrations"],
        ["explain"],
        ["packing", "report", "verify"],
        ["bench"],
        ["__init__"],
    ],
}
MOST_ARROWS = {"kernels": 39, "lowering": 45, "moeblaze_ops": 72}
MOST_FILES = 15

# A wrong line here can make a wrong rewrite of a captured graph; DESIGN.md says what each is trusted with. 5,800 is the aim.
TRUSTED = (
    "lowering/graph",
    "lowering/forms",
    "lowering/evaluate",
    "lowering/index_notation",
    "lowering/facts",
    "lowering/statement",
    "lowering/match/region.py",
    "lowering/match/terms/padding.py",
    "lowering/match/terms/pointwise_formula.py",
)
# But for files in these rooms that only say how deep is looked, or what may be one value: whatever they say, no rewrite is wrong,
# which tests/rewrite/test_any_depth.py, tests/rewrite/weights/test_joined_otherwise.py and
# tests/unit/index_notation/test_counted_numbers.py show of their answers.
SEARCHING = (
    "lowering/evaluate/counted_numbers.py",
    "lowering/evaluate/depth.py",
    "lowering/evaluate/joined_rows.py",
    "lowering/evaluate/projections.py",
    "lowering/forms/factors.py",
    "lowering/forms/low_rank.py",
    "lowering/graph/computed_weights.py",
    "lowering/graph/model_state.py",
    "lowering/index_notation/reshape_index.py",
)
MOST_TRUSTED_LINES = 6616

# What a package may know of the others. The switch hands graphs to lowering.
ROOF = "compile"
ABOVE_LOWERING = [room for floor in FLOORS["moeblaze_ops"][4:] for room in floor]

pytestmark = pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="needs the source tree")


@cache
def files(package: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / package).rglob("*.py")))


def all_files() -> list[Path]:
    return [file for package in FLOORS for file in files(package)]


def name_of(file: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join((["moeblaze_ops"] if parts[0] != "moeblaze_ops" else []) + parts).removesuffix(".__init__")


def place(name: str) -> tuple[str, str] | None:
    """The package and the room of a dotted name of ours."""
    first, *parts = name.split(".")
    if first != "moeblaze_ops":
        return None
    if parts[:1] in (["kernels"], ["lowering"]):
        return parts[0], parts[1] if len(parts) > 1 else "__init__"
    return first, parts[0] if parts else "__init__"


@cache
def imports(file: Path, at_top_only: bool = False) -> tuple[str, ...]:
    """Dotted names that ``file`` imports: modules, and what is taken from them; inside functions, too."""
    tree = ast.parse(file.read_text())
    found = []
    for node in tree.body if at_top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return tuple(found)


@cache
def modules() -> dict[str, Path]:
    return {name_of(file): file for file in all_files()}


def imported(file: Path) -> set[str]:
    """Modules of ours that ``file`` imports, at any time."""
    names = (name if name in modules() else name.rpartition(".")[0] for name in imports(file))
    return {name for name in names if name in modules() and name != name_of(file)}


def attributes(file: Path) -> Iterator[str]:
    """Dotted names that ``file`` reads, such as ``torch._inductor.config``."""
    return (ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute))


def starting_with(names: Iterable[str], *prefixes: str) -> list[str]:
    return [name for name in names if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)]


def arrows(package: str) -> dict[tuple[str, str], list[str]]:
    """Between which rooms of a package imports point, and which imports these are."""
    found = defaultdict(list)
    for file in files(package):
        here = place(name_of(file))
        for name in imported(file):
            there = place(name)
            if there[0] == package and there != here:
                found[here[1], there[1]].append(f"{name_of(file)} -> {name}")
    return found


def offenders(chosen: Iterable[Path], *prefixes: str, but: Iterable[str] = (), at_top_only: bool = False) -> list[str]:
    """The imports of names that start with a prefix, of files in no room of ``but``."""
    return [
        f"{file.relative_to(ROOT)}: {name}"
        for file in chosen
        if place(name_of(file))[1] not in but
        for name in starting_with(imports(file, at_top_only), *prefixes)
    ]


@pytest.mark.parametrize("package", FLOORS)
def test_imports_point_down(package):
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms}
    rooms = {place(name_of(file))[1] for file in files(package)}
    assert not rooms - set(floor_of), f"rooms without a floor in FLOORS[{package!r}]"
    found = arrows(package)
    assert not [names for (a, b), names in found.items() if floor_of[a] <= floor_of[b]], "imports that do not point down"
    assert len(found) <= MOST_ARROWS[package], sorted(found)


def test_no_circles():
    """Not even of imports inside functions: what a fake or a launcher imports when it runs counts as well."""
    beneath = {name: imported(file) for name, file in modules().items()}
    while free := [name for name, others in beneath.items() if not others & beneath.keys()]:
        for name in free:
            del beneath[name]
    assert not {name: sorted(others & beneath.keys()) for name, others in beneath.items()}


def test_packages_know_each_other_one_way():
    found = offenders(files("kernels"), "moeblaze_ops", "tests")
    assert not [line for line in found if ": moeblaze_ops.kernels." not in line], "kernels know torch and Triton only"
    found = offenders(files("lowering"), "tests", *(f"moeblaze_ops.{room}" for room in ABOVE_LOWERING))
    assert not found, "lowering knows ops and kernels only"
    assert not offenders(files("moeblaze_ops"), "moeblaze_ops.lowering", "tests", but={ROOF}), "only the switch knows lowering"
    assert not offenders([ROOT / "moeblaze_ops" / "config.py"], "moeblaze_ops", "torch"), "settings know nothing"


def test_importing_ops_imports_neither_triton_nor_the_switch():
    without_triton = "configs", "devices", "eight_bits", "formulas", "known_calls", "settings", "hopper.ops"
    found = offenders(files("moeblaze_ops"), "moeblaze_ops.kernels", "triton", at_top_only=True)
    assert not [line for line in found if not starting_with([line.partition("kernels.")[2]], *without_triton)]
    assert not offenders(files("moeblaze_ops"), "moeblaze_ops.compile", but={"compile"}, at_top_only=True)


def test_kernels_that_ops_name_exist():
    named = [
        keyword.value.value
        for file in files("moeblaze_ops")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_op"
        for keyword in node.keywords
        if keyword.arg == "kernel"
    ]
    assert named

    def functions(module: str) -> set[str]:
        tree = ast.parse((ROOT / "kernels" / f"{module.replace('.', '/')}.py").read_text())
        return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    assert not [kernel for kernel in named if kernel.partition(":")[2] not in functions(kernel.partition(":")[0])]


def test_private_compiler_parts_are_read_in_two_places():
    """Besides ``torch_internals``, what follows Dynamo while it traces."""
    private = "torch._inductor", "torch._dynamo", "torch._functorch"
    others = [f for f in all_files() if f.parent.name not in ("torch_internals", "tracing")]
    assert not offenders(others, *private)
    assert not {file.name: found for file in others if (found := starting_with(attributes(file), *private))}


def test_one_reader_of_gluon():
    assert not offenders([file for file in all_files() if file.name != "gluon_api.py"], "triton.experimental")


def test_private_names_stay_in_their_files():
    def is_private(name: str) -> bool:
        last = name.rpartition(".")[2]
        return last.startswith("_") and not last.startswith("__")

    everywhere = [*all_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = {file.relative_to(ROOT): starting_with(imports(file), "moeblaze_ops", "tests") for file in everywhere}
    assert not {str(file): private for file, names in found.items() if (private := list(filter(is_private, names)))}


def test_public_functions_are_typed():
    """All but the bodies of kernels, whose arguments are no Python objects."""

    def untyped(node: ast.FunctionDef) -> bool:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        missing = [a for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        return bool(missing) or (node.returns is None and node.name != "__init__")

    def public(tree: ast.AST) -> Iterator[ast.FunctionDef]:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from public(node)
            elif isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
                yield node

    def is_body(node: ast.FunctionDef) -> bool:
        return any(word in ast.unparse(decorator) for decorator in node.decorator_list for word in ("jit", "constexpr_function"))

    assert not [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in all_files()
        for node in public(ast.parse(file.read_text()))
        if untyped(node) and not is_body(node)
    ]


def test_absolute_imports_by_their_installed_name():
    assert not offenders(all_files(), "kernels", "lowering")


@pytest.mark.parametrize("folder", ["kernels", "lowering"])
def test_no_package_of_a_foreign_name(folder):
    """``kernels`` is also the import name of another published package: ours must not shadow it from the root."""
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_folders_are_small():
    """Rooms that one sees at a glance: no folder of code or tests has more files than fifteen."""
    found = defaultdict(int)
    for file in [*all_files(), *(ROOT / "tests").rglob("*.py")]:
        found[file.parent.relative_to(ROOT)] += 1
    assert not {str(folder): number for folder, number in found.items() if number > MOST_FILES}


def test_trusted_base_does_not_grow():
    paths = {str(file.relative_to(ROOT)): file for file in all_files()}
    own = [file for path, file in paths.items() if path.startswith(TRUSTED) and path not in SEARCHING]
    assert not set(SEARCHING) - set(paths)
    assert sum(file.read_text().count("\n") for file in own) <= MOST_TRUSTED_LINES
    design = (ROOT / "DESIGN.md").read_text()
    assert not [place for place in TRUSTED if f"| `{place}" not in design] and f"{MOST_TRUSTED_LINES:,} lines" in design


def test_every_folder_with_code_is_installed():
    project = pytest.importorskip("tomllib", reason="needs Python 3.11").loads((ROOT / "pyproject.toml").read_text())
    folders = {name_of(file).removesuffix(f".{file.stem}") for file in all_files()}
    assert set(project["tool"]["setuptools"]["packages"]) == folders - {"moeblaze_ops.torch_logs"} | {"moeblaze"}
