"""The fused activations against autograd through torch's own functions, where a random layer does not reach, too."""

import pytest
import torch

from moeblaze_ops.arguments.activations import ACTIVATIONS, activate, activation_gradient
from moeblaze_ops.kernels.formulas.derivative import CLAMPS_MOVE_AT_BOUNDS
from moeblaze_ops.kernels.formulas.named import CLAMP_LIMIT, SILU_LIMIT
from tests.corpus import reference

CORNERS = [0.0, 1.5, -1.5, 20.0, -20.0, float("nan")]
CORNERS += [sign * limit + step for limit in (CLAMP_LIMIT, SILU_LIMIT) for sign in (1, -1) for step in (-0.5, 0.0, 0.5)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_matches_reference(activation):
    corners = torch.tensor(CORNERS, dtype=torch.float64)
    halves = torch.cartesian_prod(corners, corners) if ACTIVATIONS[activation].gated else corners[:, None]
    h_NGF = halves.unsqueeze(-1).requires_grad_()
    expected = reference.activate(h_NGF, activation)
    torch.testing.assert_close(activate(h_NGF.detach(), activation), expected, equal_nan=True)
    da_NF = torch.linspace(-2, 3, len(h_NGF), dtype=torch.float64).unsqueeze(-1)
    (expected_gradient,) = torch.autograd.grad(expected, h_NGF, da_NF)
    # Of NaN formulas that are otherwise equal have several slopes.
    decided = ~h_NGF.detach().isnan().any(1, keepdim=True).expand_as(h_NGF)
    gradient = activation_gradient(da_NF, h_NGF.detach(), activation)
    torch.testing.assert_close(gradient[decided], expected_gradient[decided])


@pytest.mark.parametrize("activation", ["swiglu_clamped", "swiglu_limited"])
def test_clamps_are_reached(activation):
    """Beyond the limit there is no gradient; at the limit there is what torch has."""
    limit = CLAMP_LIMIT if activation == "swiglu_clamped" else SILU_LIMIT
    values = torch.tensor([limit, limit + 0.5, -limit, -limit - 0.5])
    ones = torch.ones_like(values)
    still = not CLAMPS_MOVE_AT_BOUNDS
    for half, without in ((0, [still, True, False, False]), (1, [still, True, still, True])):
        h_N2F = torch.stack([values, ones] if half == 0 else [ones, values], dim=1).unsqueeze(-1)
        gradient_N2F = activation_gradient(ones[:, None], h_N2F, activation)
        assert (gradient_N2F[:, half, 0] == 0).tolist() == without
