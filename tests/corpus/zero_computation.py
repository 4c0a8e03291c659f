"""Layers some of whose experts compute nothing: they give the token, zeros, or a learned vector (LongCat-Flash, MoE++)."""

from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo

Z = 3
"""Experts without projections, beside ``zoo.E`` with projections."""


class Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(zoo.D))

    def forward(self, x):
        return self.vector.expand_as(x)


class Frozen(Constant):
    def __init__(self):
        super().__init__()
        self.vector.requires_grad_(False)


class Mixture(nn.Module):
    """The constant expert of MoE++: the token and a vector, in shares that depend on the token."""

    def __init__(self):
        super().__init__()
        self.vector, self.share = nn.Parameter(torch.randn(zoo.D)), nn.Linear(zoo.D, 2, bias=False)

    def forward(self, x):
        shares = self.share(x).softmax(-1)
        return shares[:, 0:1] * x + shares[:, 1:2] * self.vector


KINDS = {"identity": nn.Identity, "zero": Zero, "constant": Constant, "frozen": Frozen, "mixture": Mixture}


def dense(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def dense_in_place(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def dense_stack(self, x, weights, ids):
    scores = weights.new_zeros(len(x), len(self.experts)).scatter(1, ids, weights)
    return (scores.unsqueeze(-1) * torch.stack([expert(x) for expert in self.experts], 1)).sum(1)


def dense_slots(self, x, weights, ids):
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights[:, k] * (ids[:, k] == e)).unsqueeze(-1)
    return out


def loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
    return out


def loop_on_residual(self, x, weights, ids):
    out = x.sin()
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def loop_weights_on_input(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token] * weights[token, slot, None]))
    return out


def loop_unweighted(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]))
    return out * weights.sum(-1, keepdim=True)


def guarded(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def guarded_mask(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.any():
            token, slot = mask.nonzero(as_tuple=True)
            out[token] += expert(x[token]) * weights[token, slot, None]
    return out


def hits(self, x, weights, ids):
    """The loop of transformers."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[int(e)])
        out.index_add_(0, token, self.experts[int(e)](x[token]) * weights[token, slot, None])
    return out


def unique_hits(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def sorted_rows(self, x, weights, ids):
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(self.experts))
    rows = x[order // ids.shape[1]].split(counts.tolist())
    y = torch.cat([expert(own) for expert, own in zip(self.experts, rows, strict=True)])
    return torch.zeros_like(x).index_add_(0, order // ids.shape[1], y * weights.flatten()[order, None])


ON_TRUST = (guarded, guarded_mask, hits, unique_hits, sorted_rows)
"""Spellings with branches on data, or numbers on the host."""


def places(special: list, others: list) -> dict[str, list]:
    """Where experts without projections may stand among the others."""
    half = len(others) // 2
    mixed = chain(special[:1], others[:half], special[1:2], others[half:], special[2:])
    return {"behind": others + special, "in front": special + others, "mixed": list(mixed)}


class Layer(nn.Module):
    """A norm, a router over all experts, and these: ``kinds`` names the kind of each without projections."""

    def __init__(self, combine, kinds: tuple[str, ...], place: str = "behind", K: int = 3, expert=zoo.BareMLP):
        super().__init__()
        special, others = [KINDS[kind]() for kind in kinds], [expert() for _ in range(zoo.E)]
        self.experts = nn.ModuleList(places(special, others)[place])
        self.router, self.gain = zoo.Router(len(self.experts), K), nn.Parameter(torch.randn(zoo.D))
        self.combine = combine

    def forward(self, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        return self.combine(self, x, *self.router(x))
