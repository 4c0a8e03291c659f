"""Rows in the order of a map of who keeps whom, split by how many each expert keeps, as Megatron does it to drop tokens.

The number of an expert is compared with ids, and an index of what says which tokens have a place.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as switch
from tests.corpus.zoo.catalogue import BareMLP, D
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

E, K = 4, 2

MEGATRON = """
scores, ids = logits.topk(K, dim=1)
probs = torch.zeros_like(logits).scatter(1, ids, scores.softmax(-1))
chosen = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
places = probs.topk(C, dim=0, sorted=False)[1]
roomy = torch.zeros_like(logits).scatter(0, places, 1).bool()
kept = torch.logical_and(chosen, roomy)
probs = probs * kept
counts = kept.sum(dim=0)
by_expert = kept.T.contiguous()
token = torch.arange(T).unsqueeze(0).expand(E, -1).masked_select(by_expert)
share = probs.T.contiguous().masked_select(by_expert)
"""

SPELLINGS = {
    "by probability": (),
    "by position": ("probs.topk(C", "chosen.int().topk(C"),
    "without ids that lose their weight": ("probs = probs * kept", "probs = probs * 1"),
    "by a product": ("torch.logical_and(chosen, roomy)", "chosen & roomy"),
    "without capacity": ("kept = torch.logical_and(chosen, roomy)", "kept = chosen"),
    "of integers": ("counts = kept.sum(dim=0)", "counts = kept.int().sum(dim=0)"),
}

TWINS = {
    "as many as were chosen": ("counts = kept.sum(dim=0)", "counts = chosen.sum(dim=0)"),
    "of other experts": ("counts = kept.sum(dim=0)", "counts = kept.sum(dim=0).flip(0)"),
    "of another map": ("counts = kept.sum(dim=0)", "counts = (chosen & roomy.flip(1)).sum(dim=0)"),
    "of shifted places": ("counts = kept.sum(dim=0)", "counts = (chosen & roomy.roll(1, 0)).sum(dim=0)"),
    "shares of all": ("share = probs", "share = probs.flip(1)"),
    "tokens of other experts": ("masked_select(by_expert)\nshare", "masked_select(by_expert.flip(0))\nshare"),
    "in the order of tokens": ("by_expert = kept.T.contiguous()", "by_expert = kept.reshape(E, T)"),
    "kept by another capacity": ("roomy = torch.zeros_like(logits).scatter(0, places, 1)",
                                 "roomy = torch.zeros_like(logits).scatter(0, places.roll(1, 1), 1)"),
    "what nobody chose": ("torch.logical_and(chosen, roomy)", "torch.logical_and(~chosen, roomy)"),
    "either": ("torch.logical_and(chosen, roomy)", "torch.logical_or(chosen, roomy)"),
    "all that have room": ("kept = torch.logical_and(chosen, roomy)", "kept = roomy"),
    "one expert less": ("kept = torch.logical_and(chosen, roomy)", "kept = chosen & roomy & (torch.arange(E) != 2)"),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, gate, C):
        super().__init__()
        self.router, self.C = nn.Linear(D, E, bias=False), C
        self.experts = nn.ModuleList(BareMLP() for _ in range(E))
        namespace = {"torch": torch, "F": F, "E": E, "K": K}
        lines = "".join(f"    {line}\n" for line in gate.strip().splitlines())
        exec(f"def routed(logits, T, C):\n{lines}    return token, share, counts", namespace)
        self.routed = namespace["routed"]

    def forward(self, x):
        token, share, counts = self.routed(self.router(x), x.shape[0], self.C)
        parts = x.index_select(0, token).split(counts.tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]) * share.unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(0, token.unsqueeze(1).expand(-1, D), rows)


def _trained(layer, run, x):
    layer.zero_grad()
    own = x.clone().requires_grad_()
    out = run(own)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), own.grad, *(p.grad for p in layer.parameters())]


def check(change, T=13, factor=0.75, tied=False):
    gate = MEGATRON
    if change:
        assert gate.count(change[0]) == 1, change
        gate = gate.replace(*change)
    torch.manual_seed(T)
    layer, x = Layer(gate, math.ceil(T * K / E * factor)).double(), torch.randn(T, D, dtype=torch.float64)
    if tied:
        layer.router.weight.data[2:] = -5 * layer.router.weight.data[:2].abs()
        x = x.abs()
    torch._dynamo.reset()
    with rewriting_backend() as backend, switch.recording() as records:
        try:
            actual = _trained(layer, torch.compile(layer, backend=backend), x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                _trained(layer, layer, x)
            return 0
    torch.testing.assert_close(actual, _trained(layer, layer, x))
    return len(rewritten_in(records))


@pytest.mark.parametrize(("name", "factor"), [*zip(SPELLINGS, (0.5, 1.5) * 3, strict=True)])
def test_rows_that_are_kept(name, factor):
    assert check(SPELLINGS[name], factor=factor) == 1


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone_or_right(name):
    check(TWINS[name])


def test_experts_without_tokens_and_few_tokens():
    assert check((), tied=True) == 1
    assert check((), T=2, factor=1.0) == 1
