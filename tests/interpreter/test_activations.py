"""The functions that kernels have for the steps of a formula, and a layer of formulas, in Triton's interpreter."""

import pytest
import torch

from moeblaze_ops.arguments.activations import activation_of
from moeblaze_ops.arguments.traced_activations import trace_activation
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward_learned
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from moeblaze_ops.kernels.formulas.named import NAMED, is_gated, num_parameters
from tests.corpus import activations
from tests.corpus.fuzz.activations import check
from tests.corpus.layers import make_layer
from tests.tools.activation_programs import run_in_interpreter
from tests.tools.kernel_helpers import assert_near, oracle, poison_unused

BLOCK = 128
FORMULAS = {name: trace_activation(function) for name, function in activations.ALL.items()} | {
    "pow": "pow(abs(h) + 0.2, 1.7)",
    "logarithms": "log1p(abs(h)) - log(h * h + 0.5)",
    "roots": "sqrt(abs(h)) * rsqrt(abs(h) + 1.0) + cos(h)",
    "conditions": "where((g > u) & ~(g < -1.0) | (u == 0.5), g, u) + where(u != 2.0, 1.0, g)",
    "smaller": "minimum(g, u) * minimum(1.0, u) - maximum(0.5, g)",
    "up_alone": "tanh(u)",
    "one_parameter": "g * sigmoid(p0 * g) * u",
    "several_parameters": "where(h > p1, h * h * softplus(p0) + p1 * h, (expm1(minimum(h, p2)) - h) * softplus(p3) + p1 * h)",
    "an_unused_parameter": "tanh(h) * p1",
    "dropped": "silu(g) * u * where(draw(p0, n, f) >= 0.25, 1.3333333333333333, 0.0)",
}
PARAMETERS = torch.tensor([1.25, -0.5, 0.75, 0.25])


