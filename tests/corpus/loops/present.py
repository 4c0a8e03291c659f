"""Hand-written loops over the experts whose numbers occur among the ids, and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.changed import changed


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


_BEGIN = "out = torch.zeros_like(x)\n"
_LOOP = "    for e in ids.unique()"
_RETURN = "    return out"
_CHANGES = {
    "every_id": (("ids.unique()", "ids.flatten().tolist()"),),  # a number comes as often as it occurs
    "runs_of_ids": (("ids.unique()", "ids.flatten().unique_consecutive().tolist()"),),
    "unique_of_first_choices": (("ids.unique()", "ids[:, 0].unique()"),),
    "all_but_the_lowest": (("ids.unique()", "ids.unique()[1:]"),),
    "minus_one_is_the_last": (  # an id that is no number of an expert, and names one all the same
        (_BEGIN, f"ids = ids.masked_fill(ids == 2, -1)\n    {_BEGIN}"),
    ),
    "written_before": ((_BEGIN, f"ids = ids.clone()\n    ids[:, 0] -= 1\n    {_BEGIN}"),),
    "written_inside": (  # the numbers are those of before
        (_BEGIN, "out, ids = torch.zeros_like(x), ids.clone()\n"), (_RETURN, "        ids.clamp_(min=1)\n    return out"),
    ),
    "number_is_a_weight": (("None])", "None] * (e + 1))"),),
    "rounds_are_counted": (
        ("ids.unique()", "ids.unique().tolist()"), (_BEGIN, "out, used = torch.zeros_like(x), 0\n"),
        (_RETURN, "        used += 1\n    return out * used"),
    ),
    "experts_in_order_of_use": (("for e in ids.unique()", "for i, e in enumerate(ids.unique())"), ("experts[e]", "experts[i]")),
    "next_numbers": (  # what is empty is not the group that the loop leaves out
        ("ids.unique()", "ids.unique().tolist()"), ("ids == e", "ids == (e + 1) % len(self.experts)"),
    ),
    "one_number_less": (
        (_LOOP, "    used = sorted(set(ids.flatten().tolist()))\n    used.remove(used[0])\n    for e in used"),
    ),
    "one_number_less_by_another_name": (
        (_LOOP, "    used = ids.unique().tolist()\n    left = used\n    left.pop()\n    for e in used"),
    ),
    "one_number_less_by_a_function": (
        (_BEGIN, f"def drop():\n        used.pop()\n\n    {_BEGIN}"),
        (_LOOP, "    used = ids.unique().tolist()\n    drop()\n    for e in used"),
    ),
    "tensor_in_a_set": (  # a tensor is in no set of numbers, whatever its number
        (_BEGIN, "out, scale = torch.zeros_like(x), 1\n"),
        ("        out.index", "        if e in {2}:\n            scale = 3\n        out.index"),
        (_RETURN, "    return out * scale"),
    ),
    "tensor_in_a_set_of_sentinels": (("        token", "        if e in {0, 1, 2, 3}:\n            continue\n        token"),),
}  # fmt: skip
TWINS = {name: changed(unique_numbers, *changes, name=name) for name, changes in _CHANGES.items()}
TRACED = (TWINS.pop("tensor_in_a_set"), TWINS.pop("tensor_in_a_set_of_sentinels"))
NEAR_MISSES = (*TWINS.values(), one_hot_of_other_ids, one_hot_by_slot, one_hot_changes)


def numbers_are_counted(self, x, weights, ids):
    """Dynamo breaks the graph where they come to the host, and goes on with numbers that it guards."""
    used = ids.unique().tolist()
    out = torch.zeros_like(x)
    for e in used:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out / len(used)
