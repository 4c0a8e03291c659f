"""``explain``, with a toy rewrite in place of the real one."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.explain import Candidate, Explanation
from tests.tools import toy_rewrite
from tests.tools.compiling import graphs_compiled_anew
from tests.tools.toy_rewrite import LoopMoE, tanh_layer


@pytest.fixture(scope="module", autouse=True)
def toy_ops():
    library = toy_rewrite.define_ops()
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def scratch(monkeypatch):
    toy_rewrite.install(monkeypatch)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    moeblaze_compile.disable()
    torch._dynamo.reset()


class Tanh(nn.Module):
    def __init__(self, D: int = 8):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return tanh_layer(x, self.w)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([Tanh(), Tanh()])

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x + torch.rand_like(x)


def test_rewritten_layers(capsys):
    model, x = Model(), torch.randn(4, 8)
    explanation = moeblaze_ops.explain(model, x)
    assert capsys.readouterr().out == "" and repr(explanation) == str(explanation)
    assert [candidate.where.partition(" ")[0] for candidate in explanation.candidates] == ["layers.0", "layers.1"]
    assert {candidate.became for candidate in explanation.candidates} == {"tanh_mm"}
    # Eager keeps the product's input and tanh's output, and so does the toy op; the second input is the first output.
    size = x.numel() * x.element_size()
    assert [candidate.kept_before for candidate in explanation.candidates] == [2 * size, size]
    assert [candidate.kept_after for candidate in explanation.candidates] == [2 * size, size]
    assert explanation.notes == ()


def test_without_gradients_nothing_is_measured():
    with torch.no_grad():
        explanation = moeblaze_ops.explain(Model(), torch.randn(4, 8))
    assert {(c.kept_before, c.kept_after) for c in explanation.candidates} == {(None, None)}


def test_meta_device():
    """Where a tensor has no numbers, a model that does not fit into memory says what it would keep."""
    explanation = moeblaze_ops.explain(Model().to("meta"), torch.empty(4, 8, device="meta"))
    assert [candidate.became for candidate in explanation.candidates] == ["tanh_mm", "tanh_mm"]
    assert explanation.candidates == moeblaze_ops.explain(Model(), torch.empty(4, 8)).candidates


def test_text():
    candidates = (
        Candidate("layers.0 (model.py:3)", "loop", "op", None, 3 << 20, 1 << 10),
        Candidate("model.py:9", "dense", reason="EXTRA_USER, it is read elsewhere"),
    )
    explanation = Explanation(candidates, ("graph break: print",))
    assert str(explanation) == (
        "moeblaze: 1 of 2 MoE layers rewritten\n"
        "  layers.0 (model.py:3): loop -> op\n"
        "    kept for backward: 3.0 MiB before, 1.0 KiB after\n"
        "  model.py:9: dense, left alone: EXTRA_USER, it is read elsewhere\n"
        "  note: graph break: print"
    )


def test_loop_is_found():
    model = LoopMoE()
    with torch.no_grad():
        explanation = moeblaze_ops.explain(model, torch.randn(6, 8))
    assert [candidate.became for candidate in explanation.candidates] == ["loop op"]
    assert explanation.notes == ()


def test_skipped_frame_is_reported():
    """The commonest reason of "nothing was rewritten": a break inside a loop leaves no graph at all."""
    model = LoopMoE(activation=torch.sigmoid)
    explanation = moeblaze_ops.explain(model, torch.randn(6, 8))
    (candidate,) = explanation.candidates
    assert candidate.reason == "ACTIVATION, not a fused one (sigmoid)"
    assert any(note.startswith("nothing of forward") and "inside a loop" in note for note in explanation.notes)
    assert "no graph was captured, so there was nothing to rewrite" in explanation.notes


def test_layer_beside_data_dependent_shapes():
    def function(x, w):
        return tanh_layer(x, w).sum() + x.nonzero().sum()

    explanation = moeblaze_ops.explain(function, torch.randn(4, 8), torch.randn(8, 8))
    became = [candidate.became for candidate in explanation.candidates]
    assert became == ["tanh_mm"], "it is rewritten in the graph before the break"
    assert any("Dynamic shape operator" in note for note in explanation.notes)


def test_nothing_is_disturbed():
    model, x = Model(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counted, random_state = str(counters), torch.get_rng_state()
    moeblaze_ops.explain(compiled, x)
    torch.testing.assert_close(dict(model.state_dict()), state)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert str(counters) == counted
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)


def test_a_skipped_frame_can_be_compiled_afterwards():
    """What Dynamo gave up while explaining, it tries again when the model is compiled."""
    model, x = LoopMoE(activation=torch.sigmoid), torch.randn(6, 8)
    moeblaze_ops.explain(model, x)
    model.activation = torch.relu
    fallback = torch._inductor.config.patch(fallback_by_default=True)
    with torch.no_grad(), graphs_compiled_anew(), fallback, moeblaze_compile.recording() as records:
        torch.compile(model, backend="moeblaze")(x)
    assert [record.dropped for record in records] == [None]
