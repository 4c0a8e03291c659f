"""Hand-written loops over experts that are known by names, and their near-miss twins.

All are combine functions of `ModuleListMoE`, with a ``ModuleDict`` of experts: ``(self, x, weights, ids) -> out``
for x [T, D].
"""

import torch
import torch.nn.functional as F


def hit_names(self, x, weights, ids):
    """transformers' NLLB-MoE."""
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        current_state = x[None, top_x].reshape(-1, x.shape[-1])
        current = self.experts[f"expert_{expert_idx[0]}"](current_state) * weights[top_x, idx, None]
        out.index_add_(0, top_x, current.to(x.dtype))
    return out


def hit_list(self, x, weights, ids):
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=True)[0]
    for idx in expert_hit.tolist():
        expert = self.experts[f"expert_{idx}"]
        slot, token = torch.where(expert_mask[idx])
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def present_names(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in torch.unique(ids).tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, getattr(self.experts, f"expert_{e}")(x[token]) * weights[token, slot, None])
    return out


def masks_in_the_last_axis(self, x, weights, ids):
    """Switch-style: one expert for each token of a batch."""
    x = x.view(2, -1, x.shape[-1])
    router_mask = F.one_hot(ids[:, 0], len(self.experts)).view(*x.shape[:2], -1).bool()
    next_states = torch.zeros_like(x)
    for idx in range(len(self.experts)):
        if router_mask[:, :, idx].any():
            expert = self.experts[f"expert_{idx}"]
            next_states[router_mask[:, :, idx]] = expert(x[router_mask[:, :, idx]])
    return (weights[:, :1].view(*x.shape[:2], 1) * next_states).view(-1, x.shape[-1])


def masks_of_each_expert(self, x, weights, ids):
    router_mask = F.one_hot(ids[:, 0], len(self.experts))
    out = torch.zeros_like(x)
    for idx, (_name, expert) in enumerate(self.experts.items()):
        token_indices = router_mask[..., idx].bool()
        if torch.any(token_indices):
            out[token_indices] = expert(x[token_indices])
    return weights[:, :1] * out


NAMED = (hit_names, hit_list, present_names, masks_in_the_last_axis, masks_of_each_expert)


# Near misses.


def next_mask(self, x, weights, ids):
    """The condition is about another column than the rows."""
    router_mask = F.one_hot(ids[:, 0], len(self.experts) + 1).bool()
    out = torch.zeros_like(x)
    for idx in range(len(self.experts)):
        if router_mask[:, idx + 1].any():
            out[router_mask[:, idx]] = self.experts[f"expert_{idx}"](x[router_mask[:, idx]])
    return weights[:, :1] * out


def row_of_a_mask(self, x, weights, ids):
    """The condition is about a token."""
    router_mask = F.one_hot(ids[:, 0], len(self.experts)).bool()
    router_mask[:, 1] = False
    out = torch.zeros_like(x)
    for idx in range(len(self.experts)):
        if router_mask[idx].any():
            out[router_mask[:, idx]] = self.experts[f"expert_{idx}"](x[router_mask[:, idx]])
    return weights[:, :1] * out


def next_name(self, x, weights, ids):
    """A name that no expert has, for the last expert: who asks for all names asks for it."""
    out = torch.zeros_like(x)
    ids = ids.clamp(max=len(self.experts) - 2)
    for e in torch.unique(ids).tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[f"expert_{e + 1}"](x[token]) * weights[token, slot, None])
    return out


def name_of_a_tensor(self, x, weights, ids):
    """What a tensor is called is not what its number is called."""
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for expert_idx in torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero():
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        name = f"expert_{expert_idx}" if f"expert_{expert_idx}" in self.experts else "expert_0"
        out.index_add_(0, top_x, self.experts[name](x[top_x]) * weights[top_x, idx, None])
    return out


NEAR_MISSES = (next_mask, row_of_a_mask, next_name, name_of_a_tensor)
