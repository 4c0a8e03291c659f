"""Without tokens a program skips the work of every expert, and its output needs no gradient: there its branches are kept."""

import pytest
import torch

from moeblaze_ops import compile as moeblaze_compile
from tests.capture.test_capture import make_layer
from tests.corpus.loops import guarded, hits
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")


@pytest.mark.parametrize("combine", [guarded.if_any, guarded.hit_rows, hits.HITS[0]], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_output_needs_a_gradient_where_it_does_as_written(combine, num_tokens):
    layer, x = make_layer(combine), torch.randn(num_tokens, zoo.D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = torch.compile(layer, backend=backend)(x)
    expected = layer(x)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad == (num_tokens > 0)
    assert bool(rewritten_in(records)) == (num_tokens > 0)


@pytest.mark.parametrize("trains", [False, True])
def test_number_of_tokens_that_may_be_none(trains):
    layer, x = make_layer(guarded.if_any), torch.randn(16, zoo.D)
    torch._dynamo.mark_dynamic(x, 0)
    with (
        torch.fx.experimental._config.patch(backed_size_oblivious=True),
        torch.set_grad_enabled(trains),
        rewriting_backend() as backend,
        moeblaze_compile.recording() as records,
    ):
        compiled = torch.compile(layer, backend=backend)
        for tokens in (x, torch.randn(0, zoo.D)):
            actual, expected = compiled(tokens), layer(tokens)
            torch.testing.assert_close(actual, expected)
            assert actual.requires_grad == expected.requires_grad
    assert bool(rewritten_in(records)) == (not trains)


def test_loop_without_branches_is_rewritten():
    layer, x = zoo.ModuleListMoE(zoo.masked_sum), torch.randn(0, zoo.D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = torch.compile(layer, backend=backend)(x)
    assert actual.requires_grad and rewritten_in(records)
