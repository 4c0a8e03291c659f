"""Dropout inside of experts on a GPU: kernels of both kinds draw what torch draws, and backward what forward drew."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moeblaze_ops
import moeblaze_ops.compile  # registers the backend where the package is not installed
from moeblaze_ops import config
from moeblaze_ops.arguments.draws import draw
from moeblaze_ops.kernels.formulas.dropped import dropped
from moeblaze_ops.ops.sum_dropped import sum_dropped, sum_dropped_backward

_ops = torch.ops.moeblaze
SIZES = {"even": (4096, 512, 256, 16, 4), "ragged": (1000, 320, 200, 7, 2)}
P = 0.25


@pytest.mark.parametrize("hopper", ["auto", "off"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_activations(monkeypatch, hopper, sizes):
    monkeypatch.setattr(config, "hopper", hopper)
    torch.manual_seed(0)
    T, D, width, E, K = sizes
    x, dout = (torch.randn(T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w_up = torch.randn(E, 2, width, D, device="cuda", dtype=torch.bfloat16) * D**-0.5
    w_down = torch.randn(E, width, D, device="cuda", dtype=torch.bfloat16) * width**-0.5
    weights = torch.rand(T, K, device="cuda")
    routing = _ops.dispatch(torch.rand(T, E, device="cuda").topk(K).indices, E)
    seeds_E1 = (12345 + torch.arange(E, device="cuda")).float().unsqueeze(1)
    slots, offsets = routing[0].long(), routing[1].long()
    expert = torch.searchsorted(offsets[1:-1].contiguous(), torch.arange(T * K, device="cuda"), right=True)
    rows, columns = torch.arange(T * K, device="cuda").unsqueeze(1), torch.arange(width, device="cuda")
    factor = torch.where(draw(seeds_E1[expert], rows, columns) >= P, 1 / (1 - P), 0.0)

    def ours(x, w_up, w_down, weights):
        optional = (None, None, None, seeds_E1)
        h, a = _ops.expert_up(x, [w_up], [], None, *routing, formula, *optional)
        assert torch.equal(a == 0, factor == 0)
        return _ops.expert_down(h, a, [w_down], [], weights, *routing, formula, *optional)

    def reference(x, w_up, w_down, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            own = slice(offsets[e], offsets[e + 1])
            g, u = torch.einsum("nd,gfd->gnf", x[slots[own] // K], w_up[e])
            y = (F.silu(g) * u * factor[own]) @ w_down[e]
            out = out.index_add(0, slots[own] // K, y * weights.flatten()[slots[own]].unsqueeze(1))
        return out

    formula, found = dropped("swiglu", P, 0), []
    for run, dtype in ((ours, torch.bfloat16), (reference, torch.float32)):
        leaves = [t.to(torch.promote_types(t.dtype, dtype)).requires_grad_() for t in (x, w_up, w_down, weights)]
        out = run(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    for got, expected in zip(*found, strict=True):
        assert (got.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("T", "K", "D"), [(512, 8, 2048), (33, 3, 200), (0, 2, 64)])
def test_outputs(T, K, D):
    rows, seed = torch.randn(T * K, D, device="cuda", dtype=torch.bfloat16), torch.tensor([999.0], device="cuda")
    torch.testing.assert_close(sum_dropped(rows, seed, K, P).cpu(), sum_dropped(rows.cpu(), seed.cpu(), K, P))
    dout = torch.randn(D, T, device="cuda", dtype=torch.bfloat16).T
    assert torch.equal(sum_dropped_backward(dout, seed, K, P).cpu(), sum_dropped_backward(dout.cpu(), seed.cpu(), K, P))


class Layer(nn.Module):
    def __init__(self, D, width, E):
        super().__init__()
        self.router, self.up = nn.Linear(D, E), nn.Linear(D, E * width)
        self.down = nn.Parameter(torch.randn(E, D, width) * width**-0.5)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up.weight.chunk(len(self.down)), self.down, strict=True)):
            token, k = torch.where(ids == e)
            y = F.dropout(F.linear(F.dropout(F.silu(F.linear(x[token], up)), 0.1), down), 0.2)
            out = out.index_add(0, token, y * weights[token, k, None])
        return out


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_backward_draws_what_forward_drew(mode):
    """The gradient is the slope of the same function, of which a call is made again by its seed; steps draw other numbers."""
    torch.manual_seed(0)
    layer = Layer(64, 32, 4).cuda()
    run = torch.compile(layer, backend="moeblaze", mode=mode)
    x = torch.randn(256, 64, device="cuda")

    def value():
        torch.manual_seed(7)
        return run(x).double().square().sum()

    for _ in range(3):
        layer.zero_grad()
        value().backward()
    assert "dropout(0.1) -> expert_down -> dropout(0.2)" in str(moeblaze_ops.report())
    direction = torch.randn_like(layer.down)
    slope = (layer.down.grad * direction).sum().item()
    around = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            layer.down += step * direction
        around.append(value().item())
        with torch.no_grad():
            layer.down -= step * direction
    assert abs((around[0] - around[1]) / 2e-2 - slope) < 0.02 * abs(slope)
    assert not torch.equal(run(x).clone(), run(x).clone())
