"""Programs of short forms against fp64, at every number that bf16 has."""

import numpy as np
import pytest
import torch

from moeblaze_ops.arguments.activations import activation_of
from moeblaze_ops.arguments.traced_activations import trace_activation
from moeblaze_ops.kernels.formulas.named import NAMED, is_gated, num_parameters
from moeblaze_ops.kernels.formulas.program import gradient_program, value_program
from tests.corpus import activations
from tests.corpus.fuzz.activations import check
from tests.tools.activation_programs import run_short

FORMULAS = {name: trace_activation(function) for name, function in activations.ALL.items()} | {
    "sine": "sin(h)",
    "cosine": "cos(h)",
    "soft_sine": "tanh(g) * sin(u)",
    "mish_of_half": "mish(0.5 * h)",
    "erf_of_negative": "h * (erf(h * -0.3) * 0.5 + 0.5)",
    "swiglu_learned": "g * sigmoid(p0 * g) * u",
    "xielu_learned": "where(h > 0.0, h * h * p0 + h * 0.5, (expm1(clamp(h, None, -1e-06)) - h) * p1 + h * 0.5)",
    "powers": "pow(abs(h) + 0.2, 1.7)",
    "logarithms": "log1p(abs(h)) - log(h * h + 0.5)",
}
PARAMETERS = torch.tensor([1.25, -0.5])


def all_of_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()


def both(formula: str, h: list, dtype: type = np.float32) -> tuple[list, list]:
    """Value and gradients by the short program, and in fp64."""
    da = torch.full_like(h[0], 0.75)
    learned = [torch.full_like(h[0], float(p)) for p in PARAMETERS[: num_parameters(formula)]]
    halves = h if is_gated(formula) else [h[0], h[0]]
    a, *gradients = run_short(gradient_program(formula, is_short=True), [*halves, da, *learned], dtype)
    (value,) = run_short(value_program(formula, is_short=True), [*halves, da, *learned], dtype)
    exact = activation_of(formula)
    slopes = [*exact.gradient(da, *h, *learned), *exact.of_parameters(da, *h, *learned)]
    if not is_gated(formula):
        gradients = [gradients[0], *gradients[2:]]
    wanted = exact.value(*h, *learned)
    return [a, value, *gradients], [wanted, wanted, *slopes]


@pytest.mark.parametrize("name", [*NAMED, *FORMULAS])
def test_every_number_of_bf16(name):
    """Far within half an ulp of bf16, which is 2e-3 at least, and the noise of fp32 where terms cancel."""
    formula = FORMULAS.get(name, name)
    numbers = all_of_bf16()
    # Sines are good up to 100,000; squares and cubes of the others are finite in fp32.
    numbers = numbers[numbers.abs() < (1e5 if "sin" in formula or "cos" in formula else 1e12)]
    has_erf = "erf" in formula or "gelu(" in NAMED.get(name, "")
    for others in (0.625, -3.0, 40.0) if is_gated(formula) else (0.0,):
        h = [numbers, torch.full_like(numbers, others)] if is_gated(formula) else [numbers]
        for given in (h, h[::-1]):
            curved = given[0].abs().clamp(max=16) + 1
            noise = curved * (1 + given[1].abs() if len(given) > 1 else 1) * (5e-6 if has_erf else 1e-6)
            for index, (ours, exact) in enumerate(zip(*both(formula, list(given)), strict=True)):
                of_parameter = index >= 2 + len(given)
                error, bound = (ours.double() - exact).abs(), exact.abs() * 6e-5
                bound = bound + noise * (curved if of_parameter else 1)
                worst = int((error / bound).nan_to_num(torch.inf).argmax())
                where = [float(half[worst]) for half in given]
                assert error[worst] <= bound[worst], (index, where, float(ours[worst]), float(exact[worst]))


@pytest.mark.parametrize("name", [*NAMED, *(name for name, text in FORMULAS.items() if "sin" not in text and "cos" not in text)])
def test_infinities_and_nan_come_out_as_in_fp64(name):
    formula = FORMULAS.get(name, name)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e18, -1e18], dtype=torch.float64)
    twos = torch.full_like(special, 2.0)
    for h in ([special, twos], [twos, special]) if is_gated(formula) else ([special],):
        (a, *_), (exact, *_) = both(formula, h)
        assert a.isnan().tolist() == exact.float().isnan().tolist()
        known = ~exact.isnan()
        torch.testing.assert_close(a[known], exact[known].float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["swiglu_clamped", "swiglu_limited", "swiglu_other_limits"])
def test_no_gradient_passes_a_clamp(name):
    """Whatever the other half is, NaN aside; to up an infinite one neither."""
    numbers = torch.tensor([0.0, 1.0, -1.0, 11.0, -11.0, 50.0, torch.inf, -torch.inf], dtype=torch.float64)
    gate, up = torch.cartesian_prod(numbers, numbers).unbind(1)
    program = gradient_program(FORMULAS.get(name, name), is_short=True)
    for arrives in (1.0, torch.inf):
        _, dgate, dup = run_short(program, [gate, up, torch.full_like(gate, arrives)], np.float32)
        assert arrives == torch.inf or not dgate[gate > 10].any()
        assert not dup[up.abs() > 10].any()


@pytest.mark.parametrize("function", ["tanh", "sigmoid", "softplus", "expm1", "silu", "mish", "gelu_tanh", "sin"])
def test_values_keep_their_digits(function):
    """Where they are small, too: down to 1e-20, and from both ends."""
    formula = f"{function}(h)"
    numbers = all_of_bf16()
    numbers = numbers[(numbers.abs() < (3 if function == "sin" else 40)) & (numbers.abs() > 1e-20)]
    (_, value, _), (exact, _, _) = both(formula, [numbers])
    kept = exact.abs() > 1e-20
    # The argument of an exponential has 24 digits as well: those of 40 make a relative error of 3e-6.
    torch.testing.assert_close(value[kept].double(), exact[kept], rtol=6e-5, atol=0)


def test_error_function():
    """Its tail is good to what is documented, and nothing of it is left beyond."""
    (_, value, _), (exact, _, _) = both(f"erf(h * {0.5**0.5}) * 0.5 + 0.5", [all_of_bf16().nan_to_num(0, 0, 0)])
    error = (value.double() - exact).abs()
    assert error.max() <= 5e-6
    assert (error / exact)[exact > 3.2e-5].max() <= 1.5e-5
    assert (error / exact)[exact > 1e-9].max() <= 6e-5


@pytest.mark.parametrize("block", range(4))
def test_random_formulas_are_taken_apart_rightly(block):
    """Without rounding, nothing is left but what short series leave, which other functions magnify, and a few kinks between."""
    num_checked = 0
    for seed in range(40 * block, 40 * block + 40):
        formula = check(seed)
        if formula is None or num_parameters(formula) > len(PARAMETERS):
            continue
        generator = torch.Generator().manual_seed(seed)
        h = list(3 * torch.randn(2 if is_gated(formula) else 1, 500, generator=generator, dtype=torch.float64))
        for got, exact in zip(*both(formula, h, np.float64), strict=True):
            error = (got - exact).abs() / (1 + exact.abs())
            assert (error < 2e-3).double().mean() > 0.98, (formula, float(error.max()))
        num_checked += 1
    assert num_checked > 20
