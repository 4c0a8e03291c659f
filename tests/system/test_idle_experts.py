"""Gradients of experts without tokens: zeros or None, what an optimizer makes of them, and who is told."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moeblaze_ops
from moeblaze_ops import config
from tests.corpus.zoo.blocks import Dense, Guarded
from tests.tools.rewrite_harness import rewriting_backend

IDLE = 3


class Stacked(nn.Module):
    """The same loop over one parameter of all experts, which has a gradient once any expert has a token."""

    def __init__(self, D=16, hidden=32, E=4):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, hidden, D)), nn.Parameter(torch.randn(E, D, hidden))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, F.silu(x[token] @ self.up[e].T) @ self.down[e].T * weights[token, slot, None])
        return out


pytestmark = pytest.mark.usefixtures("scratch")


def with_an_idle_expert(make):
    """A layer, and tokens none of which chooses the last expert while they are positive."""
    layer = make()
    with torch.no_grad():
        layer.router.weight[IDLE] = -10
    return layer, torch.rand(8, 16) + 0.1


def train(layer, run, x):
    """All experts for three steps, then ten steps in which the last expert is idle; gradients that hooks were called with."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0.1)
    hooked = []
    layer.up[IDLE].weight.register_post_accumulate_grad_hook(lambda parameter: hooked.append(parameter.grad.clone()))
    for step in range(13):
        optimizer.zero_grad()
        run(-x if step < 3 else x).square().sum().backward()
        optimizer.step()
    return layer.up[IDLE].weight.detach().clone(), optimizer.state[layer.up[IDLE].weight]["exp_avg"].clone(), hooked


@pytest.mark.parametrize("setting", ["zeros", "none"])
def test_adamw_and_hooks(setting, monkeypatch):
    """``none`` trains as eager does; with ``zeros`` the optimizer decays and moves an expert that nothing was learnt for."""
    monkeypatch.setattr(config, "idle_expert_grads", setting)
    layer, x = with_an_idle_expert(Guarded)
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    expected, momentum, hooked = train(layer, layer, x)
    assert len(hooked) == 3
    again, _ = with_an_idle_expert(Guarded)
    again.load_state_dict(start)
    with rewriting_backend() as backend:
        got, momentum_got, hooked_got = train(again, torch.compile(again, backend=backend), x)
    if setting == "none":
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(momentum_got, momentum)
        assert len(hooked_got) == 3
    else:
        assert len(hooked_got) == 13 and all(gradient.count_nonzero() == 0 for gradient in hooked_got[3:])
        torch.testing.assert_close(momentum_got, momentum * 0.9**10)
        assert (got - expected).abs().mean() > 1e-3


@pytest.mark.parametrize(("make", "rewritten"), [(Guarded, False), (Stacked, True), (Dense, True)])
def test_none_leaves_guarded_loops_over_separate_parameters(make, rewritten, monkeypatch):
    monkeypatch.setattr(config, "idle_expert_grads", "none")
    layer, x = with_an_idle_expert(make)
    (candidate,) = moeblaze_ops.explain(layer, x).candidates
    assert (candidate.became is not None) == rewritten and candidate.zeros == ()
    if not rewritten:
        assert "idle_expert_grads is 'none'" in candidate.reason


def test_explain_names_what_gets_zeros():
    layer, x = with_an_idle_expert(Guarded)
    text = str(moeblaze_ops.explain(layer, x))
    assert "gradients of zeros instead of None for experts without tokens: up.*.weight, down.*.weight" in text
    layer, x = with_an_idle_expert(Stacked)
    assert "instead of None" not in str(moeblaze_ops.explain(layer, x))
