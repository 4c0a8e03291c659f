"""Activations with learned parameters: what the formula reads becomes an operand, and its gradient that of the program."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moeblaze_ops
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")

E, D, FF = 3, 8, 12


class Layer(nn.Module):
    """A loop over experts whose activation is ``function(layer, e, rows, *halves)``; ``tensors`` are its parameters."""

    def __init__(self, function, gated, **tensors):
        super().__init__()
        self.function, self.gated = function, gated
        self.router = nn.Linear(D, E, bias=False)
        self.w_up = nn.Parameter(torch.randn(E, (2 if gated else 1) * FF, D) / D**0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, FF) / FF**0.5)
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor.to(self.w_up.dtype)))

    def activated(self, e, x):
        h = x @ self.w_up[e].T
        return self.function(self, e, x, *(h.chunk(2, dim=-1) if self.gated else (h,)))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            share = (weights * (chosen == e)).sum(-1, keepdim=True)
            out = out + share * (self.activated(e, x) @ self.w_down[e].T)
        return out


def swish(beta, g, u):
    return g * torch.sigmoid(beta * g) * u


def xielu(layer, e, x, h):
    """With alphas that are positive whatever is learned."""
    alpha_p, alpha_n = F.softplus(layer.positive), 0.5 + F.softplus(layer.negative)
    curve = torch.expm1(torch.clamp(h, max=-1e-6)) - h
    return torch.where(h > 0, alpha_p * h * h + 0.5 * h, curve * alpha_n + 0.5 * h)


LEARNED = {
    "slope of a gate": (lambda layer, e, x, g, u: swish(layer.beta, g, u), True, {"beta": torch.tensor(1.3)}, 1),
    "in one element": (lambda layer, e, x, g, u: swish(layer.beta, g, u), True, {"beta": torch.tensor([1.3])}, 1),
    "of each expert": (lambda layer, e, x, g, u: swish(layer.beta[e], g, u), True, {"beta": torch.tensor([1.3, 0.7, 0.9])}, 1),
    "two": (
        lambda layer, e, x, g, u: swish(layer.beta, g, u + layer.shift), True,
        {"beta": torch.tensor(1.3), "shift": torch.tensor(0.4)}, 2,
    ),
    "PReLU": (lambda layer, e, x, h: F.prelu(h, layer.slope), False, {"slope": torch.tensor([0.25])}, 1),
    "by a condition": (lambda layer, e, x, h: torch.where(h > 0, h, layer.slope * h), False, {"slope": torch.tensor(0.25)}, 1),
    "xIELU": (xielu, False, {"positive": torch.tensor(0.8), "negative": torch.tensor(0.6)}, 2),
    "of the tokens' mean": (lambda layer, e, x, g, u: swish(x.mean(), g, u), True, {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_are_operands(name):
    function, gated, tensors, count = LEARNED[name]
    (found,) = check_against_eager(Layer(function, gated, **tensors), torch.randn(7, D) * 2).rewritten
    assert f"p{count - 1}" in found.activation and f"p{count}" not in found.activation


class _Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(zoo.D, zoo.FF, bias=False) for _ in range(2))
        self.w2 = nn.Linear(zoo.FF, zoo.D, bias=False)
        self.beta = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x):
        return self.w2(swish(self.beta, self.w1(x), self.w3(x)))


def test_experts_that_are_modules_have_one_each():
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=_Expert, E=2)
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D)).rewritten
    assert "p0" in found.activation


def writes(layer, e, x, g, u):
    a = swish(layer.beta, g, u)
    with torch.no_grad():
        layer.beta.mul_(0.9)  # between two experts
    return a


NEAR_MISSES = {
    "of the token": (lambda layer, e, x, g, u: swish(x[:, :1], g, u), True, {}),
    "of the feature": (lambda layer, e, x, h: F.prelu(h, layer.slope), False, {"slope": torch.full((FF,), 0.25)}),
    "of the feature, by a condition": (
        lambda layer, e, x, h: torch.where(h > 0, h, layer.slope * h), False, {"slope": torch.linspace(0, 1, FF)},
    ),
    "written to": (writes, True, {"beta": torch.tensor(1.3)}),
    "five": (
        lambda layer, e, x, g, u: sum(torch.tanh(layer.many[i] * g) for i in range(5)) * u, True, {"many": torch.rand(5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_parameter_is_left_alone(name):
    function, gated, tensors = NEAR_MISSES[name]
    result = rewrite_of(Layer(function, gated, **tensors), torch.randn(7, D))
    assert not result.rewritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_near_as_eager(dtype):
    function, gated, tensors, _ = LEARNED["two"]
    truth = Layer(function, gated, **tensors)
    layer = Layer(function, gated, **tensors).to(dtype)
    truth.load_state_dict(layer.state_dict())
    x = torch.randn(64, D).to(dtype)

    def gradients(run, parameters, x):
        return torch.autograd.grad(run(x).double().square().sum(), parameters)

    exact = gradients(truth, list(truth.parameters()), x.double())
    eager = gradients(layer, list(layer.parameters()), x)
    with moeblaze_ops.enabled():
        ours = gradients(torch.compile(layer, backend="aot_eager"), list(layer.parameters()), x)
    for got, other, want in zip(ours, eager, exact, strict=True):
        error, eager_error = ((values.double() - want).norm() / want.norm() for values in (got, other))
        assert error <= 2 * eager_error + 4 * torch.finfo(dtype).eps
