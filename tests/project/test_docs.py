"""The pages of docs/: their code runs, and prints what they show."""

import hashlib
import importlib.util
import os
import pkgutil
import re
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from tests.tools.documents import blocks, run_page, shown_outputs
from tests.tools.programs import ROOT, printed_by

WRITTEN = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")])
PAGES = [page for page in WRITTEN if any(block.language == "python" for block in blocks(page))]
NEEDS = {
    "expert_parallelism": ["transformers"],
    "getting_started": ["transformers"],
    "inference": ["transformers"],
    "models": ["transformers"],
    "trainer": ["transformers", "accelerate"],
    "peft": ["transformers", "peft"],
}

if not PAGES:
    pytest.skip("runs in a checkout only", allow_module_level=True)

PRINT_OPERATORS = """
import importlib, pkgutil
import torch, moeblaze_ops

for module in pkgutil.walk_packages(moeblaze_ops.__path__[:1], "moeblaze_ops."):
    if not {"integrations", "torchtitan", "axolotl"} & set(module.name.split(".")):
        importlib.import_module(module.name)
print(*(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moeblaze::")), sep="\\n")
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs_and_prints_what_it_shows(page, tmp_path):
    missing = [name for name in NEEDS.get(page.stem, []) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if "torchrun" in page.read_text() and not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    printed = run_page(page, tmp_path)
    if page.suffix == ".ipynb":  # every cell that prints shows it
        assert {span for span, text in printed.items() if text} == {source.span for source, _ in shown_outputs(page)}
    shown = {source.span: block.content for source, block in shown_outputs(page)}
    assert {span: printed[span] for span in shown} == shown


def test_every_operator_is_listed(tmp_path):
    names = {name.removeprefix("moeblaze::") for name in printed_by("-c", PRINT_OPERATORS, folder=tmp_path).split()}
    table = (ROOT / "docs" / "operators.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == names


def test_every_reason_is_explained():
    from moeblaze_ops.lowering.match.reasons import Reason

    page = (ROOT / "docs" / "howto" / "declined.md").read_text()
    assert re.findall(r"^\| `([A-Z_]+)` \|", page, flags=re.MULTILINE) == [reason.name for reason in Reason]


def test_every_page_is_in_the_site():
    listed = re.findall(r"^ +- (?:\w+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages | {"index.md", "design.md", "contributing.md", "changelog.md"} == set(listed)


def test_links_lead_to_files_of_the_site(monkeypatch):
    """Built as the hook of mkdocs has it, which itself the tests do without."""
    for name in ("mkdocs", "mkdocs.plugins", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    files = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.*")}
    files |= {name: ROOT / source for name, source in hooks["FROM_ROOT"].items()}
    for name in filter(lambda name: name.endswith(".md"), files):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        shown = without_code(hooks["on_page_markdown"](files[name].read_text(), page=page))
        for link in re.findall(r"\]\(([^)\s]+)\)", shown):
            file, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(name), file)) if file else name
            assert "://" in link or target in files, (name, link)
            assert not anchor or "://" in link or anchor in anchors(files[target].read_text()), (name, link)


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.suffix == ".md"], ids=lambda page: page.stem)
def test_lists_begin_behind_an_empty_line(page):
    """GitHub makes a list of the others, too; the site goes on with the paragraph, or the code, before."""
    text = re.sub(r"^```.*?^```$", "code", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?![-|\s]|\d+\. ).+\n- .*", text, flags=re.MULTILINE)


def without_code(page):
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Those of its headings: the site makes one hyphen of several, and GitHub does not, so there should be one alone."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower()) for heading in headings}


def test_diagrams_are_drawn():
    """Mermaid draws each into the file that this names: ``mmdc --input diagram.mmd --output docs/diagrams/NAME``."""
    sources = re.findall(r"^```mermaid\n(.*?)^```$", (ROOT / "DESIGN.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    names = {hashlib.sha256(source.encode()).hexdigest()[:12] + ".svg" for source in sources}
    assert names and {file.name for file in (ROOT / "docs" / "diagrams").iterdir()} == names


def test_names_of_the_api_exist():
    """Each is listed once, under whatever name. The site itself needs tools that the tests do without.

    The name of an integration is looked up only where the package that it integrates is installed.
    """
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    integrations = {name: name.split(".")[2] for name in names if name.startswith("moeblaze_ops.integrations.")}
    names = [name for name in names if importlib.util.find_spec(integrations.get(name, "moeblaze_ops"))]
    listed = [pkgutil.resolve_name(name) for name in names]
    assert names and len(listed) == len(set(map(id, listed)))
