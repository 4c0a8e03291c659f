"""Every expert on every token, weighted by its mask."""

import torch
import torch.nn.functional as F


def masked_sum(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def masked_inplace(self, x, weights, ids):
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(self.experts):
        share = torch.where(ids == e, weights, 0.0).sum(dim=-1)
        out += share.unsqueeze(-1) * expert(x)
    return out


def masked_add_method(self, x, weights, ids):
    out = torch.zeros(x.shape, dtype=x.dtype)
    for e, expert in enumerate(self.experts):
        out.add_(expert(x).mul(weights.masked_fill(ids != e, 0).sum(-1)[..., None]))
    return out


def masked_list_sum(self, x, weights, ids):
    mask = F.one_hot(ids, len(self.experts)).to(x.dtype)
    scores = (mask * weights.unsqueeze(-1)).sum(-2)
    return sum(scores[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


def masked_stack(self, x, weights, ids):
    scores = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype).scatter(-1, ids, weights)
    outs = torch.stack([expert(x) for expert in self.experts], dim=-2)
    return (outs * scores[..., None]).sum(dim=-2)


def masked_stack_einsum(self, x, weights, ids):
    scores = torch.einsum("tk,tke->te", weights, F.one_hot(ids, len(self.experts)).to(x.dtype))
    outs = torch.stack([expert(x) for expert in self.experts])
    return torch.einsum("te,etd->td", scores, outs)


def masked_per_slot(self, x, weights, ids):
    out = torch.zeros_like(x)
    for k in range(ids.shape[-1]):
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * weights[..., k : k + 1] * (ids[..., k] == e).unsqueeze(-1)
    return out


def masked_addcmul(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = torch.addcmul(out, expert(x), (weights * (ids == e)).sum(-1, keepdim=True))
    return out


def masked_scaled_tokens(self, x, weights, ids):
    """Embeddings or residual streams with a multiplier, and routing weights scaled in place."""
    x = x * 1.25
    weights *= 2.5
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out.addcmul_(expert(x), (weights * (ids == e)).sum(-1, keepdim=True))
    return out
