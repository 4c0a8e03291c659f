"""Every test runs in one part of `make test`: tiers of conftest, markers of pytest and parts of the Makefile are the same."""

import re
from pathlib import Path

import pytest

from tests.conftest import TESTS, TIERS, tier_of

ROOT = Path(__file__).resolve().parents[2]


def words(variable: str) -> set[str]:
    """The words of a variable of the Makefile."""
    return set(re.search(rf"^{variable} := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())


def test_tiers_are_parts_of_make_test(request):
    if not (ROOT / "Makefile").is_file():
        pytest.skip("needs the source tree")
    markers = {line.partition(":")[0] for line in request.config.getini("markers")}
    assert set(TIERS.values()) <= words("TIERS") <= markers
    assert words("PARTS") == {f"test-{tier}" for tier in words("TIERS") - {"gpu"} | {"fast"}}


def test_longest_path_decides():
    assert tier_of(TESTS / "system" / "test_export.py") == "export"
    assert tier_of(TESTS / "system" / "test_compile.py") == "slow"
    assert tier_of(TESTS / "unit" / "test_normal_form.py") is None


def test_folders_without_tests_in_a_part_have_none():
    """What `make test` does not hand to any part for its folder: it would run nowhere."""
    ignored = {option.partition("=")[2] for option in words("ELSEWHERE")}
    assert ignored == {"tests/hf", "tests/interpreter", "tests/rewrite"}
    for folder in ignored:
        for file in (ROOT / folder).rglob("test_*.py"):
            assert tier_of(file) == Path(folder).name, file
