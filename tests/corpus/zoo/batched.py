"""Weights gathered per token, and every expert on every token in one batched product."""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.modules import FF, flat


def gathered_einsum(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    gate = F.silu(torch.einsum("td,tkfd->tkf", x, self.w1[ids]))
    up = torch.einsum("td,tkfd->tkf", x, self.w3[ids])
    y = torch.einsum("tkf,tkdf->tkd", gate * up, self.w2[ids])
    return torch.einsum("tkd,tk->td", y, weights).view(shape)


def gathered_bmm(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    top_k = ids.shape[-1]
    rows = x.repeat_interleave(top_k, dim=0)
    expert_ids = ids.reshape(-1)
    h = torch.bmm(self.gate_up[expert_ids], rows.unsqueeze(-1)).squeeze(-1)
    gate, up = h.chunk(2, dim=-1)
    y = torch.bmm(self.down[expert_ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    y = y * weights.reshape(-1, 1)
    return y.view(x.shape[0], top_k, -1).sum(dim=1).view(shape)


def gathered_gpt_oss(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    h = torch.einsum("beck,bk->bec", self.gate_up[ids, ...], x) + self.gate_up_bias[ids, ...]
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    y = torch.einsum("beck,bek->bec", self.down[ids, ...], h) + self.down_bias[ids, ...]
    return torch.einsum("bec,be->bc", y, weights).view(shape)


def gathered_per_slot(self, x, weights, ids):
    out = 0
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    for k in range(ids.shape[1]):
        w1, w3, w2 = self.w1[ids[:, k]], self.w3[ids[:, k]], self.w2[ids[:, k]]
        h = F.silu(x.unsqueeze(1) @ w1.mT) * (x.unsqueeze(1) @ w3.mT)
        out = out + (h @ w2.mT).squeeze(1) * weights[:, k, None]
    return out.view(shape)


def dense_einsum(self, x, weights, ids):
    scores = torch.zeros(*x.shape[:-1], self.E, dtype=x.dtype).scatter_(-1, ids, weights)
    lead = "bt"[-(x.dim() - 1) :]
    h = F.silu(torch.einsum(f"{lead}d,edf->{lead}ef", x, self.w1)) * torch.einsum(f"{lead}d,edf->{lead}ef", x, self.w3)
    y = torch.einsum(f"{lead}ef,efd->{lead}ed", h, self.w2)
    return (y * scores.unsqueeze(-1)).sum(-2)


def dense_bmm(self, x, weights, ids):
    """Old gpt-oss evaluation: tokens repeated per expert, batched products, weighted by scattered scores."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    rows = x.repeat(self.E, 1).view(self.E, -1, x.shape[-1])
    h = torch.bmm(rows, self.gate_up) + self.gate_up_bias[..., None, :]
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    y = torch.bmm((up + 1) * (gate * torch.sigmoid(gate * 1.702)), self.down) + self.down_bias[..., None, :]
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter_(1, ids, weights)
    y = y.view(self.E, x.shape[0], -1) * scores.transpose(0, 1).view(self.E, -1)[..., None]
    return y.sum(dim=0).view(shape)


def dense_llama4(self, x, weights, ids):
    """Llama 4: the score multiplies the expert's input; unselected scores are zero."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter_(1, ids, weights).transpose(0, 1)
    rows = x.repeat(self.E, 1) * scores.reshape(-1, 1)
    h = torch.bmm(rows.view(self.E, -1, x.shape[-1]), self.gate_up)
    gate, up = h.chunk(2, dim=-1)
    y = torch.bmm(up * F.silu(gate), self.down).view(-1, x.shape[-1])
    return y.reshape(self.E, -1, x.shape[-1]).sum(dim=0).view(shape)


def gathered_rows(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    w1, v1, w2 = (w.view(self.E, FF, -1)[ids] for w in (self.w1, self.v1, self.w2))
    h = F.silu(torch.einsum("td,tkfd->tkf", x, w1)) * torch.einsum("td,tkfd->tkf", x, v1)
    return (torch.einsum("tkf,tkfd->tkd", h, w2) * weights.unsqueeze(-1)).sum(1).view(shape)


def dense_modules(self, x, weights, ids):
    """Separate experts, stacked for one product of all."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    w1, w3, w2 = (torch.stack([getattr(mlp, name).weight for mlp in self.experts]).mT for name in ("w1", "w3", "w2"))
    rows = x.repeat(len(self.experts), 1).view(len(self.experts), *x.shape)
    y = torch.bmm(F.silu(torch.bmm(rows, w1)) * torch.bmm(rows, w3), w2)
    scores = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(1, ids, weights)
    return (y * scores.t().unsqueeze(-1)).sum(0).view(shape)


def dense_then_gather(self, x, weights, ids):
    """The outputs of all experts, of which each token reads those of its own."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    y = torch.stack([expert(x) for expert in self.experts], dim=1)
    y = y.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return (y * weights.unsqueeze(-1)).sum(1).view(shape)


def dense_then_index(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    y = torch.stack([expert(x) for expert in self.experts])
    return torch.einsum("tkd,tk->td", y[ids, torch.arange(x.shape[0])[:, None]], weights).view(shape)


def dense_buffer(self, x, weights, ids):
    """The outputs of all experts, stored one after another."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    y = torch.zeros(x.shape[0], len(self.experts), x.shape[-1], dtype=x.dtype)
    for e, expert in enumerate(self.experts):
        y[:, e, :] = expert(x)
    y = y.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return torch.bmm(weights.unsqueeze(1), y).squeeze(1).view(shape)


def dense_cat(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    y = torch.cat([expert(x).unsqueeze(1) for expert in self.experts], dim=1)
    scores = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(1, ids, weights)
    return torch.einsum("te,ted->td", scores, y).view(shape)
