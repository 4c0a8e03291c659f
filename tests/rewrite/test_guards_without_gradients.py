"""Guards in methods without gradients that are called where gradients are on: DiT-MoE's and HiDream's ``moe_infer``."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

D, F, E, K, T = 8, 16, 4, 2, 6


class Layer(nn.Module):
    def __init__(self, infer):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, F), nn.ReLU(), nn.Linear(F, D)) for _ in range(E))
        self.infer = infer

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        return self.infer(self, x, weights, ids)


def by_counts(self, x, weights, ids):
    out, order, start = torch.zeros_like(x), ids.flatten().argsort(), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=E).tolist()):
        if count == 0:
            continue
        chosen = order[start : start + count]
        out.index_add_(0, chosen // K, self.experts[e](x[chosen // K]) * weights.reshape(-1, 1)[chosen])
        start = start + count
    return out


def by_masks(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if len(token) == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def by_lists(self, x, weights, ids):
    """``out`` is another tensor after the guard."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def by_ends(self, x, weights, ids):
    """DeepSeek-MoE's own: as many counts as the highest id says, of ids in three axes."""
    out, flat = torch.zeros_like(x), ids.view(2, -1, K).view(-1)
    order, ends = flat.argsort(), flat.bincount().cpu().numpy().cumsum(0)
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        chosen = order[start:end]
        rows = self.experts[e](x[chosen // K]).mul_(weights.view(-1, 1)[chosen])
        out = out.to(rows.dtype)
        out.scatter_reduce_(0, (chosen // K).view(-1, 1).repeat(1, D), rows, reduce="sum")
    return out


def of_selected_rows(self, x, weights, ids):
    """The weights of an expert among those of the tokens that chose it."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        chosen = (ids == e).any(dim=-1)
        if chosen.any():
            out[chosen] += expert(x[chosen]) * weights[chosen][ids[chosen] == e].unsqueeze(-1)
    return out


def _compiled(layer, x):
    """The output and the gradients of the compiled layer, of the layer, and how many layers were rewritten."""
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        runs = torch.compile(layer, backend=backend), layer
        results = []
        for run in runs:
            layer.zero_grad()
            own = x.clone().requires_grad_()
            out = run(own)
            if out.requires_grad:
                out.square().sum().backward()
            results.append([out.detach(), own.grad, *(p.grad for p in layer.parameters()), out.requires_grad])
    return *results, len(rewritten_in(records))


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("infer", [by_counts, by_masks, by_lists, by_ends, of_selected_rows], ids=lambda f: f.__name__)
def test_guards(infer, idle):
    torch.manual_seed(0)
    layer, x = Layer(torch.no_grad()(infer)), torch.randn(T, D)
    if idle:
        layer.gate.bias.data[[1, 3]] = -1000.0
    actual, expected, rewritten = _compiled(layer, x)
    torch.testing.assert_close(actual, expected)
    assert rewritten == 1


def writes_more(self, x, weights, ids):
    """The work does more than to add rows."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if len(token) > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            out += 1
    return out


def of_other_rows(self, x, weights, ids):
    """The weights of an expert among those of the tokens that chose it first, of which there may be fewer."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        chosen = (ids[:, :1] == e).any(dim=-1)
        if chosen.any():
            out[chosen] += expert(x[chosen]) * weights[chosen][ids[chosen] == e].unsqueeze(-1)
    return out


def gives_up_a_gradient(self, x, weights, ids):
    """Without rows the sum has the gradient that it came with."""
    out = x * self.experts[0][2].bias
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        with torch.no_grad():
            if len(token) > 0:
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
    return out


@pytest.mark.parametrize("infer", [torch.no_grad()(writes_more), of_other_rows, gives_up_a_gradient],
                         ids=["writes_more", "of_other_rows", "gives_up_a_gradient"])  # fmt: skip
def test_twins(infer):
    torch.manual_seed(0)
    layer, x = Layer(infer), torch.randn(T, D)
    layer.gate.bias.data[[1, 3]] = -1000.0
    actual, expected, rewritten = _compiled(layer, x)
    torch.testing.assert_close(actual, expected)
    assert rewritten == 0
