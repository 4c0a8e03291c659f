"""Activations of numbers that are no ordinary ones: what is rewritten is the same function of them, and so is its gradient."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tools.rewrite_harness import compiled

_TINY = torch.finfo(torch.float32).tiny
VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -3.0, 30.0, -30.0, 100.0, -100.0, 1e30, -1e30, _TINY / 2, -_TINY / 4]
VALUES += [math.inf, -math.inf, math.nan, 0.1]


class LayerOfValues(nn.Module):
    """As many experts as there are pre-activations to try, each with tokens of its own: it has one of them at all features."""

    def __init__(self, function, gated, dtype):
        super().__init__()
        self.function = function
        values = torch.tensor([*itertools.product(VALUES, repeat=2 if gated else 1)], dtype=torch.float64) / 2
        self.E, G = values.shape
        self.w_up = nn.Parameter(values.to(dtype)[..., None, None].expand(self.E, G, 2, 2).clone())
        self.w_down = nn.Parameter(torch.full((self.E, 2, 2), 0.5, dtype=dtype))

    def forward(self, x, scores):
        weights, ids = scores.topk(1, dim=-1)
        h = torch.einsum("td,tgfd->tgf", x, self.w_up[ids[:, 0]])
        return weights * torch.einsum("tf,tdf->td", self.function(*h.unbind(1)), self.w_down[ids[:, 0]])


def results(layer, run, dtype, gradient):
    """The output of each value, and the gradients of its pre-activations."""
    layer.zero_grad()
    out = run(torch.ones(layer.E, 2, dtype=dtype), torch.eye(layer.E, dtype=dtype))
    out.backward(torch.full_like(out, gradient))
    return torch.cat([out[:, :1], layer.w_up.grad[..., 0, 0]], dim=1).detach().double()


def check(function, gated, dtype, gradients):
    layer = LayerOfValues(function, gated, dtype)
    run, backend = compiled(layer)
    for gradient in gradients:
        found, expected = (results(layer, of, dtype, gradient) for of in (run, layer))
        assert len(backend.rewritten) == 1
        # Rounded to bf16 after each function, an exponential is off by its argument's error.
        close = torch.isclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 0.1, atol=1e-30, equal_nan=True)
        assert close.all(), (gradient, layer.w_up[~close.all(1), :, 0, 0] * 2, found[~close.all(1)], expected[~close.all(1)])


ANY = (1.0, math.inf, math.nan)
ONE = (1.0,)
"""Gradients that arrive. Of a sum of products an infinite one may leave infinities of both signs, which add up to NaN."""

UNGATED = {
    "times a mask": (lambda h: h * (h > 0), ANY),
    "a mask that is cast": (lambda h: (h > 0).to(h.dtype) * h, ANY),
    "times two masks": (lambda h: h * (h > -1) * (h <= 3), ANY),
    "times what is left of a mask": (lambda h: h * (1 - (h > 0).to(h.dtype)), ANY),
    "hardswish of masks": (lambda h: h * ((h > -3) & (h < 3)) * (h + 3) / 6 + h * (h >= 3), ONE),
    "chosen": (lambda h: torch.where(h > 0, h, 0), ANY),
    "chosen otherwise": (lambda h: torch.where(h > 0, 0, h), ANY),
    "chosen with a mask": (lambda h: torch.where((h > -1) & (h < 3), h, 0) * (h < 0.5), ANY),
    "not chosen": (lambda h: torch.where(~(h > 0), h, 0), ANY),
    "filled": (lambda h: h.masked_fill(h < 0.5, 0), ANY),
    "leaky": (lambda h: torch.where(h > 0, h, 0.01 * h), ANY),
    "added to one": (lambda h: torch.where(h > 0, h + 1, 1), ANY),
    "relu": (torch.relu, ANY),
    "relu squared": (lambda h: torch.relu(h).square(), ANY),
    "clamp": (lambda h: h.clamp(-1, 3), ANY),
    "clamp on both sides": (lambda h: h.clamp(-3, 3), ANY),
    "clamp above": (lambda h: h.clamp(max=3), ANY),
    "minimum": (lambda h: torch.minimum(h, torch.ones_like(h)), ANY),
    "maximum of both": (lambda h: torch.maximum(h, 0.5 * h), ONE),
    "either of two masks": (lambda h: torch.where((h > 0) | (h < -2), h, 0), ANY),
    "neither of two masks": (lambda h: h * ~((h > 0) | (h < -2)), ANY),
    "equal": (lambda h: torch.where(h == 0.5, 2, h), ANY),
    "unequal": (lambda h: h * (h != 0.5), ANY),
    "equal to itself": (lambda h: torch.where(h == h, h, 0), ANY),
    "no NaN": (lambda h: torch.where(torch.isnan(h), 0, h), ANY),
    "above a number that bf16 rounds": (lambda h: torch.where(h > 0.1, 2, h), ANY),
    "clamp at a number that bf16 rounds": (lambda h: h.clamp(max=0.1), ANY),
    "sign": (lambda h: h * h.sign(), ANY),
    "hardswish": (lambda h: F.hardswish(h.masked_fill(h != h, 0)), ANY),
    "chosen of what is chosen": (lambda h: torch.where(h > 3, h.clamp(max=30), F.relu(h + 1)), ANY),
    "elu of what is chosen": (lambda h: F.elu(h.masked_fill(h < -1, 0)), ANY),
    "maximum of what is chosen": (lambda h: torch.maximum(h.relu(), h.clamp(-3, -1)), ANY),
    "reciprocal": (lambda h: 1 / h, ANY),
    "quotient": (lambda h: 3 / (h.abs() + 1), ONE),
    "softplus": (F.softplus, ONE),
    "logarithm of one and an exponential": (lambda h: torch.log(1 + torch.exp(h)), ONE),
    "log1p of an exponential": (lambda h: torch.log1p(torch.exp(h)), ONE),
    "abs": (torch.abs, ANY),
    "silu": (F.silu, ANY),
}  # fmt: skip
GATED = {
    "swiglu": (lambda g, u: F.silu(g) * u, ANY),
    "reglu": (lambda g, u: g.relu() * u, ANY),
    "quotient": (lambda g, u: u / g, ONE),
    "quotient by a relu": (lambda g, u: u / g.relu(), ONE),
    "masked by the other half": (lambda g, u: g.relu() * (u < 3), ANY),
    "chosen by the other half": (lambda g, u: torch.where(u > 0, g, 0), ANY),
    "gpt-oss": (lambda g, u: g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)) * (u.clamp(-7, 7) + 1), ONE),
    "maximum": (torch.maximum, ANY),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNGATED)
def test_functions_of_one_number(name, dtype):
    function, gradients = UNGATED[name]
    check(function, False, dtype, gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATED)
def test_functions_of_two_numbers(name, dtype):
    function, gradients = GATED[name]
    check(function, True, dtype, gradients)


def test_hand_written_silu_has_its_value():
    """Its slope is a number where the program divides infinities."""
    layer = LayerOfValues(lambda h: h / (1 + torch.exp(-h)), False, torch.float32)
    run, backend = compiled(layer)
    found, expected = (results(layer, of, torch.float32, 1.0)[:, 0] for of in (run, layer))
    assert [layer.activation for layer in backend.rewritten] == ["silu"]
    assert torch.allclose(found, expected, atol=1e-30, equal_nan=True)
