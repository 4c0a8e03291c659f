"""Hand-written loops over experts that index with lists of tokens, and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F


def lists_of_tokens(self, x, weights, ids):
    """transformers 4.36's Mixtral."""
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for expert_idx in range(len(self.experts)):
        expert_layer = self.experts[expert_idx]
        idx, top_x = torch.where(expert_mask[expert_idx])
        if top_x.shape[0] == 0:
            continue
        top_x_list = top_x.tolist()
        idx_list = idx.tolist()
        current_state = x[None, top_x_list].reshape(-1, x.shape[-1])
        current = expert_layer(current_state) * weights[top_x_list, idx_list, None]
        out.index_add_(0, top_x, current.to(x.dtype))
    return out


def lists_in_place(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        hits = (ids == e).nonzero()
        token, slot = hits[:, 0], hits[:, 1]
        if len(token) > 0:
            out[token.tolist()] += expert(x[token.cpu().tolist()]) * weights[token.tolist(), slot.tolist(), None]
    return out


def length_of_a_list(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        tokens = token.tolist()
        if len(tokens) == 0:
            continue
        out[tokens] = out[tokens] + expert(x[tokens]) * weights[tokens, slot].unsqueeze(-1)
    return out


LISTS = (lists_of_tokens, lists_in_place, length_of_a_list)


# Near misses.


def list_is_summed(self, x, weights, ids):
    out, total = torch.zeros_like(x), 0
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        tokens = token.tolist()
        total = total + sum(tokens)
        out.index_add_(0, token, expert(x[tokens]) * weights[tokens, slot, None])
    return out * total


def list_is_reversed(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        tokens = token.tolist()
        tokens.reverse()
        out.index_add_(0, token, expert(x[tokens]) * weights[token, slot, None])
    return out


def list_of_before(self, x, weights, ids):
    """The tensor changes after it was copied."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        tokens = token.tolist()
        token.sub_(1)
        out.index_add_(0, token % x.shape[0], expert(x[tokens]) * weights[tokens, slot, None])
    return out


NEAR_MISSES = (list_is_summed, list_is_reversed, list_of_before)


def list_of_pairs(self, x, weights, ids):
    """Lists in a list are one index for each axis, until torch changes that; rows of a tensor are not."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        hits = (ids == e).nonzero().t()
        if hits.numel() == 0:
            continue
        token = hits[0]
        pairs = hits.tolist()
        out.index_add_(0, token, expert(x[token]) * weights[pairs].unsqueeze(-1))
    return out
