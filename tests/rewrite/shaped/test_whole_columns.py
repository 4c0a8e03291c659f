"""Masks of single experts side by side become the mask of all, in the code that Inductor generates for a CUDA device."""

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph
from tests.tools import fakecuda

T, D, HIDDEN, E = 40, 64, 128, 12


def loop(x, router, w_up, w_down, mask_of, steps_of=lambda logits: logits):
    """A loop over experts, each on the tokens that ``mask_of`` gives it."""
    logits = F.linear(x, router).float()
    gates = torch.where(logits >= 0.1, logits.sigmoid(), 0)
    out = torch.zeros_like(x)
    for e in range(E):
        (token,) = torch.where(mask_of(gates, e))
        gate, up = F.linear(x[token], w_up[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w_down[e]) * gates[token, e, None].to(x.dtype)
        out = out.index_add(0, token, y)
    return out


def above_zero(gates, e):
    return gates[:, e] > 0


def selected(gates, e):
    return gates.select(1, e).gt(0)


def in_two_steps(gates, e):
    return (gates[:, e] > 0) & (gates[:, e] < 2.0)


def by_bounds(gates, e):
    """Another number for each expert."""
    return gates[:, e] > 0.01 * e


def forward_code(mask_of) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = ((T, D), (E, D), (E, 2 * HIDDEN, D), (E, D, HIDDEN))
    inputs = [(torch.randn(shape) * 0.1).bfloat16().requires_grad_() for shape in shapes]
    sources: list[str] = []
    lower = fakecuda.shadow_backend(sources)

    def backend(gm, inputs):
        assert rewrite_graph(gm).rewritten
        return lower(gm, inputs)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = torch.compile(loop, backend=backend, fullgraph=True)(*inputs, mask_of)
    torch.testing.assert_close(out, loop(*inputs, mask_of), atol=2e-3, rtol=2e-2)
    return sources[0]


@pytest.mark.parametrize("mask_of", [above_zero, selected, in_two_steps])
def test_one_mask(mask_of):
    kernels = fakecuda.launches(forward_code(mask_of))
    before_dispatch = kernels[: kernels.index("_count_kernel")]
    assert len(before_dispatch) <= 2, before_dispatch


def test_masks_that_differ_stay():
    kernels = fakecuda.launches(forward_code(by_bounds))
    assert kernels.index("_count_kernel") >= E
