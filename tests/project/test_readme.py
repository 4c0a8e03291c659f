"""What the README says can be typed: its code runs and prints what is shown, its commands exist, its numbers are the data."""

import json
import re
import runpy
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
    return runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["TABLES"]


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


def test_picture_is_the_committed_data(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    picture = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))["picture"]()
    assert (ROOT / "docs" / "beside_peers.svg").read_text() == picture + "\n"


def test_first_claim_is_the_committed_data():
    rows = json.loads((ROOT / "benchmarks" / "results" / "beside_peers_h100.json").read_text())["measurements"]
    fine = {row["contender"]: row for row in rows if row["shape"] == "fine"}
    ours, sonic = fine["moeblaze"], fine["SonicMoE"]
    claim = README.read_text().split("**")[1]
    assert f"{fine['grouped_mm+compile']['step_ms'] / ours['step_ms']:.2f}x" in claim
    assert f"{sonic['step_ms'] / ours['step_ms']:.2f}x" in claim
    assert f"{ours['peak_mib'] / sonic['peak_mib']:.0%}" in claim
