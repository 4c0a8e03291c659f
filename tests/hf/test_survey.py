"""The committed table of families says what ``explain`` says, for some of each kind; and the sizes are those of transformers."""

import json

import pytest

transformers = pytest.importorskip("transformers")

from tests.corpus import survey  # noqa: E402

DATA = json.loads(survey.FILE.read_text()) if survey.FILE.exists() else None
if DATA is None:
    pytest.skip("runs in a checkout only", allow_module_level=True)
if transformers.__version__ != DATA["transformers"]:
    pytest.skip(f"the survey is of transformers {DATA['transformers']}", allow_module_level=True)


@pytest.mark.parametrize("name", ["deepseek_v4", "gpt_oss", "jetmoe", "mistral4", "qwen3_moe"])
def test_the_table_is_what_explain_says(name):
    found = survey.outcome(survey.families()[name])
    assert {"sizes": survey.published_sizes(name), **found} == DATA["families"][name]


def test_the_table_has_no_other_families():
    assert set(DATA["families"]) <= set(survey.families())
