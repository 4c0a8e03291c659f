"""Hand-written loops over the experts whose numbers occur among the ids, and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F


def unique_numbers(self, x, weights, ids):
    """Tutorials: a loop over a tensor's elements."""
    out = torch.zeros_like(x)
    for e in ids.unique():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def unique_list(self, x, weights, ids):
    out = torch.zeros_like(x)
    used = torch.unique(ids).tolist()
    for e in used:
        mask = ids == e
        token, slot = mask.nonzero(as_tuple=True)
        out[token] += self.experts[e](x[token]) * weights[token, slot].unsqueeze(-1)
    return out


def unique_of_a_view(self, x, weights, ids):
    flat_ids = ids.view(-1)
    rows = x.repeat_interleave(ids.shape[1], dim=0)
    y = torch.empty_like(rows)
    for e in torch.unique(flat_ids, sorted=True):
        index = int(e)
        mask = flat_ids == e
        y[mask] = self.experts[index](rows[mask])
    return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def set_of_numbers(self, x, weights, ids):
    out = torch.zeros_like(x)
    flat = ids.flatten().tolist()
    for e in sorted(set(flat)):
        chosen = (ids == e).any(dim=-1)
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out[chosen] += self.experts[e](x[chosen]) * share[chosen]
    return out


def set_in_the_header(self, x, weights, ids):
    out = torch.zeros_like(x)
    for expert_id in set(ids.reshape(-1).cpu().tolist()):
        expert = self.experts[expert_id]
        mask = ids.eq(expert_id)
        if not mask.any():
            continue
        token, slot = torch.where(mask)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def unique_items(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in torch.unique(ids):
        e = e.item()
        hits = (ids == e).nonzero()
        token, slot = hits[:, 0], hits[:, 1]
        out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def unique_in_each_slot(self, x, weights, ids):
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        chosen = ids[:, k]
        for e in chosen.unique():
            mask = chosen == e
            out[mask] += weights[mask, k].unsqueeze(-1) * self.experts[e](x[mask])
    return out


def unique_without_gradients(self, x, weights, ids):
    out = torch.zeros_like(x)
    with torch.no_grad():
        used = ids.unique()
    for e in used.cpu().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def unique_among_one_hot(self, x, weights, ids):
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for expert_idx in torch.unique(ids):
        slot, token = torch.where(expert_mask[expert_idx])
        y = self.experts[expert_idx](x[None, token].reshape(-1, x.shape[-1])) * weights[token, slot, None]
        out.index_add_(0, token, y.to(x.dtype))
    return out


PRESENT = (
    unique_numbers, unique_list, unique_of_a_view, unique_items, unique_in_each_slot, unique_without_gradients,
    unique_among_one_hot,
)  # fmt: skip
DROPPED = (set_of_numbers, set_in_the_header)
"""A set of Python's, of numbers of all ids: compiled as written."""


# Near misses.


def every_id(self, x, weights, ids):
    """A number comes as often as it occurs."""
    out = torch.zeros_like(x)
    for e in ids.flatten().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def runs_of_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.flatten().unique_consecutive().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def unique_of_first_choices(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids[:, 0].unique():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def all_but_the_lowest(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique()[1:]:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def minus_one_is_the_last(self, x, weights, ids):
    """An id that is no number of an expert, and names one all the same."""
    ids = ids.masked_fill(ids == 2, -1)
    out = torch.zeros_like(x)
    for e in ids.unique():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def written_before(self, x, weights, ids):
    ids = ids.clone()
    ids[:, 0] -= 1
    out = torch.zeros_like(x)
    for e in ids.unique():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def written_inside(self, x, weights, ids):
    """The numbers are those of before."""
    out, ids = torch.zeros_like(x), ids.clone()
    for e in ids.unique():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        ids.clamp_(min=1)
    return out


def number_is_a_weight(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * (e + 1))
    return out


def rounds_are_counted(self, x, weights, ids):
    out, used = torch.zeros_like(x), 0
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        used += 1
    return out * used


def experts_in_order_of_use(self, x, weights, ids):
    out = torch.zeros_like(x)
    for i, e in enumerate(ids.unique()):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[i](x[token]) * weights[token, slot, None])
    return out


def one_number_less(self, x, weights, ids):
    out = torch.zeros_like(x)
    used = sorted(set(ids.flatten().tolist()))
    used.remove(used[0])
    for e in used:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def one_number_less_by_another_name(self, x, weights, ids):
    out = torch.zeros_like(x)
    used = ids.unique().tolist()
    left = used
    left.pop()
    for e in used:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def one_number_less_by_a_function(self, x, weights, ids):
    def drop():
        used.pop()

    out = torch.zeros_like(x)
    used = ids.unique().tolist()
    drop()
    for e in used:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def tensor_in_a_set(self, x, weights, ids):
    """A tensor is in no set of numbers, whatever its number."""
    out, scale = torch.zeros_like(x), 1
    for e in ids.unique():
        token, slot = torch.where(ids == e)
        if e in {2}:
            scale = 3
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out * scale


def tensor_in_a_set_of_sentinels(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique():
        if e in {0, 1, 2, 3}:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def one_hot_of_other_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in torch.unique(ids[:, 0]).tolist():
        slot, token = torch.where(expert_mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def one_hot_by_slot(self, x, weights, ids):
    """The axis that is indexed is that of the slots."""
    out, chosen = torch.zeros_like(x), ids.clamp(max=1)
    mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(1, 2, 0)
    for e in chosen.unique().tolist():
        expert, token = torch.where(mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, e, None])
    return out


def one_hot_changes(self, x, weights, ids):
    """Tokens of the next expert, whether it was hit or not."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts) + 1).permute(2, 1, 0)
    for e in ids.unique().tolist():
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        mask[e + 1] = 1
    return out


def next_numbers(self, x, weights, ids):
    """What is empty is not the group that the loop leaves out."""
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == (e + 1) % len(self.experts))
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


NEAR_MISSES = (
    every_id, runs_of_ids, unique_of_first_choices, all_but_the_lowest, minus_one_is_the_last, written_before,
    written_inside, number_is_a_weight, rounds_are_counted, experts_in_order_of_use, next_numbers,
    one_number_less, one_number_less_by_another_name, one_number_less_by_a_function,
    one_hot_of_other_ids, one_hot_by_slot, one_hot_changes,
)  # fmt: skip
TRACED = (tensor_in_a_set, tensor_in_a_set_of_sentinels)


def numbers_are_counted(self, x, weights, ids):
    """Dynamo breaks the graph where they come to the host, and goes on with numbers that it guards."""
    used = ids.unique().tolist()
    out = torch.zeros_like(x)
    for e in used:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out / len(used)
