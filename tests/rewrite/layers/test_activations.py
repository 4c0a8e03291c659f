"""What stands between the two projections: any pointwise function of them becomes a name or a formula of the fused operators."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moeblaze_ops
from tests.corpus import activations
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")

_ACTIVATIONS = {
    "silu": (F.silu, "silu", "swiglu"),
    "silu module in place": (nn.SiLU(inplace=True), "silu", "swiglu"),
    "silu by hand": (lambda x: x * torch.sigmoid(x), "silu", "swiglu"),
    "silu by exp": (lambda x: x / (1 + torch.exp(-x)), "silu", "swiglu"),
    "gelu": (F.gelu, "gelu", "geglu"),
    "gelu by hand": (lambda x: 0.5 * x * (1.0 + torch.erf(x / 2**0.5)), "gelu", "geglu"),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh", "geglu_tanh"),
    "gelu tanh by hand": (
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3)))),
        "gelu_tanh",
        "geglu_tanh",
    ),
    "relu": (torch.relu, "relu", "reglu"),
    "clamped at zero": (lambda x: x.clamp(min=0), "clamp(h, 0.0, None)", "clamp(g, 0.0, None) * u"),
    "squared relu": (lambda x: torch.square(F.relu(x)), "relu2", "relu(g) * relu(g) * u"),
    "relu to the second": (lambda x: F.relu(x) ** 2, "relu2", "relu(g) * relu(g) * u"),
    "none": (lambda x: x, "identity", "g * u"),
}


class _Expert(nn.Module):
    """Two halves, of which the activation makes one."""

    def __init__(self, activation, bias=False):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(zoo.D, zoo.FF, bias) for _ in range(2))
        self.w2 = nn.Linear(zoo.FF, zoo.D, bias=False)
        self.activation = activation

    def forward(self, x):
        return self.w2(self.activation(self.w1(x), self.w3(x)))


def layer_with(name, function, E=2):
    expert = _Expert if name in activations.GATED else zoo.PlainMLP
    return zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: expert(function), E=E)


# Each spelling with or without a gate in turns, and a plain one of each function in both.
_IN_TURNS = [(name, number % 2 == 1) for number, name in enumerate(_ACTIVATIONS)]
_BOTH = [("silu", True), ("gelu", True), ("gelu by hand", False), ("relu", True), ("none", True)]


@pytest.mark.parametrize(("name", "gated"), [*_IN_TURNS, *_BOTH])
def test_named_activation_is_recognised(name, gated):
    function, plain, glu = _ACTIVATIONS[name]
    mlp = zoo.GluMLP if gated else zoo.PlainMLP
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: mlp(function), E=2)
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D)).rewritten
    assert found.activation == (glu if gated else plain)


def _of_scaled_rows(self, x, weights, ids):
    """As in Llama 4, experts read rows that their weights have scaled."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, k = torch.where(ids == e)
        out = out.index_add(0, token, expert(x[token] * (weights[token, k, None] * 2.5)))
    return out


@pytest.mark.parametrize("name", [name for name in _ACTIVATIONS if name != "none"])
def test_activation_of_scaled_rows(name):
    function, _, glu = _ACTIVATIONS[name]
    layer = zoo.ModuleListMoE(_of_scaled_rows, expert=lambda: zoo.GluMLP(function), E=2)
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D)).rewritten
    assert found.activation == glu


@pytest.mark.parametrize("name", ["silu", "silu by exp", "gelu by hand"])
def test_rows_that_are_scaled_for_one_half_alone(name):
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, own in enumerate(self.experts):
            token, k = torch.where(ids == e)
            scaled = x[token] * weights[token, k, None]
            out = out.index_add(0, token, own.w2(own.act(own.w1(scaled)) * own.w3(x[token])))
        return out

    layer = zoo.ModuleListMoE(combine, expert=lambda: zoo.GluMLP(_ACTIVATIONS[name][0]), E=2)
    assert not check_against_eager(layer, torch.randn(5, zoo.D)).rewritten


_AT_ZERO = {
    "softsign": (lambda g, u: g / (1 + g.abs()) * u, True),
    "of what is not zero": (lambda g, u: torch.where(g > 0, (g + 1).log(), g) * u, True),
    "quotient": (lambda g, u: g / u, False),
    "reciprocal": (lambda g, u: g * u.reciprocal(), False),
    "logarithm": (lambda g, u: g * u.abs().log(), False),
}


