"""Python's numbers where Dynamo compiles for dynamic shapes: they may be others at the next call."""

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import Rewriting, check_against_eager, compiled, rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("fp64")


class Scaled(zoo.ModuleListMoE):
    """Every token on every expert, with a number at one place."""

    def __init__(self, number: float, **places):
        super().__init__(self.run, zoo.GluMLP)
        self.number, self.places = number, places

    def run(self, _, x, weights, ids):
        x, weights = self._at("tokens", x), self._at("weights", weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            hidden = self._at("hidden", F.silu(self._at("gate", expert.w1(x))) * expert.w3(x))
            out = out + self._at("outputs", expert.w2(hidden)) * (weights * (ids == e)).sum(-1, keepdim=True)
        return self._at("result", out)

    def _at(self, place: str, x: torch.Tensor) -> torch.Tensor:
        return x * self.number if place in self.places else x


class Clamped(zoo.StackedMoE):
    """gpt-oss, whose numbers are attributes of the module."""

    def __init__(self, alpha: float = 1.702, limit: float = 7.0):
        super().__init__(self.run, "packed_linear", bias=True)
        self.alpha, self.limit = alpha, limit

    def run(self, _, x, weights, ids):
        h = torch.einsum("beck,bk->bec", self.gate_up[ids], x) + self.gate_up_bias[ids]
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        h = gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        y = torch.einsum("beck,bek->bec", self.down[ids], h) + self.down_bias[ids]
        return torch.einsum("bec,be->bc", y, weights)


def check(layer: torch.nn.Module) -> Rewriting:
    return check_against_eager(layer, torch.randn(10, zoo.D) * 9, dynamic=True)


@pytest.mark.parametrize("place", ["tokens", "weights", "result"])
def test_numbers_around_experts(place):
    assert len(check(Scaled(1.5, **{place: True})).rewritten) == 1


@pytest.mark.parametrize("place", ["gate", "hidden", "outputs"])
def test_numbers_inside_experts_are_operands(place):
    layer = Scaled(1.5, **{place: True})
    run, backend = compiled(layer, dynamic=True)
    for layer.number in (1.5, 1.0, 2.0):
        x = torch.randn(10, zoo.D)
        torch.testing.assert_close(run(x), layer(x))
    assert all(candidate.became for candidate in backend.candidates)


def test_numbers_of_an_activation_are_guarded():
    layer = Clamped()
    assert {found.activation for found in check(layer).rewritten} == {"swiglu_clamped"}
    run, backend = compiled(layer, dynamic=True, aot=True)  # which takes a graph's numbers for constants
    for numbers in ((1.702, 7.0), (1.702, 6.0), (1.3, 7.0), (1.702, 7.0)):
        layer.alpha, layer.limit = numbers
        for num_tokens in (10, 13):
            x = torch.randn(num_tokens, zoo.D) * 9
            torch.testing.assert_close(run(x), layer(x))
    named, *others = sorted({found.activation for found in backend.rewritten}, key=len)
    assert named == "swiglu_clamped"
    assert ["6.0" in other for other in others] == [False, True] and ["1.3" in other for other in others] == [True, False]


@pytest.mark.parametrize("numbers", [{"alpha": 1.7}, {"limit": 6.0}], ids=str)
def test_other_numbers_are_not_the_fused_activation(numbers):
    assert all(found.activation != "swiglu_clamped" for found in check(Clamped(**numbers)).rewritten)


class Between(zoo.ModuleListMoE):
    """Every token on every expert, with a function of the pre-activations and of two numbers."""

    def __init__(self, function):
        super().__init__(self.run, zoo.GluMLP)
        self.function, self.a, self.b = function, 0.75, 0.75

    def run(self, _, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            hidden = self.function(expert.w1(x), self.a, self.b) * expert.w3(x)
            out = out + expert.w2(hidden) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Gathered(zoo.StackedMoE):
    """The same of each token's own weights."""

    def __init__(self, function):
        super().__init__(self.run, "packed_linear")
        self.function, self.a, self.b = function, 0.75, 0.75

    def run(self, _, x, weights, ids):
        gate, up = torch.einsum("td,tkfd->tkf", x, self.gate_up[ids]).chunk(2, dim=-1)
        hidden = self.function(gate, self.a, self.b) * up
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights)


def graphs_of(layer, dtype):
    """How many graphs are made of a layer that is called with five pairs of numbers, each as eager mode does it."""
    torch._dynamo.reset()
    layer.to(dtype)
    with rewriting_backend() as backend, switch.recording() as records:
        run = torch.compile(layer, backend=backend, fullgraph=True)
        for layer.a, layer.b in ((0.75, 0.75), (1.25, 1.25), (3.0, 0.5), (0.5, 1.0), (1.0, -2.0)):
            x = torch.randn(10, zoo.D, dtype=dtype)
            results = []
            for call in (run, layer):
                given = x.clone().requires_grad_()
                out = call(given)
                results.append([out, *torch.autograd.grad(out.square().sum(), [given, next(layer.parameters())])])
            torch.testing.assert_close(*results)
    assert len(rewritten_in(records)) == len(records)
    return len(records)


_INVERSE = pytest.mark.skipif(torch.__version__ < "2.12", reason="AOTAutograd compiles 1 / b anew for each number")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda h, a, b: F.silu(h) * a,
        lambda h, a, b: F.silu(h * a),
        lambda h, a, b: F.silu(h * a) * (h + b),
        lambda h, a, b: F.silu(h / a) / b,
        pytest.param(lambda h, a, b: F.silu(h) * (a * b - 1 / b), marks=_INVERSE),
    ],
    ids=["behind", "inside", "both", "divided", "product"],
)
def test_numbers_between_the_projections_may_change_at_each_call(function, dtype):
    """Two that are equal where the graph is made may differ later."""
    assert graphs_of(Between(function), dtype) == 2


def test_numbers_of_each_tokens_own_weights():
    assert graphs_of(Gathered(lambda h, a, b: F.silu(h) / a * b), torch.float32) == 2


def test_numbers_of_all_experts_in_tensors_of_their_own():
    layer = Between(lambda h, a, b: F.silu(h) * layer.scale * layer.warmup)
    layer.scale, layer.warmup = (torch.nn.Parameter(torch.tensor(number)) for number in (0.7, 1.3))
    assert len(check_against_eager(layer, torch.randn(10, zoo.D)).rewritten) == 1