@pytest.mark.parametrize("activation", [*NAMED, *FORMULAS])
def test_value_and_gradient_in_fp32(activation):
    formula = FORMULAS.get(activation, activation)
    h_GN = 4 * torch.randn(2 if is_gated(formula) else 1, BLOCK)
    # Small numbers, where a difference of nearly equal ones would have no digits left, and large ones.
    h_GN[:, :24] = torch.logspace(-6, 1.9, 24) * torch.tensor([1, -1]).repeat(12)
    da_N = torch.randn(BLOCK)
    a_2N, dh_GN = run_in_interpreter(formula, h_GN, da_N, PARAMETERS)
    exact = activation_of(formula)
    places = (torch.arange(BLOCK),) * 2 if "draw" in formula else ()
    given = (*h_GN.double().unbind(0), *PARAMETERS[: num_parameters(formula)].double(), *places)
    slopes = [*exact.gradient(da_N.double(), *given), *exact.of_parameters(da_N.double(), *given)]
    value_N = exact.value(*given)
    halves = len(h_GN)
    for got, expected in ((a_2N[0], value_N), (a_2N[1], value_N), *zip(dh_GN[:halves], slopes, strict=False)):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-6)
    for got, expected in zip(dh_GN[halves:], slopes[halves:], strict=True):
        # One minus a sigmoid near 1 has few digits, and is multiplied by up to the cube of 80.
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("activation", ["tanh(h)", "expm1(h)", "softplus(h)", "log1p(exp(h) - 1)", "mish(h)"])
def test_small_numbers_keep_their_digits(activation):
    h_1N = torch.cat([torch.logspace(-7, 0, BLOCK // 2), -torch.logspace(-7, 0, BLOCK // 2)])[None]
    h_1N = torch.where(h_1N.abs() < 1e-3, h_1N, h_1N) if "log1p" not in activation else h_1N.abs() + 0.5
    a_2N, _ = run_in_interpreter(activation, h_1N, torch.ones(BLOCK), PARAMETERS)
    torch.testing.assert_close(a_2N[0].double(), activation_of(activation).value(h_1N[0].double()), rtol=3e-6, atol=0)


@pytest.mark.parametrize("first", [0, 30])
def test_random_formulas_with_learned_parameters(first):
    """The fuzzer's own comparison, of what kernels of either kind compute."""
    assert sum(check(seed, learned=True, kernels=True) is not None for seed in range(first, first + 30)) > 10


def test_nan_stays_nan():
    bounded = "relu(h)", "clamp(h, -1.0, 1.0)", "maximum(h, 0.5)", "minimum(0.5, h)"
    for activation in (*bounded, "tanh(h)", "softplus(h)", "expm1(h)", "mish(h)"):
        a_2N, _ = run_in_interpreter(activation, torch.full((1, BLOCK), float("nan")), torch.ones(BLOCK), PARAMETERS)
        assert a_2N.isnan().all(), activation
    for first, second in ((float("nan"), 1.0), (1.0, float("nan"))):
        halves = torch.tensor([[first], [second]]).expand(2, BLOCK).contiguous()
        assert run_in_interpreter("maximum(g, u)", halves, torch.ones(BLOCK), PARAMETERS)[0].isnan().all()
        assert run_in_interpreter("minimum(g, u)", halves, torch.ones(BLOCK), PARAMETERS)[0].isnan().all()


def test_large_numbers_do_not_overflow():
    h_1N = torch.tensor([100.0, -100.0, 1e4, -1e4]).repeat(BLOCK // 4)[None]
    for activation in ("tanh(h)", "softplus(h)", "mish(h)", "silu(h)", "sigmoid(h)"):
        a_2N, dh_1N = run_in_interpreter(activation, h_1N, torch.ones(BLOCK), PARAMETERS)
        torch.testing.assert_close(a_2N[0].double(), activation_of(activation).value(h_1N[0].double()), rtol=1e-6, atol=1e-35)
        assert dh_1N.isfinite().all(), activation


GATED = "g * sigmoid(p0 * g) * (u + p1)"
UNGATED = "where(h > 0.0, h, h * p0)"
DROPPED = "silu(g) * u * where(draw(p1, n, f) >= 0.25, 1.3333333333333333, 0.0)"


@pytest.mark.parametrize(
    ("case", "formula", "weight_on", "dtype"),
    [
        ("unused_slots", GATED, "output", torch.float32),
        ("unused_slots", UNGATED, "output", torch.float32),
        ("empty_expert", GATED, "input", torch.float32),
        ("all_to_one_expert", GATED, "output", torch.bfloat16),
        ("zero_tokens", UNGATED, "output", torch.float32),
        ("unused_slots", DROPPED, "output", torch.float32),
        ("empty_expert", DROPPED, "input", torch.bfloat16),
    ],
)
def test_launchers_of_learned_parameters(case, formula, weight_on, dtype):
    torch.manual_seed(0)
    gated, count = formula is not UNGATED, num_parameters(formula)
    named = "swiglu" if gated else "silu"
    layer = make_layer(case, named, bias=True, dtype=dtype, sizes=(5, 2, 40, 36), requires_grad=False)
    x, dispatched, used = layer.x_TD, layer.routing, int(layer.routing[1][-1])
    E, G, F, _ = layer.w_up[0].shape
    params_EP = torch.linspace(0.5, 1.5, E * count).view(count, E).t()  # any strides
    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    arguments = (x, layer.w_up, layer.b_up, on_input, *dispatched, formula, None, None, None, params_EP)
    assert_near(launch_expert_up(*arguments)[1], oracle("expert_up", *arguments)[1], used, roundings=8)

    h = torch.randn(dispatched[0].shape[0], G, F).to(dtype)
    poison_unused(dispatched, h)
    dout = torch.randn(x.shape).to(dtype)
    arguments = (dout, h, layer.w_down, layer.b_down, on_output, *dispatched, formula, None, None, params_EP)
    got, expected = launch_expert_down_backward_learned(*arguments), oracle("expert_down_backward_learned", *arguments)
    assert_near((got[1], got[3]), (expected[1], expected[3]), roundings=256)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)
