"""Hits and counts that were taken before ids changed are not those of the loop, however the change is written."""

import pytest
import torch

from moeblaze_ops import compile as moeblaze_compile
from tests.capture import test_capture as guarded
from tests.capture.test_capture import make_layer, scratch  # noqa: F401
from tests.corpus.loops import stale_hits as stale
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in


@pytest.mark.parametrize("combine", stale.STALE, ids=lambda f: f.__name__)
def test_stale_hits_give_what_eager_gives(combine):
    """Where hits are a list, Dynamo compiles the loop for the numbers in it: as a layer, if these are all."""
    guarded.check_twins(lambda: make_layer(combine))


@pytest.mark.parametrize("combine", stale.LAYERS, ids=lambda f: f.__name__)
def test_hits_of_the_ids_of_the_loop(combine):
    layer = make_layer(combine)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        guarded.check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert len(rewritten_in(records)) == 1
