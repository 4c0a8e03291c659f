"""Layers of the simplest spellings, and models of several of them: what is asked of names, counts and bytes."""

import torch
from torch import nn
from torch.nn import functional as F


class Dense(nn.Module):
    """Every expert on every token; experts are modules of modules."""

    def __init__(self, D=16, hidden=32, E=4, activation=F.silu):
        super().__init__()
        self.router, self.activation = nn.Linear(D, E, bias=False), activation
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(D, hidden, bias=False)) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(hidden, D, bias=False) for _ in range(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            weight = (weights * (chosen == e)).sum(dim=-1, keepdim=True)
            out = out + weight * self.down[e](self.activation(self.up[e](x)))
        return out


class Guarded(nn.Module):
    """Experts without tokens are skipped: their parameters get no gradient."""

    def __init__(self, D=16, hidden=32, E=4):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, hidden, bias=False) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(hidden, D, bias=False) for _ in range(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, slot, None])
        return out


class Blocks(nn.Module):
    def __init__(self, make=Dense, count=3, breaks=False):
        super().__init__()
        self.layers, self.breaks = nn.ModuleList(make() for _ in range(count)), breaks

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class Branching(Guarded):
    """Skips more than experts without tokens."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(chosen == e)
            if token.numel() > 1:
                out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, slot, None])
        return out
