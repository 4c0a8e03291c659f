"""Counts on the host that functions hand to one another: in the graph, where a rewrite takes them out again."""

import pytest
import torch
import torch._dynamo
from torch import nn

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.tracing.branches import Branches
from moeblaze_ops.lowering.tracing.watch import tracing
from tests.capture import test_capture as guarded
from tests.capture.test_capture import check, make_layer
from tests.corpus.loops import handed
from tests.corpus.loops import split_lookalikes as lookalikes
from tests.corpus.zoo import catalogue as zoo
from tests.tools.compiling import graphs_compiled_anew
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

T = guarded.T
CAPTURED = (*handed.HANDED, *lookalikes.IN_NUMBERS.values())


@pytest.mark.parametrize("fullgraph", [False, True], ids=["free", "fullgraph"])
@pytest.mark.parametrize("combine", CAPTURED, ids=lambda f: f.__name__)
def test_one_graph(combine, fullgraph):
    layer = make_layer(combine)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend=backend, fullgraph=fullgraph))
    (graph,) = guarded.kept(records, moeblaze_compile.GraphRecord)
    assert len(graph.report.rewritten) == 1


@pytest.mark.parametrize("combine", handed.NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_left_alone(combine):
    guarded.assert_left_alone(guarded.check_twins(lambda: make_layer(combine)))


class Block(nn.Module):
    """The layer inside of a function that goes on behind it, and reads numbers on the host for itself, if at all."""

    def __init__(self, *, reads: bool):
        super().__init__()
        self.layer, self.reads, self.calls = make_layer(handed.by_a_class), reads, 0
        self.router = self.layer.router

    def forward(self, x):
        y = self.layer(x.tanh())
        if self.reads:
            self.calls += 1
            y = y * (x[0, 0].item() > -1e6)
        return x + y


@pytest.mark.parametrize("reads", [False, True], ids=["alone", "beside_a_number"])
def test_layer_inside(reads):
    block = Block(reads=reads)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(block, torch.compile(block, backend=backend))
    assert len(rewritten_in(records)) == 1


def test_any_number_of_tokens():
    layer = make_layer(handed.two_projections)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=True)
        for num_tokens in (5, 9, 14):
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(guarded.step(layer, run, x), guarded.step(layer, layer, x))
    assert len(rewritten_in(records)) == 1


def test_long_lists_are_not_followed():
    def sums(x):
        return sum((x * 2).tolist())

    x = torch.arange(2048)
    capturing = tracing(Branches())
    with capturing, pytest.raises(Exception, match="a list of 2048 numbers"):
        torch.compile(sums, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with rewriting_backend() as backend:
        assert torch.compile(sums, backend=backend)(x) == sums(x)


def test_inductor():
    torch.set_default_dtype(torch.float32)
    layer = make_layer(handed.by_a_class)
    with graphs_compiled_anew(), moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend="moeblaze"), atol=1e-5, rtol=1e-4)
    assert len(rewritten_in(records)) == 1


def test_explain_says_what_was_done(capsys):
    explanation = moeblaze_ops.explain(make_layer(handed.two_projections), torch.randn(T, zoo.D))
    assert [candidate.became for candidate in explanation.candidates] == ["expert_up(swiglu) -> expert_down"]
    assert any("captured with numbers of tokens in its graph" in note for note in explanation.notes)


def test_explain_says_what_stays(capsys):
    explanation = moeblaze_ops.explain(make_layer(handed.sizes_are_a_weight), torch.randn(T, zoo.D))
    assert not any(candidate.became for candidate in explanation.candidates)


def test_numbers_of_the_caller_stay_in_one_graph():
    """Where Dynamo takes them into the graph by itself, a layer beside them is rewritten, and they stay."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make_layer(zoo.loop_mixtral)
            self.router = self.layer.router

        def forward(self, x):
            return self.layer(x) * x[0, 0].item()

    layer = Scaled()
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        rewriting_backend() as backend,
        moeblaze_compile.recording() as records,
    ):
        check(layer, torch.compile(layer, backend=backend))
    (graph,) = guarded.kept(records, moeblaze_compile.GraphRecord)
    assert len(graph.report.rewritten) == 1
