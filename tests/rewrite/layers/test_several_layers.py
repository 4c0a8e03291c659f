"""Several layers in one graph, and what stands between them: attention, norms, streams that mix, products of two sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.matcher import Matcher, view_of
from moeblaze_ops.lowering.statement.certify import refusal
from tests.corpus.zoo.masked import masked_sum
from tests.corpus.zoo.modules import D, ModuleListMoE
from tests.tools.rewrite_harness import check_against_eager

STREAMS = 2
pytestmark = pytest.mark.usefixtures("scratch", "fp64")


def balanced(scores: Tensor, steps: int) -> Tensor:
    """Rows and columns that sum to one, nearly."""
    matrix = scores.exp()
    for _ in range(steps):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-6)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-6)
    return matrix


class Streams(nn.Module):
    """Mixtures of streams go through layers; what a layer gives is added to each stream by a number of its own."""

    def __init__(self, steps: int = 1, num_layers: int = 2, after=lambda y: y):
        super().__init__()
        self.layers = nn.ModuleList(ModuleListMoE(masked_sum) for _ in range(num_layers))
        self.mix = nn.ModuleList(nn.Linear(STREAMS * D, STREAMS * (STREAMS + 2)) for _ in range(num_layers))
        self.steps, self.after = steps, after

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-2).expand(*x.shape[:-1], STREAMS, D)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            before, after, between = mix(x.flatten(-2)).split([STREAMS, STREAMS, STREAMS**2], dim=-1)
            between = balanced(between.unflatten(-1, (STREAMS, STREAMS)), self.steps)
            y = self.after(layer(torch.tanh((before.sigmoid().unsqueeze(-1) * x).sum(-2))))
            x = 2.0 * after.sigmoid().unsqueeze(-1) * y.unsqueeze(-2) + between.transpose(-1, -2) @ x
        return x.sum(-2)


def test_layers_between_streams():
    rewriting = check_against_eager(Streams(), torch.randn(7, D))
    assert len(rewriting.rewritten) == 2 and not rewriting.reasons


def test_what_becomes_of_a_layer_is_not_the_layer():
    """A norm of each expert's output is none of the layer, one of their sum is behind it."""
    module = Streams(after=lambda y: y / y.norm(dim=-1, keepdim=True))
    assert len(check_against_eager(module, torch.randn(7, D)).rewritten) == 2
    for layer in module.layers:
        layer.combine = normed_experts
    assert not check_against_eager(module, torch.randn(7, D)).rewritten


def normed_experts(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        y = expert(x)
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * y / y.norm(dim=-1, keepdim=True)
    return out


def test_size_of_a_proof_does_not_grow_with_the_steps_of_a_normalisation():
    assert proof_size(12) < 1.5 * proof_size(6)


def proof_size(steps: int) -> int:
    """How many expressions it takes to find the layers."""
    graphs = []
    run = torch.compile(Streams(steps), backend=lambda gm, inputs: graphs.append(gm) or gm.forward, fullgraph=True)
    run(torch.randn(7, D))
    matcher = Matcher(view_of(graphs[0].graph), refusal)
    assert sum(isinstance(result, MoEMatch) for result in matcher.matches()) == 2
    return len(matcher._algebra._pool)


class Renormalised(nn.Module):
    """A layer of tokens that were normalised over and over."""

    def __init__(self):
        super().__init__()
        self.layer = ModuleListMoE(masked_sum)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = x / (x * x).sum(-1, keepdim=True).sqrt()
        return self.layer(x)


def test_layer_behind_many_normalisations():
    assert len(check_against_eager(Renormalised(), torch.randn(7, D)).rewritten) == 1


class Block(nn.Module):
    """A decoder layer: attention with rotated queries, norms by hand, a residual around each half."""

    def __init__(self, combine=masked_sum):
        super().__init__()
        self.qkv, self.norm = nn.Linear(D, 3 * D), nn.Parameter(torch.rand(2, D) + 0.5)
        self.layer = ModuleListMoE(combine)
        self.layer.router = SigmoidRouter()

    def normed(self, x: Tensor, i: int) -> Tensor:
        return self.norm[i] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.normed(x, 0)).chunk(3, dim=-1)
        q, k = rotated(q), rotated(k)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.layer(self.normed(x, 1))


class SigmoidRouter(nn.Module):
    """Scores are chosen by a gather and divided by their sum."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        ids = scores.topk(2, dim=-1).indices
        weights = scores.gather(-1, ids)
        weights /= weights.sum(-1, keepdim=True)
        return weights, ids


def rotated(x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(x.shape[0], dtype=x.dtype), 0.1 ** torch.arange(D // 2)).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_layers_of_a_decoder(num_blocks):
    module = nn.Sequential(*(Block() for _ in range(num_blocks)))
    rewriting = check_against_eager(module, torch.randn(7, D))
    assert len(rewriting.rewritten) == num_blocks and not rewriting.reasons


def test_layer_of_a_decoder_that_is_none():
    """The others are rewritten all the same."""
    module = nn.Sequential(Block(), Block(normed_experts), Block())
    assert len(check_against_eager(module, torch.randn(7, D)).rewritten) == 2


class ProductOfTwo(nn.Module):
    """Scores between tokens of a residual: a product of two sums that both hold a layer."""

    def __init__(self):
        super().__init__()
        self.layer = ModuleListMoE(masked_sum)
        self.other = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.other(x) + self.layer(x)
        return 0.25 * (h @ h.T) + torch.ones(len(x), len(x))


def test_product_of_two_sums_of_experts():
    assert len(check_against_eager(ProductOfTwo(), torch.randn(7, D)).rewritten) == 1
