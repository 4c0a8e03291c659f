"""Activations without a name on a GPU, both kernel paths: output and gradients against fp64 beside eager code."""

import pytest
import torch

from moeblaze_ops import config, moe
from tests.corpus import activations

pytestmark = pytest.mark.gpu

T, K, E, D, F = 200, 2, 5, 256, 136


@pytest.fixture(params=["hopper", "portable"], autouse=True)
def path(request, monkeypatch):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setattr(config, "hopper", "auto" if request.param == "hopper" else "off")


def plain(x, weights, experts, w_up, w_down, function):
    """A loop over the experts, in the dtype of x."""
    out = torch.zeros_like(x)
    for e in range(len(w_up)):
        h = x @ w_up[e].T
        a = function(*h.chunk(2, dim=-1)) if h.shape[1] == 2 * F else function(h)
        out = out + (weights * (experts == e)).sum(-1, keepdim=True).to(x.dtype) * (a @ w_down[e].T)
    return out


@pytest.mark.parametrize("name", activations.ALL)
def test_no_worse_than_eager(name):
    torch.manual_seed(0)
    function = activations.ALL[name]
    rows = 2 * F if name in activations.GATED else F
    numbers = torch.randn(T, D), torch.rand(T, K), torch.randn(E, rows, D) / 8, torch.randn(E, D, F) / 8
    experts = torch.rand(T, E).topk(K).indices.cuda()
    dout = torch.randn(T, D)

    def step(run, dtype):
        x, weights, w_up, w_down = (t.to("cuda", torch.bfloat16).to(dtype).requires_grad_() for t in numbers)
        out = run(x, weights, experts, w_up, w_down)
        return [out.detach(), *torch.autograd.grad(out, (x, weights, w_up, w_down), dout.to("cuda", torch.bfloat16).to(dtype))]

    truth = step(lambda *args: plain(*args, function), torch.float64)
    eager = step(lambda *args: plain(*args, function), torch.bfloat16)
    ours = step(lambda *args: moe(*args, activation=function), torch.bfloat16)
    for index, (got, other, want) in enumerate(zip(ours, eager, truth, strict=True)):
        error, eager_error = ((values.double() - want).norm() / want.norm() for values in (got, other))
        # One number is a sum of many that cancel: what is left of their rounding is a matter of luck.
        factor = 1.5 if want.numel() > E else 5
        assert error <= factor * eager_error + torch.finfo(torch.bfloat16).eps / 4, (index, float(error), float(eager_error))


def swish(g, u, beta, shift):
    return g * torch.sigmoid(beta * g) * (u + shift)


def leaky(h, slope):
    return torch.where(h > 0, h, slope * h)


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("function", [swish, leaky])
def test_learned_parameters_are_no_worse_than_eager(function, per_expert):
    torch.manual_seed(0)
    gated = function is swish
    numbers = torch.randn(T, D), torch.rand(T, K), torch.randn(E, F * (1 + gated), D) / 8, torch.randn(E, D, F) / 8
    learned = [torch.rand(E if per_expert else ()) + 0.5 for _ in range(1 + gated)]
    experts = torch.rand(T, E).topk(K).indices.cuda()
    dout = torch.randn(T, D)

    def step(run, dtype):
        tensors = [t.to("cuda", torch.bfloat16).to(dtype).requires_grad_() for t in numbers]
        own = [t.cuda().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for t in learned]
        out = run(*tensors, own)
        return [out.detach(), *torch.autograd.grad(out, (*tensors, *own), dout.to("cuda", torch.bfloat16).to(dtype))]

    def loop(x, weights, w_up, w_down, own):
        of_expert = iter([[p[e] if per_expert else p for p in own] for e in range(E)])
        return plain(x, weights, experts, w_up, w_down, lambda *h: function(*h, *next(of_expert)).to(x.dtype))

    def fused(x, weights, w_up, w_down, own):
        return moe(x, weights, experts, w_up, w_down, activation=function, activation_parameters=own)

    truth, eager, ours, again = (
        step(run, dtype)
        for run, dtype in (
            (loop, torch.float64), (loop, torch.bfloat16), (fused, torch.bfloat16), (fused, torch.bfloat16),
        )
    )  # fmt: skip
    for index, (got, twice, other, want) in enumerate(zip(ours, again, eager, truth, strict=True)):
        assert torch.equal(got, twice)
        error, eager_error = ((values.double() - want).norm() / want.norm() for values in (got, other))
        # One number is a sum of many that cancel: what is left of their rounding is a matter of luck.
        factor = 1.5 if want.numel() > E else 5
        assert error <= factor * eager_error + torch.finfo(torch.bfloat16).eps / 4, (index, float(error), float(eager_error))


def test_a_compiled_call_gives_the_gradient_of_parameters():
    torch.manual_seed(0)
    numbers = torch.randn(T, D), torch.rand(T, K), torch.randn(E, 2 * F, D) / 8, torch.randn(E, D, F) / 8
    tensors = [t.to("cuda", torch.bfloat16).requires_grad_() for t in numbers]
    learned = [torch.tensor(v, device="cuda", requires_grad=True) for v in (1.2, 0.3)]
    experts = torch.rand(T, E).topk(K).indices.cuda()

    def run(x, weights, w_up, w_down, *own):
        return moe(x, weights, experts, w_up, w_down, activation=swish, activation_parameters=own)

    gradients = [
        torch.autograd.grad(step(*tensors, *learned).float().square().sum(), (*tensors, *learned))
        for step in (run, torch.compile(run, fullgraph=True))
    ]
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))


def test_a_compiled_layer_is_rewritten():
    import moeblaze_ops

    torch.manual_seed(0)
    function = activations.GATED["mish_glu"]
    x, w_up, w_down = torch.randn(T, D), torch.randn(E, 2 * F, D) / 8, torch.randn(E, D, F) / 8
    x, w_up, w_down = (t.to("cuda", torch.bfloat16).requires_grad_() for t in (x, w_up, w_down))
    logits = torch.randn(T, E, device="cuda")

    def layer(x, w_up, w_down):
        weights, experts = logits.softmax(-1).topk(K)
        return plain(x, weights, experts, w_up, w_down, function)

    expected = torch.autograd.grad(layer(x, w_up, w_down).float().square().sum(), (x, w_up, w_down))
    report = moeblaze_ops.explain(layer, x, w_up, w_down)
    assert "softplus(g)" in str(report)
    with moeblaze_ops.enabled():
        got = torch.autograd.grad(torch.compile(layer)(x, w_up, w_down).float().square().sum(), (x, w_up, w_down))
    for ours, eager in zip(got, expected, strict=True):
        assert (ours - eager).norm() <= 2e-2 * eager.norm()
