"""``verify``: errors of a model as written and rewritten, and what it leaves as it found it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import moeblaze_ops
from moeblaze_ops import comparison, config
from moeblaze_ops.lowering.rewrite import rewrite
from moeblaze_ops.lowering.torch_internals import frames
from moeblaze_ops.verify import Verification
from tests.corpus.zoo.blocks import Blocks, Dense, Guarded

pytestmark = pytest.mark.usefixtures("scratch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [Dense, Guarded])
def test_every_result_is_measured(make, dtype):
    model, x = Blocks(make, 2).to(dtype), torch.randn(24, 16, dtype=dtype, requires_grad=True)
    verification = moeblaze_ops.verify(model, x)
    names = {comparison.name for comparison in verification.comparisons}
    assert names == {"output", "gradient of input 0", *(f"gradient of {name}" for name, _ in model.named_parameters())}
    assert verification.agrees and all(candidate.became for candidate in verification.explanation.candidates)
    assert verification.reference == (None if dtype == torch.float64 else torch.float64)
    assert sum(comparison.num_bytes for comparison in verification.comparisons) > 0
    assert repr(verification) == str(verification) and "results agree" in str(verification)


def test_wrong_rewrite_is_found(monkeypatch):
    """A rewrite that doubles the routing weights: the report says which results differ."""
    right = rewrite.insert_layer_ops

    def wrong(insert, match, router):
        out, became = right(insert, match, router)
        return insert.call(torch.mul, out, 1.001), became

    monkeypatch.setattr(rewrite, "insert_layer_ops", wrong)
    verification = moeblaze_ops.verify(Dense(), torch.randn(24, 16))
    assert not verification.agrees
    assert "results differ" in str(verification) and "<-- more than" in str(verification)
    assert moeblaze_ops.verify(Dense(), torch.randn(24, 16), tolerance=0.01).agrees


def test_nothing_to_compare_does_not_agree():
    verification = moeblaze_ops.verify(nn.Linear(16, 16), torch.randn(24, 16))
    assert not verification.agrees and str(verification).endswith("nothing was rewritten, so there is nothing to compare")

    class Chosen(Dense):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    verification = moeblaze_ops.verify(Chosen(), torch.randn(24, 16))
    assert verification.explanation.candidates[0].became and not verification.agrees
    assert str(verification).endswith("nothing was compared: no output is a floating-point tensor")


def test_gradients_that_are_none_as_written():
    verification = moeblaze_ops.verify(Guarded(E=8), torch.randn(1, 16))
    idle = [comparison for comparison in verification.comparisons if comparison.note == "None as written"]
    assert len(idle) == 2 * 6 and all(comparison.rewritten == 0 for comparison in idle)


def test_results_of_alike_names_are_one_line():
    of = {f"gradient of experts.{e}.{name}": 1e-7 * (e + 1) for e in range(4) for name in ("up.weight", "down.weight")}
    comparisons = tuple(comparison.Comparison(name, 512, error, 2 * error, 1e-6) for name, error in of.items())
    wrong = replace(comparisons[2], rewritten=1e-3)
    explanation = moeblaze_ops.explain(Dense(), torch.randn(24, 16))
    text = str(Verification(explanation, (*comparisons[:2], wrong, *comparisons[3:]), torch.float64)).splitlines()
    assert text[-4:] == [
        "1 of 8 results differ; relative errors against torch.float64:",
        "  gradient of experts.*.up.weight (largest of 3): as written 4.0e-07, rewritten 8.0e-07, 1.5 KiB",
        "  gradient of experts.*.down.weight (largest of 4): as written 4.0e-07, rewritten 8.0e-07, 2.0 KiB",
        "  gradient of experts.1.up.weight: as written 2.0e-07, rewritten 1.0e-03, 0.5 KiB  <-- more than 1.0e-06",
    ]


def test_state_is_left_as_found():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.drop = Dense(), nn.BatchNorm1d(16), nn.Dropout()

        def forward(self, x):
            return self.drop(self.layer(self.norm(x)))

    model, x = Model(), torch.randn(24, 16)
    fired = []
    model.layer.router.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter))
    model.layer.router.weight.grad = torch.ones_like(model.layer.router.weight)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    verification = moeblaze_ops.verify(model, x)
    assert verification.agrees, "one dropout mask serves both runs"
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not fired and torch.equal(model.layer.router.weight.grad, torch.ones_like(model.layer.router.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "layer.router.weight")


def test_function_without_parameters_of_its_own():
    layer, x = Dense(), torch.randn(24, 16, requires_grad=True)
    verification = moeblaze_ops.verify(lambda x: layer(x).tanh(), x)
    assert [comparison.name for comparison in verification.comparisons] == ["output", "gradient of input 0"]
    assert verification.agrees and verification.reference is None
    assert "no precise run: the parameters of a function are not known" in str(verification)


def test_model_that_runs_in_its_own_dtype_alone():
    class Casting(Dense):
        def forward(self, x):
            return super().forward(x.to(torch.bfloat16)).float()

    verification = moeblaze_ops.verify(Casting().bfloat16(), torch.randn(24, 16))
    assert verification.reference is None and verification.agrees
    assert "no precise run: in torch.float32 the model raises RuntimeError" in str(verification)


def test_without_gradients():
    with torch.no_grad():
        verification = moeblaze_ops.verify(Dense(), torch.randn(24, 16))
    assert [comparison.name for comparison in verification.comparisons] == ["output"] and verification.agrees


@pytest.fixture
def first(monkeypatch):
    """What the backend compiles is verified; AOTAutograd runs graphs as they are in place of Inductor."""
    monkeypatch.setattr(config, "verify", "first")
    monkeypatch.setattr(frames, "inductor_backend", lambda *_: aot_eager)


@pytest.mark.parametrize("breaks", [False, True])
def test_first_run_of_what_is_compiled(first, breaks, monkeypatch):
    compared = []
    real = comparison._compare_graph
    monkeypatch.setattr(comparison, "_compare_graph", lambda *args: compared.append(real(*args)) or compared[-1])
    model, x = Blocks(Guarded, 2, breaks=breaks), torch.randn(24, 16)
    compiled = torch.compile(model, backend="moeblaze")
    for _ in range(2):
        compiled(x).sum().backward()
    assert len(compared) == (2 if breaks else 1), "once for each graph"
    for comparisons, dtype in compared:
        assert dtype == torch.float64 and all(result.agrees for result in comparisons)
        assert len(comparisons) >= (9 if breaks else 18)
    expected = {name: parameter.grad / 2 for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.grad, msg=name)


def test_first_run_that_differs(first, monkeypatch):
    right = rewrite.insert_layer_ops

    def wrong(insert, match, router):
        out, became = right(insert, match, router)
        return insert.call(torch.mul, out, 1.001), became

    monkeypatch.setattr(rewrite, "insert_layer_ops", wrong)
    model, x = Dense(), torch.randn(24, 16)
    with pytest.raises(comparison.VerificationError, match="reproduction: ") as error:
        torch.compile(model, backend="moeblaze")(x)
    folder = Path(str(error.value).rpartition("reproduction: ")[2])
    assert "<-- more than" in (folder / "report.txt").read_text() and torch.__version__ in (folder / "report.txt").read_text()
    assert "topk" in (folder / "graph.py").read_text() and "out = out + weight" in (folder / "code.txt").read_text()
    inputs = torch.load(folder / "inputs.pt")
    assert any(torch.equal(value, x) for value in inputs if isinstance(value, torch.Tensor))
    shutil.rmtree(folder)
