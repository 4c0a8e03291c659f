"""Losses, counts and updates that read what a router gave: they are left right, and the layer is rewritten beside them."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, compiled

E, K = zoo.E, zoo.K
_SHAPE = re.compile(r"empty_strided_cpu\(\(([\d, ]*\d)")


def one_hot_mean(probabilities, ids, logits):
    """Switch Transformer."""
    return E * (F.one_hot(ids, E).to(logits.dtype).mean((0, 1)) * probabilities.mean(0)).sum()


def one_hot_by_slot(probabilities, ids, logits):
    """transformers: the choices of each slot apart."""
    chosen = F.one_hot(ids, E).to(logits.dtype).mean(0)
    return E * (chosen * probabilities.mean(0).unsqueeze(0)).sum()


def bincount(probabilities, ids, logits):
    return E * (torch.bincount(ids.reshape(-1), minlength=E) / ids.numel() * probabilities.mean(0)).sum()


def histc(probabilities, ids, logits):
    return (torch.histc(ids.to(logits.dtype), bins=E, min=0, max=E - 1) * probabilities.mean(0)).sum()


def by_sequence(probabilities, ids, logits):
    """DeepSeek."""
    ids, probabilities = ids.view(2, -1), probabilities.view(2, -1, E)
    counts = torch.zeros(2, E, dtype=logits.dtype).scatter_add_(1, ids, torch.ones(ids.shape, dtype=logits.dtype))
    return (counts / ids.shape[1] * probabilities.mean(1)).sum(1).mean()


def z_loss(probabilities, ids, logits):
    return logits.logsumexp(-1).square().mean()


def mutual_information(probabilities, ids, logits):
    """DS-MoE: even over the tokens, sharp for each of them."""
    load = probabilities.mean(0)
    return (load * load.log()).sum() - (probabilities * probabilities.clamp(min=1e-9).log()).sum(-1).mean()


LOSSES = (one_hot_mean, one_hot_by_slot, bincount, histc, by_sequence, z_loss, mutual_information)


class Layer(nn.Module):
    def __init__(self, loss, early: bool):
        super().__init__()
        self.loss, self.early = loss, early
        self.gate = nn.Linear(zoo.D, E)
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(E))

    def forward(self, x):
        logits = self.gate(x)
        probabilities = logits.softmax(-1)
        weights, ids = probabilities.topk(K)
        loss = self.loss(probabilities, ids, logits) if self.early else None
        chosen, out = F.one_hot(ids, E).permute(2, 1, 0), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(chosen[e])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out, loss if self.early else self.loss(probabilities, ids, logits)


@pytest.mark.parametrize(("loss", "early"), [(loss, number % 2 == 0) for number, loss in enumerate(LOSSES)])
def test_losses_stay_right(fp64, loss, early):
    backend = check_against_eager(Layer(loss, early), torch.randn(12, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons
    assert not {"where", "nonzero", "index_add_"} & set(backend.operators())


class Counting(nn.Module):
    """DeepSeek-V3: the bias of the choice follows the counts, in the forward itself."""

    def __init__(self, early: bool):
        super().__init__()
        self.early = early
        self.gate = nn.Linear(zoo.D, E)
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(E))
        self.register_buffer("bias", torch.zeros(E))

    @torch.no_grad()
    def update(self, ids):
        counts = F.one_hot(ids, E).sum((0, 1)).to(self.bias.dtype)
        self.bias.add_(torch.sign(counts.mean() - counts), alpha=0.1)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(K)[1]
        weights, out = scores.gather(1, ids), torch.zeros_like(x)
        if self.early:
            self.update(ids)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        if not self.early:
            self.update(ids)
        return out


@pytest.mark.parametrize("early", [True, False])
def test_bias_that_follows_the_counts(fp64, early):
    layer, x = Counting(early), torch.randn(12, zoo.D)
    eager = copy.deepcopy(layer)
    run, backend = compiled(layer)
    for _ in range(3):
        torch.testing.assert_close(run(x), eager(x))
    torch.testing.assert_close(layer.bias, eager.bias)
    assert len(backend.rewritten) == 1 and layer.bias.any()


def test_nothing_is_as_large_as_slots_by_experts():
    """Inductor compares where it counts: no one-hot is stored."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    num_tokens = 67
    layer = Layer(lambda *routed: one_hot_mean(*routed) + one_hot_by_slot(*routed), early=True)
    run = torch.compile(layer, backend="moeblaze")
    (out, value), codes = run_and_get_code(lambda x: run(x), torch.randn(num_tokens, zoo.D))
    (out.sum() + value).backward()
    sizes = [tuple(map(int, shape.split(", "))) for code in codes for shape in _SHAPE.findall(code)]
    assert "moeblaze" in "".join(codes) and sizes
    assert max(math.prod(size) for size in sizes if E in size[1:]) < num_tokens * K * E