@pytest.mark.parametrize("rows", ["all", "all, with biases", "chosen"])
@pytest.mark.parametrize("name", _AT_ZERO)
def test_activation_of_zeros(name, rows):
    """Where an expert reads zeros for whoever did not choose it, what is NaN of zeros is NaN for all tokens."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, own in enumerate(self.experts):
            token, k = torch.where(ids == e)
            if rows == "chosen":
                out = out.index_add(0, token, own(x[token] * weights[token, k, None]))
            else:
                chosen = (ids == e).any(-1, keepdim=True)
                out = out + own(x * (weights * (ids == e)).sum(-1, keepdim=True)) * chosen
        return out

    (function, is_finite), x = _AT_ZERO[name], torch.randn(5, zoo.D)
    layer = zoo.ModuleListMoE(combine, expert=lambda: _Expert(function, rows == "all, with biases"), E=3)
    if is_finite or rows != "all":
        assert len(check_against_eager(layer, x).rewritten) == 1
    else:
        assert layer(x).isnan().all() and rewrite_of(layer, x).reasons == ["ACTIVATION"]


@pytest.mark.parametrize("name", activations.ALL)
def test_any_pointwise_activation_is_fused(name):
    layer = layer_with(name, activations.ALL[name])
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D) * 4).rewritten
    assert found.became == f"expert_up({found.activation}) -> expert_down"
    assert found.activation != "identity" and set(found.activation) & ({"g", "u"} if name in activations.GATED else {"h"})


def _row_norm(g, u):
    return F.silu(g) * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)


_WITH_BOUNDS = {
    "clamp": lambda g: g.clamp(min=0),
    "clamp of 0 and 1": lambda g: g.clamp(0, 1),
    "relu": F.relu,
    "relu6": F.relu6,
    "relu6 at six": lambda g: F.relu6(g + 6),
    "hardtanh": lambda g: F.hardtanh(g, 0.0, 1.0),
    "hardtanh at one": lambda g: F.hardtanh(g + 1),
    "hardtanh without a lower bound": lambda g: F.hardtanh(g, -torch.inf, 0.0),
    "hardswish at minus three": lambda g: F.hardswish(g - 3),
    "hardswish at three": lambda g: F.hardswish(g + 3),
    "hardsigmoid at minus three": lambda g: F.hardsigmoid(g - 3),
    "threshold": lambda g: F.threshold(g, 0, 0),
    "where": lambda g: torch.where(g >= 0, g, 0),
    "filled below": lambda g: g.masked_fill(g < 0, 0.5),
    "hardshrink at the bound": lambda g: F.hardshrink(g + 0.5),
    "hardshrink at the lower bound": lambda g: F.hardshrink(g - 0.5),
    "softshrink": lambda g: F.softshrink(g, 0),
    "softshrink at the bound": lambda g: F.softshrink(g + 0.5),
    "softshrink at the lower bound": lambda g: F.softshrink(g - 0.25, 0.25),
    "rrelu": F.rrelu,
    "larger of a tensor and itself": lambda g: torch.max(g, torch.zeros(1)),
    "smaller": lambda g: torch.min(g, torch.zeros(())),
    "lower bound as a tensor": lambda g: g.clamp(min=torch.zeros(())),
    "upper bound as a tensor": lambda g: g.clamp_max(torch.zeros(1)),
    "bound of the same": lambda g: torch.clamp(g, max=2 * g),
}


@pytest.mark.parametrize("name", _WITH_BOUNDS)
def test_tokens_of_padding_have_the_gradients_of_torch(name):
    """Tokens of zeros stand at a bound, where each of these functions has a gradient of its own."""
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(lambda g, u: _WITH_BOUNDS[name](g) * (u + 1)), E=2)
    x = torch.randn(5, zoo.D)
    x[::2] = 0
    assert len(check_against_eager(layer, x, tolerance=1e-7).rewritten) == 1  # torch has sixths in fp32


def test_log_sigmoid():
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: zoo.PlainMLP(F.logsigmoid), E=2)
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D)).rewritten
    assert found.activation == "-softplus(-h)"


_BY_NAME = {
    "leaky_relu": (lambda g: F.leaky_relu(g, negative_slope=0.2), lambda g: F.leaky_relu(g, 0.2)),
    "elu": (lambda g: F.elu(g, alpha=0.5), lambda g: F.elu(g, 0.5)),
    "celu": (lambda g: F.celu(input=g, alpha=0.5), lambda g: F.celu(g, 0.5)),
    "softplus": (lambda g: F.softplus(g, threshold=3), lambda g: F.softplus(g, 1.0, 3)),
    "softplus with both": (lambda g: F.softplus(g, threshold=3, beta=2.0), lambda g: F.softplus(g, 2.0, 3)),
    "hardtanh": (lambda g: F.hardtanh(g, max_val=0.5), lambda g: F.hardtanh(g, -1.0, 0.5)),
}


@pytest.mark.parametrize("name", _BY_NAME)
def test_numbers_that_are_given_by_name(name):
    formulas = set()
    for function in _BY_NAME[name]:
        layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda function=function: zoo.PlainMLP(function), E=2)
        (found,) = check_against_eager(layer, torch.randn(5, zoo.D) * 4).rewritten
        formulas.add(found.activation)
    assert len(formulas) == 1


_OF_OTHERS = {
    "lerp": lambda g, u: torch.lerp(g, u, 0.3),
    "lerp by a gate": lambda g, u: torch.lerp(g, u, torch.sigmoid(g)),
    "rsub": lambda g, u: torch.rsub(g, u, alpha=2) * u,
    "sub": lambda g, u: g.sub(u, alpha=2) * u,
    "addcdiv": lambda g, u: torch.addcdiv(u, g, 1 + torch.exp(-g)),
    "tanhshrink": lambda g, u: F.tanhshrink(g) * u,
    "logaddexp": lambda g, u: torch.logaddexp(g, u),
    "powers of two": lambda g, u: torch.exp2(g) * 2**u + torch.pow(0.5, g),
    "logarithms": lambda g, u: torch.log2(1 + g * g) * torch.log10(2 + u * u),
    "special": lambda g, u: torch.special.expit(g) * torch.special.erf(u) + torch.special.expm1(g).absolute(),
    "larger": lambda g, u: torch.max(g, u) * torch.min(g, u),
    "bounds of each other": lambda g, u: torch.clamp(g, min=u) * u.clamp(max=g),
    "random slope that is none": lambda g, u: nn.RReLU(0.1, 0.3).eval()(g) * (+u),
    "shrunk": lambda g, u: F.hardshrink(g, 0.2) * nn.Softshrink(0.3)(u),
}


@pytest.mark.parametrize("name", _OF_OTHERS)
def test_functions_that_are_made_of_others(name):
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(_OF_OTHERS[name]), E=2)
    assert len(check_against_eager(layer, torch.randn(7, zoo.D) * 2).rewritten) == 1


_REASONS = {
    "a slope that is drawn": (lambda g, u: F.rrelu(g, training=True) * u, "it reads what 'rrelu' gives"),
    "two bounds as tensors": (lambda g, u: torch.clamp(g, -torch.ones(()), torch.ones(())) * u, "it reads what 'clamp' gives"),
    "sinh": (lambda g, u: torch.sinh(g) * u, "it reads what 'sinh' gives, which is no function of formulas"),
    "cast": (lambda g, u: torch.tanh(g) * u.int(), "it casts to torch.int32"),
    "arange": (lambda g, u: torch.tanh(g) * u * torch.arange(zoo.FF), "it depends on which expert or which feature it is"),
}


@pytest.mark.parametrize("name", _REASONS)
def test_the_reason_names_the_operator(name):
    function, reason = _REASONS[name]
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(function), E=2)
    (found,) = rewrite_of(layer, torch.randn(5, zoo.D)).candidates
    assert found.reason == "ACTIVATION" and reason in found.detail


_STORED = {
    "an integer of 1.5": lambda g: g * torch.full((1,), 1.5, dtype=torch.int64),
    "1.5 as an integer": lambda g: g * torch.full((1,), 1.5).long(),
    "3 as a truth value": lambda g: g * torch.full((1,), 3.0).bool(),
    "300 in a byte": lambda g: g * torch.full((1,), 300).to(torch.uint8),
    "a tenth in bfloat16": lambda g: g * torch.full((1,), 0.1, dtype=torch.bfloat16),
    "a tensor": lambda g: g * torch.tensor(2.7, dtype=torch.int32),
}


@pytest.mark.parametrize("name", _STORED)
def test_constants_are_what_their_dtype_holds(name):
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(lambda g, u: torch.tanh(_STORED[name](g)) * u), E=2)
    assert len(check_against_eager(layer, torch.randn(5, zoo.D)).rewritten) == 1


@pytest.mark.parametrize(("dtype", "has_name"), [(torch.float32, True), (torch.float64, False)])
def test_numbers_of_a_name_are_its_own_in_the_dtype_of_the_layer(dtype, has_name):
    """This one is less than the last bit of fp32 away from that of the tanh approximation."""
    number = 0.044715 * (1 + 1e-9)

    def function(g, u):
        return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + number * g.pow(3)))) * u

    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(function), E=2).to(dtype)
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D, dtype=dtype)).rewritten
    assert (found.activation == "geglu_tanh") == has_name


_NEAR_MISSES = {
    "infinite": lambda g, u: torch.where(g < 1, torch.tanh(g), torch.inf) * u,
    "mixes features": lambda g, u: g.softmax(-1) * u,
    "norm of the row": _row_norm,
    "reverses features": lambda g, u: torch.tanh(g) * u.flip(-1),
    "sums over tokens": lambda g, u: torch.tanh(g) * u.cumsum(0),
    "differs by feature": lambda g, u: torch.tanh(g) * u * torch.arange(zoo.FF),
    "reads a matrix": lambda g, u: torch.tanh(g) * (u @ torch.eye(zoo.FF)),
    "random": lambda g, u: torch.tanh(g) * F.dropout(u, 0.5),
    "rounds": lambda g, u: torch.tanh(g).round() * u,
}


@pytest.mark.parametrize("name", _NEAR_MISSES)
def test_what_is_not_pointwise_is_left_alone(name):
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(_NEAR_MISSES[name]), E=2)
    result = rewrite_of(layer, torch.randn(5, zoo.D))
    assert not result.rewritten
    reasons = {"ACTIVATION", "NOT_TWO_PROJECTIONS", "PROJECTION_WEIGHTS", "SLOT_WEIGHTS"}
    assert {found.reason for found in result.candidates} <= reasons


def test_experts_with_different_formulas_are_declined():
    betas = iter((0.5, 0.7))

    def expert():
        beta = next(betas)
        return _Expert(lambda g, u: g * torch.sigmoid(beta * g) * u)

    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=expert, E=2)
    assert [found.reason for found in rewrite_of(layer, torch.randn(5, zoo.D)).candidates] == ["DIFFERENT_ACTIVATIONS"]


_LIMITED = {
    "DeepSeek-V4": (lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(min=-10.0, max=10.0), "swiglu_limited"),
    "numbers": (lambda g, u: torch.clamp(u, -10, 10) * F.silu(torch.clamp_max(g, 10)), "swiglu_limited"),
    "by hand": (lambda g, u: g.clamp(max=10) * torch.sigmoid(g.clamp(max=10)) * u.clip(-10, 10), "swiglu_limited"),
    "another limit": (lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(-9.0, 9.0), "-9.0, 9.0"),
    "gate clamped on both sides": (lambda g, u: F.silu(g.clamp(-10.0, 10.0)) * u.clamp(-10.0, 10.0), "clamp(g, -10.0, 10.0)"),
    "up clamped on one side": (lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(max=10.0), "clamp(u, None, 10.0)"),
    "clamped behind silu": (lambda g, u: F.silu(g).clamp(max=10.0) * u.clamp(-10.0, 10.0), "sigmoid(g), None, 10.0"),
}


@pytest.mark.parametrize("name", _LIMITED)
def test_limited_swiglu(name):
    function, expected = _LIMITED[name]
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: _Expert(function))
    (found,) = check_against_eager(layer, torch.randn(5, zoo.D) * 20).rewritten
    assert expected in found.activation and (found.activation == expected) == (expected == "swiglu_limited")


def test_explain_shows_the_formula():
    layer = layer_with("quick_geglu", activations.ALL["quick_geglu"])
    assert "expert_up(g * sigmoid(g * 1.702) * u) -> expert_down" in str(moeblaze_ops.explain(layer, torch.randn(5, zoo.D)))
