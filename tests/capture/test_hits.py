"""Hits: those of the ids of the loop, however ids change before it, and what a program does with the elements of their tensor.

An element is a tensor, and a number where the program asks for one.
"""

import pytest
import torch

from moeblaze_ops import compile as moeblaze_compile
from tests.capture import test_capture as guarded
from tests.capture.test_capture import make_layer
from tests.corpus.loops import hit_elements as elements
from tests.corpus.loops import stale_hits as stale
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")


@pytest.mark.parametrize("combine", (*stale.LAYERS, *elements.LAYERS), ids=lambda f: f.__name__)
def test_layers_of_hits(combine):
    layer = make_layer(combine)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        guarded.check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert len(rewritten_in(records)) == 1


@pytest.mark.parametrize("combine", stale.STALE, ids=lambda f: f.__name__)
def test_stale_hits_give_what_eager_gives(combine):
    """Where hits are a list, Dynamo compiles the loop for the numbers in it: as a layer, if these are all."""
    guarded.check_twins(lambda: make_layer(combine))


@pytest.mark.parametrize("combine", elements.NEAR_MISSES, ids=lambda f: f.__name__)
def test_tensors_stay_tensors(combine):
    if combine.__name__ in ("text_by_a_method", "text_by_a_function") and torch.__version__ < "2.13":
        pytest.skip("Dynamo 2.11 makes another text of a tensor than eager does, whoever compiles")
    guarded.check_twins(lambda: make_layer(combine))


@pytest.mark.parametrize("combine", elements.BACKWARDS, ids=lambda f: f.__name__)
def test_known_numbers_are_found_in_lists_of_inputs(combine):
    """Behind ``tolist`` the list is an input: once its first number has changed, Dynamo takes it for different from any."""
    guarded.check_twins(lambda: make_layer(combine), unused=(2, 3))
