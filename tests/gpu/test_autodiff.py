"""Forward mode and ``verify`` on a GPU: the kernels serve the tangents, too."""

import pytest
import torch
from torch.func import jvp

import moeblaze_ops
from tests.corpus.zoo.blocks import Blocks, Dense, Guarded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", ["preactivation", "input"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_tangents(dtype, keep, weight_on):
    """Against fp64 on the CPU, which tests against finite differences hold; -1 leaves rows that nothing writes."""
    torch.manual_seed(0)
    T, D, F, E, K = 300, 64, 128, 6, 2
    x, w_up, w_down = torch.randn(T, D), torch.randn(E, 2 * F, D) / D**0.5, torch.randn(E, D, F) / F**0.5
    weights, experts = torch.rand(T, E).topk(K)
    experts[::7, 1] = -1
    primals = [x.to(dtype), weights, w_up.to(dtype), w_down.to(dtype)]
    tangents = [torch.randn_like(primal) for primal in primals]

    def run(x, weights, w_up, w_down):
        return moeblaze_ops.moe(x, weights, experts.to(x.device), w_up, w_down, keep=keep, weight_on=weight_on)

    _, expected = jvp(run, tuple(p.double() for p in primals), tuple(t.double() for t in tangents))
    out, got = jvp(run, tuple(p.cuda() for p in primals), tuple(t.cuda() for t in tangents))
    assert torch.equal(out, run(*(p.cuda() for p in primals)))
    error = float((got.cpu().double() - expected).norm() / expected.norm())
    # Sums of some products in the dtype, each rounded a few times; TF32 is not used.
    assert error < 8 * torch.finfo(dtype).eps


def test_tangents_of_the_router():
    torch.manual_seed(0)
    logits, tangent = torch.randn(300, 16), torch.randn(300, 16)

    def run(logits):
        return moeblaze_ops.route(logits, 4, renormalize=True)[0]

    _, expected = jvp(run, (logits.double(),), (tangent.double(),))
    _, got = jvp(run, (logits.cuda(),), (tangent.cuda(),))
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Dense, Guarded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify(make, dtype):
    torch.manual_seed(0)
    verification = moeblaze_ops.verify(Blocks(make, 2).to("cuda", dtype), torch.randn(64, 16, device="cuda", dtype=dtype))
    assert verification.reference == torch.float64
    assert verification.agrees, str(verification)
