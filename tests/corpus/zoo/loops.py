"""A loop over experts that selects the tokens of each."""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.modules import flat


def loop_mixtral(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, len(self.experts)).permute(2, 1, 0)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(mask[e])
        current = x[None, token].reshape(-1, x.shape[-1])
        out.index_add_(0, token, expert(current) * weights[token, slot, None])
    return out.reshape(shape)


def loop_mistral(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out[token] += weights[token, slot, None] * expert(x[token])
    return out.view(shape)


def loop_nonzero(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(self.experts):
        hits = (ids == e).nonzero()
        token, slot = hits[:, 0], hits[:, 1]
        out = out.index_add(0, token, expert(x.index_select(0, token)) * weights[token, slot].unsqueeze(1))
    return out.view(shape)


def loop_dense_scores(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(-1)
        token = (ids == e).any(dim=-1).nonzero(as_tuple=True)[0]
        out.index_add_(0, token, expert(x[token]) * share[token].unsqueeze(-1))
    return out.view(shape)


def loop_boolean_mask(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(-1)
        share = (weights * (ids == e).to(weights.dtype)).sum(-1, keepdim=True)
        out[mask] += expert(x[mask]) * share[mask]
    return out.view(shape)


def loop_deepseek(self, x, weights, ids):
    """The weights are read off the scores at the chosen experts."""
    shape = x.shape
    scores = self.router.gate(x.reshape(-1, x.shape[-1])).sigmoid()
    x, weights, ids = flat(x, weights, ids)
    weights = scores.gather(-1, ids)
    weights /= weights.sum(dim=-1, keepdim=True)
    weights *= 2.5
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        out[token] += self.experts[e](x[token]) * weights[token, slot, None]
    return out.view(shape)


def loop_litgpt(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    masks = ids.unsqueeze(-1) == torch.arange(len(self.experts))
    out = torch.zeros_like(x)
    for mask, expert in zip(masks.permute(2, 0, 1), self.experts, strict=True):
        token, slot = torch.where(mask)
        out[token] += weights[token, slot, None] * expert(x[token])
    return out.view(shape)


def loop_flat_mask(self, x, weights, ids):
    """makeMoE: rows by a flattened mask, written back by the mask itself."""
    scores = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype).scatter(-1, ids, weights)
    rows, scores = x.reshape(-1, x.shape[-1]), scores.view(-1, len(self.experts))
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        flat_mask = mask.view(-1)
        out[mask] += expert(rows[flat_mask]) * scores[flat_mask, e].unsqueeze(1)
    return out


def loop_joined_slots(self, x, weights, ids):
    """Phi-MoE: a tensor of each slot, put together."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    weights, ids = (torch.cat(t.split(1, dim=-1), dim=-1) for t in (weights, ids))
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out.view(shape)


def loop_slots(self, x, weights, ids):
    """minimind: rows of tokens beside rows of slots."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        token = mask.any(dim=-1).nonzero().flatten()
        out.index_add_(0, token, expert(x[token]) * weights[mask].view(-1, 1))
    return out.view(shape)


def loop_scatter_add(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        y = expert(x.index_select(0, token)) * weights[token, slot].unsqueeze(-1)
        out = out.scatter_add(0, token.unsqueeze(-1).expand(-1, x.shape[-1]), y)
    return out.view(shape)


def loop_minimind(self, x, weights, ids):
    """Every slot has a row of its own, which its expert stores."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    rows, chosen = x.repeat_interleave(ids.shape[-1], dim=0), ids.view(-1)
    y = torch.empty_like(rows)
    for e, expert in enumerate(self.experts):
        y[chosen == e] = expert(rows[chosen == e])
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).view(shape)


def loop_switch(self, x, weights, ids):
    """One expert for each token, stored and then weighted."""
    shape = x.shape
    x, weights, ids = flat(x, weights[..., :1], ids[..., 0].unsqueeze(-1))
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token = torch.where(ids[:, 0] == e)[0]
        out[token] = expert(x[token])
    return (out * weights).view(shape)


# Of stacked parameters: one spelling per storage.


def ellipsis_loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        gate, up = (torch.einsum("...d,df->...f", x, w[e]) for w in (self.w1, self.w3))
        y = torch.einsum("...f,fd->...d", gate * torch.sigmoid(gate) * up, self.w2[e])
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def stacked_loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        y = (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def stacked_linear_loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, (w1, w3, w2) in enumerate(zip(self.w1.unbind(0), self.w3.unbind(0), self.w2.unbind(0), strict=True)):
        y = F.linear(F.gelu(F.linear(x, w1), approximate="tanh") * F.linear(x, w3), w2)
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def packed_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ self.gate_up[e]).chunk(2, dim=-1)
        out.index_add_(0, token, ((up * F.silu(gate)) @ self.down[e]) * weights[token, slot, None])
    return out.reshape(shape)


def gpt_oss_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        h = x[token] @ self.gate_up[e] + self.gate_up_bias[e]
        gate, up = h[..., ::2], h[..., 1::2]
        gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
        y = ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ self.down[e] + self.down_bias[e]
        out.index_add_(0, token, y * weights[token, slot, None])
    return out.reshape(shape)


def weighted_bias_loop(self, x, weights, ids):
    """NeMo Automodel's: the weight multiplies what stands between the projections, and the bias behind them."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ self.gate_up[e] + self.gate_up_bias[e]).chunk(2, dim=-1)
        share = weights[token, slot, None]
        y = (F.silu(gate) * up * share) @ self.down[e] + self.down_bias[e] * share
        out.scatter_add_(0, token[:, None].expand(-1, x.shape[-1]), y)
    return out.reshape(shape)


def dbrx_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    w1, v1, w2 = (w.chunk(self.E, dim=0) for w in (self.w1, self.v1, self.w2))
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        y = (F.silu(x[token] @ w1[e].t()) * (x[token] @ v1[e].t())) @ w2[e]
        out.index_add_(0, token, y * weights[token, slot, None])
    return out.reshape(shape)
