"""Without tokens a program skips the work of every expert, and its output needs no gradient: rewritten it has one of zeros."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.capture.test_capture import make_layer
from tests.corpus.loops import guarded, hits
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")


def _gradients(layer, y):
    parameters = list(layer.parameters())
    if not y.requires_grad:
        return tuple(map(torch.zeros_like, parameters))
    return torch.autograd.grad(y.square().sum(), parameters, materialize_grads=True)


def _check(layer, *batches):
    """Whether a layer is rewritten, whose numbers and gradients are as in eager mode; zeros where that has none."""
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        compiled = torch.compile(layer, backend=backend)
        for x in batches:
            actual, expected = compiled(x), layer(x)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(_gradients(layer, actual), _gradients(layer, expected))
    return bool(rewritten_in(records))


@pytest.mark.parametrize("combine", [guarded.if_any, guarded.hit_rows, hits.HITS[0]], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_number_of_tokens(combine, num_tokens):
    loops_without_tokens = combine is guarded.if_any  # the others loop over the experts that were hit: over none
    assert _check(make_layer(combine), torch.randn(num_tokens, zoo.D)) == (num_tokens > 0 or loops_without_tokens)


@pytest.mark.parametrize("trains", [False, True])
def test_number_of_tokens_that_may_be_none(trains):
    x = torch.randn(16, zoo.D)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True), torch.set_grad_enabled(trains):
        assert _check(make_layer(guarded.if_any), x, torch.randn(0, zoo.D))


def test_loop_without_branches():
    assert _check(zoo.ModuleListMoE(zoo.masked_sum), torch.randn(0, zoo.D))


class Thresholds(nn.Module):
    """AdaMoLE's: a token goes to the experts that pass a threshold of its own, maybe to none."""

    def __init__(self):
        super().__init__()
        self.gate, self.threshold = nn.Linear(zoo.D, zoo.E), nn.Linear(zoo.D, 1)
        self.up = nn.ModuleList(nn.Linear(zoo.D, 2 * zoo.D) for _ in range(zoo.E))
        self.down = nn.ModuleList(nn.Linear(2 * zoo.D, zoo.D) for _ in range(zoo.E))

    def forward(self, x):
        passed = self.gate(x).softmax(-1) - self.threshold(x).sigmoid()
        chosen = passed >= 0
        weights = passed * chosen
        whole = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(whole == 0, torch.ones_like(whole), whole)
        out = torch.zeros_like(x)
        for e in range(zoo.E):
            token = torch.where(chosen[:, e])[0]
            if len(token) > 0:
                out[token] += weights[token, e, None] * self.down[e](self.up[e](x[token]).relu())
        return out


def test_threshold_that_no_token_passes():
    layer, x = Thresholds(), torch.randn(20, zoo.D)
    with torch.no_grad():
        layer.threshold.bias.fill_(-1.5)
    assert _check(layer, x)
    with torch.no_grad():
        layer.threshold.bias.fill_(9.0)
    assert not layer(x).requires_grad
    assert _check(layer, x)
