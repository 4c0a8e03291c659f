"""A loop over experts that keeps their rows in lists, joined once behind it."""

import torch

from tests.corpus.zoo.modules import flat


def joined_index_add(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    tokens, outs = [], []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        tokens.append(token)
        outs.append(expert(x[token]) * weights[token, slot, None])
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(outs)).view(shape)


def joined_weights(self, x, weights, ids):
    """Weights are joined, too, and multiplied once."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    tokens, outs, shares = [], [], []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        tokens.append(token)
        outs.append(expert(x[token]))
        shares.append(weights[token, slot])
    token = torch.cat(tokens).unsqueeze(-1).expand(-1, x.shape[-1])
    return torch.zeros_like(x).scatter_add(0, token, torch.cat(outs) * torch.cat(shares)[:, None]).view(shape)


def joined_hits(self, x, weights, ids):
    """Weights are read at the joined tokens and slots."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    hits = [(ids == e).nonzero() for e in range(len(self.experts))]
    y = torch.cat([expert(x[hit[:, 0]]) for expert, hit in zip(self.experts, hits, strict=True)])
    hits = torch.cat(hits)
    y = y * weights[hits[:, 0], hits[:, 1]].unsqueeze(-1)
    return torch.zeros_like(x).index_put((hits[:, 0],), y, accumulate=True).view(shape)


def joined_slots(self, x, weights, ids):
    """Rows of slots, each stored once."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    slots, outs = [], []
    for e, expert in enumerate(self.experts):
        slot = (ids.reshape(-1) == e).nonzero().squeeze(-1)
        slots.append(slot)
        outs.append(expert(x[slot // ids.shape[1]]))
    y = x.new_zeros(ids.numel(), x.shape[-1]).index_copy(0, torch.cat(slots), torch.cat(outs))
    return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1).view(shape)


def joined_unsort(self, x, weights, ids):
    """Rows of slots, reordered by the inverse of the permutation that joined them."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    slots, outs = [], []
    for e, expert in enumerate(self.experts):
        slot = (ids.reshape(-1) == e).nonzero().squeeze(-1)
        slots.append(slot)
        outs.append(expert(x[slot // ids.shape[1]]))
    y = torch.cat(outs).index_select(0, torch.cat(slots).argsort())
    return (y.view(*ids.shape, x.shape[-1]) * weights.unsqueeze(-1)).sum(1).view(shape)


def joined_inverse(self, x, weights, ids):
    """The inverse permutation is stored, and the rows are weighted before it."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    slots = [torch.where(ids.reshape(-1) == e)[0] for e in range(len(self.experts))]
    y = torch.cat([expert(x[slot // ids.shape[1]]) for expert, slot in zip(self.experts, slots, strict=True)])
    order = torch.cat(slots)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    y = (y * weights.reshape(-1)[order, None])[inverse]
    return y.view(*ids.shape, x.shape[-1]).sum(1).view(shape)
