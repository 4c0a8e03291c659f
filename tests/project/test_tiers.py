"""Every test runs in one part of `make test`: tiers of conftest, markers of pytest and parts of the Makefile are the same."""

import re
from pathlib import Path

import pytest

from tests.conftest import TESTS, TIERS, tier_of

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = ROOT / "Makefile"


@pytest.mark.skipif(not MAKEFILE.is_file(), reason="needs the source tree")
def test_tiers_are_parts_of_make_test(request):
    parts = re.search(r"^PARTS := (.*)$", MAKEFILE.read_text(), re.MULTILINE)[1].split()
    markers = {line.partition(":")[0] for line in request.config.getini("markers")}
    assert set(TIERS.values()) == {part.removeprefix("test-") for part in parts} | {"gpu"} <= markers


def test_the_longest_path_decides():
    assert tier_of(TESTS / "system" / "test_export.py") == "export"
    assert tier_of(TESTS / "system" / "test_compile.py") == "slow"
    assert tier_of(TESTS / "unit" / "test_normal_form.py") == "fast"


@pytest.mark.skipif(not MAKEFILE.is_file(), reason="needs the source tree")
def test_the_workflow_runs_each_version():
    versions = re.search(r"^VERSIONS \?= (.*)$", MAKEFILE.read_text(), re.MULTILINE)[1].split()
    matrix = re.search(r"torch: \[(.*)\]", (ROOT / ".github" / "workflows" / "versions.yml").read_text())[1]
    assert re.findall(r'"([^"]+)"', matrix) == versions


@pytest.mark.skipif(not MAKEFILE.is_file(), reason="needs the source tree")
def test_what_runs_with_each_version_is_there():
    named = re.search(r"^OF_EACH_VERSION := (.*?)\$", MAKEFILE.read_text(), re.MULTILINE | re.DOTALL)[1].replace("\\", "").split()
    assert named and not [file for file in named if not (ROOT / file).is_file()]
