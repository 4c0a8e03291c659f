"""Loops with branches on data over experts some of which have no projections: captured in one graph, and replaced."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.capture.test_capture import step
from tests.corpus import zero_computation as corpus
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

UNCHOSEN = ((), (0, 3), (1, 4, 6))
"""Experts that no token chooses."""


class Router(nn.Module):
    """One that never chooses experts with a penalty."""

    def __init__(self, gate: nn.Linear, K: int):
        super().__init__()
        self.gate, self.K = gate, K
        self.register_buffer("penalty", torch.zeros(gate.out_features))

    def forward(self, x):
        return tuple(torch.topk((self.gate(x) + self.penalty).softmax(-1), self.K))


@pytest.mark.parametrize(("kind", "place"), [("identity", "mixed"), ("zero", "in front"), ("frozen", "behind")])
@pytest.mark.parametrize("combine", corpus.ON_TRUST, ids=lambda f: f.__name__)
def test_captured(combine, kind, place):
    layer = corpus.Layer(combine, (kind,) * corpus.Z, place)
    layer.router = Router(layer.router.gate, layer.router.K)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for unchosen in UNCHOSEN:
            layer.router.penalty.zero_()[list(unchosen)] = -1000.0
            x = torch.randn(12, zoo.D)
            torch.testing.assert_close(step(layer, compiled, x), step(layer, layer, x))
    assert {found.E for found in rewritten_in(records)} == {zoo.E}


@pytest.mark.parametrize("combine", corpus.ON_TRUST, ids=lambda f: f.__name__)
def test_learned_vectors_have_gradients_of_zeros_where_no_token_chose_them(combine):
    """A branch that skips the expert leaves None."""
    layer = corpus.Layer(combine, ("constant",) * corpus.Z, "mixed")
    layer.router = Router(layer.router.gate, layer.router.K)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for unchosen in UNCHOSEN:
            layer.router.penalty.zero_()[list(unchosen)] = -1000.0
            x = torch.randn(12, zoo.D)
            torch.testing.assert_close(step(layer, compiled, x), step(layer, layer, x))
    assert rewritten_in(records)


@pytest.mark.parametrize("combine", [corpus.guarded, corpus.hits], ids=lambda f: f.__name__)
def test_shares_of_selected_rows_stay(combine):
    """The constant experts of MoE++, where they see no other tokens than those that chose them."""
    layer, x = corpus.Layer(combine, ("mixture",) * corpus.Z, "in front"), torch.randn(12, zoo.D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(step(layer, torch.compile(layer, backend=backend), x), step(layer, layer, x))
    assert not rewritten_in(records)
    reports = [record.report for record in records if isinstance(record, moeblaze_compile.GraphRecord)]
    details = {candidate.detail for report in reports for candidate in report.declined}
    assert details == {"an expert without projections multiplies by 'softmax' of selected rows, not of all tokens"}
