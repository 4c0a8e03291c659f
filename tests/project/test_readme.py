"""What the README says can be typed: its code runs and prints what is shown, its commands exist, its numbers are the data."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from tests.tools.documents import ROOT, blocks, run_page, shown_outputs

README = ROOT / "README.md"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

if not README.is_file():
    pytest.skip("runs in a checkout only", allow_module_level=True)


def commands(page: Path):
    """Every shell command of a page, without its comment, as a list of words."""
    content = "".join(block.content for block in blocks(page) if block.language == "bash")
    return [words for line in content.splitlines() if (words := shlex.split(line, comments=True))]


def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TABLES


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_readme_runs_and_prints_what_it_shows(tmp_path):
    printed = run_page(README, tmp_path)
    shown = shown_outputs(README)
    assert shown
    assert {source.span: block.content for source, block in shown} == {source.span: printed[source.span] for source, _ in shown}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, target, *arguments in commands(page):
        if program == "make":
            assert target in targets
        elif program == "python" and target != "-m":
            source = (ROOT / target).read_text()
            assert not [option for option in arguments if option.startswith("--") and f'"{option}"' not in source]
        else:
            assert program in ("pip", "python", "torchrun")


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", tables())
def test_numbers_are_the_committed_data(page):
    text = (ROOT / page).read_text()
    assert not [table.__name__ for table in tables()[page] if table() not in text]
