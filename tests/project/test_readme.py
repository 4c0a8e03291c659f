"""What the README says can be typed: its code runs and prints what is shown, its commands exist, its numbers are the data."""

import json
import re
import runpy
import shlex
import statistics
from pathlib import Path

import pytest

from tests.tools.documents import blocks, run_page, shown_outputs
from tests.tools.programs import ROOT

README = ROOT / "README.md"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

if not README.is_file():
    pytest.skip("runs in a checkout only", allow_module_level=True)


def commands(page: Path):
    """Every shell command of a page, without its comment and the variables before it, as a list of words."""
    content = "".join(
        re.sub(r"^([A-Z_]+=\S+ )+", "", block.content, flags=re.M) for block in blocks(page) if block.language == "bash"
    )
    return [words for line in content.splitlines() if (words := shlex.split(line, comments=True))]


def tables():
    return runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["TABLES"]


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_first_questions_are_one_click_away():
    """That the links lead somewhere is tested below, and for the site with the other pages."""
    links = dict(re.findall(r"^\| \[([^]]+\?)\]\(([^)]+)\) \|", README.read_text(), flags=re.MULTILINE))
    assert links == {
        "Is my GPU supported?": "docs/hardware.md",
        "Is my model?": "docs/models.md",
        "How do I see that it works?": "docs/getting_started.md#how-to-see-that-it-works",
        "Why is it not faster?": "docs/troubleshooting.md#it-is-not-faster",
    }


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
            if "command_line(" in source:
                source += (ROOT / "benchmarks" / "environment.py").read_text()
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


def test_where_we_lose_is_the_committed_data():
    def measured(file, *keys):
        rows = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
        return {tuple(row[key] for key in keys): row for row in rows["results" if file == "demo_cpu" else "measurements"]}

    def duel(rows, theirs, ours, value, digits):
        """As the page has it: their number, and ours behind it."""
        return tuple(f"{rows[key][value]:.{digits}f}" for key in (theirs, ours))

    peers = measured("beside_peers_h100", "shape", "contender")
    eager = measured("conf1_8k_h100", "contender")
    hit = [row["ratio"] for row in measured("cpu", "spelling", "shape").values() if row["spelling"] == "hit"]
    sides = measured("model_2gpus_h200", "side")
    beside = [sides[side,]["peak_mib"] - sides[side,]["weights_mib"] for side in ("all_reduce+compile", "shard_experts")]
    demo = {way: {"ms": 1e3 * row["step_seconds"]} for way, row in measured("demo_cpu", "way").items()}
    pages = [measured(f"cpu_{name}_pages", "shape")["2048, 128, 768, 8, 2",]["ratio"] for name in ("small", "huge")]
    portable, compiled = measured("layer_h100_portable", "shape", "contender"), measured("compile_cpu", "style", "contender")
    claims = [
        "{} ms against {}".format(*duel(peers, ("coarse", "SonicMoE"), ("coarse", "moeblaze"), "step_ms", 2)),
        f"`grouped_mm` + compile takes {peers['coarse', 'grouped_mm+compile']['step_ms']:.2f}",
        "{} ms against {}".format(*duel(portable, ("coarse", "grouped_mm+compile"), ("coarse", "moeblaze"), "step_ms", 1)),
        "{} ms against {}".format(*duel(eager, ("grouped_mm+compile",), ("moeblaze-eager",), "step_ms", 2)),
        f"moeblaze takes {eager['moeblaze',]['step_ms']:.2f}",
        "{} s against {}".format(*duel(compiled, ("loop", "plain"), ("loop", "rewritten"), "seconds", 0)),
        f"{statistics.geometric_mean(hit):.2f} of its speed on average, {min(hit):.2f} at least",
        "{} ms against {}".format(*duel(demo, ("compile",), ("moeblaze",), "ms", 0)),
        f"{measured('cpu', 'spelling', 'shape')['dense', '64, 64, 128, 4, 2']['ratio']:.2f} of its speed",
        "{} ms against {}".format(*duel(sides, ("all_reduce+compile",), ("shard_experts",), "step_ms", 1)),
        *(f" at {ratio:.2f} " for ratio in pages),
        f"{beside[0] / beside[1]:.1f} times the memory beside the weights",
        f'`ep_implementation="moeblaze"` in its layout takes {sides["moeblaze@tp+compile",]["step_ms"]:.1f}',
    ]
    text = (ROOT / "docs" / "which_one_when.md").read_text()
    assert not [claim for claim in claims if claim not in text]
