"""The functions that kernels have for the steps of a formula, and a layer of formulas, in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from moeblaze_ops.arguments.activations import activation_of
from moeblaze_ops.arguments.traced_activations import trace_activation
from moeblaze_ops.kernels.activations import activate, activate_backward
from moeblaze_ops.kernels.formulas.named import NAMED, is_gated, num_parameters
from moeblaze_ops.kernels.formulas.program import gradient_program, value_program
from moeblaze_ops.kernels.tiles import load_parameters
from tests.corpus import activations

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
}
PARAMETERS = torch.tensor([1.25, -0.5, 0.75, 0.25])


@triton.jit
def _activate_kernel(
    h_ptr,
    da_ptr,
    params_ptr,
    a_ptr,
    dh_ptr,
    dparams_ptr,
    VALUE: tl.constexpr,
    GRADIENT: tl.constexpr,
    GATED: tl.constexpr,
    NUM_PARAMETERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Value, and with the gradient's program the value once more beside the gradients, of one block."""
    places = tl.arange(0, BLOCK)
    gate = tl.load(h_ptr + places)
    up = gate
    if GATED:
        up = tl.load(h_ptr + BLOCK + places)
    da = tl.load(da_ptr + places)
    parameters = load_parameters(params_ptr, tl.program_id(0), NUM_PARAMETERS)
    tl.store(a_ptr + places, activate(gate, up, parameters, VALUE))
    a, dgate, dup, dparameters = activate_backward(gate, up, da, parameters, GRADIENT)
    for i in tl.static_range(NUM_PARAMETERS):
        tl.store(dparams_ptr + i * BLOCK + places, dparameters[i])
    tl.store(a_ptr + BLOCK + places, a)
    tl.store(dh_ptr + places, dgate)
    if GATED:
        tl.store(dh_ptr + BLOCK + places, dup)


def run(activation, h_GN, da_N):
    """The value twice, and the gradients of the halves and of the parameters."""
    count = num_parameters(activation)
    a_2N, dh_GN, dparams_PN = torch.empty(2, BLOCK), torch.empty_like(h_GN), torch.empty(count, BLOCK)
    options = {"VALUE": value_program(activation), "GRADIENT": gradient_program(activation), "GATED": is_gated(activation)}
    written = (a_2N, dh_GN, dparams_PN)
    _activate_kernel[(1,)](h_GN, da_N, PARAMETERS, *written, **options, NUM_PARAMETERS=count, BLOCK=BLOCK)
    return a_2N, torch.cat([dh_GN, dparams_PN])


@pytest.mark.parametrize("activation", [*NAMED, *FORMULAS])
def test_value_and_gradient_in_fp32(activation):
    formula = FORMULAS.get(activation, activation)
    h_GN = 4 * torch.randn(2 if is_gated(formula) else 1, BLOCK)
    # Small numbers, where a difference of nearly equal ones would have no digits left, and large ones.
    h_GN[:, :24] = torch.logspace(-6, 1.9, 24) * torch.tensor([1, -1]).repeat(12)
    da_N = torch.randn(BLOCK)
    a_2N, dh_GN = run(formula, h_GN, da_N)
    exact = activation_of(formula)
    given = (*h_GN.double().unbind(0), *PARAMETERS[: num_parameters(formula)].double())
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
    a_2N, _ = run(activation, h_1N, torch.ones(BLOCK))
    torch.testing.assert_close(a_2N[0].double(), activation_of(activation).value(h_1N[0].double()), rtol=3e-6, atol=0)


def test_nan_stays_nan():
    bounded = "relu(h)", "clamp(h, -1.0, 1.0)", "maximum(h, 0.5)", "minimum(0.5, h)"
    for activation in (*bounded, "tanh(h)", "softplus(h)", "expm1(h)", "mish(h)"):
        a_2N, _ = run(activation, torch.full((1, BLOCK), float("nan")), torch.ones(BLOCK))
        assert a_2N.isnan().all(), activation
    for first, second in ((float("nan"), 1.0), (1.0, float("nan"))):
        halves = torch.tensor([[first], [second]]).expand(2, BLOCK).contiguous()
        assert run("maximum(g, u)", halves, torch.ones(BLOCK))[0].isnan().all()
        assert run("minimum(g, u)", halves, torch.ones(BLOCK))[0].isnan().all()


def test_large_numbers_do_not_overflow():
    h_1N = torch.tensor([100.0, -100.0, 1e4, -1e4]).repeat(BLOCK // 4)[None]
    for activation in ("tanh(h)", "softplus(h)", "mish(h)", "silu(h)", "sigmoid(h)"):
        a_2N, dh_1N = run(activation, h_1N, torch.ones(BLOCK))
        torch.testing.assert_close(a_2N[0].double(), activation_of(activation).value(h_1N[0].double()), rtol=1e-6, atol=1e-35)
        assert dh_1N.isfinite().all(), activation
