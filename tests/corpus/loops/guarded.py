"""Hand-written loops over experts that skip those without tokens, and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.changed import all_changed

# Guards.


def if_any(self, x, weights, ids):
    """Tutorials."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.any():
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def if_any_rows(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        chosen = (ids == e).any(dim=-1)
        if chosen.any():
            expert_input = x[chosen]
            share = (weights * (ids == e)).sum(-1)
            out[chosen] += expert(expert_input) * share[chosen].unsqueeze(1)
    return out


def if_flat_any(self, x, weights, ids):
    """makeMoE."""
    scores = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter(-1, ids, weights)
    out = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        expert_mask = (ids == i).any(dim=-1)
        flat_mask = expert_mask.view(-1)
        if flat_mask.any():
            expert_input = x[flat_mask]
            expert_output = expert(expert_input)
            gating = scores[flat_mask, i].unsqueeze(1)
            weighted = expert_output * gating
            out[expert_mask] += weighted.squeeze(1)
    return out


def numel_continue(self, x, weights, ids):
    """HiDream."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        current = x[token]
        out[token] += weights[token, slot, None] * expert(current)
    return out


def shape_continue(self, x, weights, ids):
    """Old Mixtral."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in range(len(self.experts)):
        idx, top_x = torch.where(mask[e])
        if top_x.shape[0] == 0:
            continue
        current_state = x[None, top_x].reshape(-1, x.shape[-1])
        current_hidden_states = self.experts[e](current_state) * weights[top_x, idx, None]
        out.index_add_(0, top_x, current_hidden_states.to(x.dtype))
    return out


def not_any_continue(self, x, weights, ids):
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if not torch.any(mask):
            continue
        hits = mask.nonzero()
        token, slot = hits[:, 0], hits[:, 1]
        out = out.index_add(0, token, expert(x.index_select(0, token)) * weights[token, slot].unsqueeze(1))
    return out


def len_positive(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token) > 0:
            y = expert(x[token])
            y = y * weights[token, slot].unsqueeze(-1)
            out[token] = out[token] + y
    return out


def count_is_not_zero(self, x, weights, ids):
    out, counts = torch.zeros_like(x), torch.bincount(ids.flatten(), minlength=len(self.experts))
    for e, expert in enumerate(self.experts):
        if counts[e] != 0:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def sum_is_zero(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.sum() == 0:
            continue
        token, slot = torch.where(mask)
        y = expert(x[token]) * weights[token, slot, None]
        out.index_add_(0, token, y)
    return out


def gathered_size(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        tokens = x[token]
        if tokens.size(0) > 0:
            result = expert(tokens)
            result *= weights[token, slot, None]
            out.index_add_(dim=0, index=token, source=result)
    return out


def any_item(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids.eq(e)
        if not mask.any().item():
            continue
        token, slot = mask.nonzero(as_tuple=True)
        out.index_add_(0, token, expert(x[token]).mul(weights[token, slot, None]))
    return out


# Loops over the experts that were hit.


def hit_rows(self, x, weights, ids):
    """transformers' "eager" experts, with a class for sentinels."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=len(self.experts) + 1)
        mask = mask.permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in hit:
        expert_idx = expert_idx[0]
        if expert_idx == len(self.experts):
            continue
        slot, token = torch.where(mask[expert_idx])
        y = self.experts[expert_idx](x[token])
        y = y * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def hit_rows_squeezed(self, x, weights, ids):
    """transformers 4.50's Mixtral."""
    out = torch.zeros_like(x)
    expert_mask = torch.nn.functional.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_layer = self.experts[expert_idx]
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        current_state = x[None, top_x].reshape(-1, x.shape[-1])
        current = expert_layer(current_state) * weights[top_x, idx, None]
        out.index_add_(0, top_x, current.to(x.dtype))
    return out


def hit_ids(self, x, weights, ids):
    """Nemotron-H: numbers, and a guard on top."""
    out = torch.zeros_like(x, dtype=weights.dtype)
    with torch.no_grad():
        expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        expert_hit = (expert_mask.sum(dim=(-1, -2)) > 0).nonzero().squeeze(-1)
    for expert_idx in expert_hit:
        expert_idx = expert_idx.item()
        slot, token = torch.where(expert_mask[expert_idx])
        if token.numel() == 0:
            continue
        y = self.experts[expert_idx](x[token])
        out.index_add_(0, token, y * weights[token, slot, None])
    return out.to(x.dtype)


def slots_by_division(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        slots = torch.where(ids.flatten() == e)[0]
        if slots.numel() == 0:
            continue
        token = slots // ids.shape[1]
        out.index_add_(0, token, expert(x[token]) * weights.flatten()[slots, None])
    return out


def slots_by_function(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        slots = (ids.flatten() == e).nonzero(as_tuple=True)[0]
        if len(slots) > 0:
            token = torch.div(slots, ids.shape[1], rounding_mode="floor").long()
            out[token] += expert(x[token]) * weights.flatten()[slots, None]
    return out


def slots_of_turned_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        slots = (ids.t().flatten() == e).nonzero(as_tuple=True)[0]
        if slots.shape[0]:
            token = slots % ids.shape[0]
            out.index_add_(0, token, expert(x[token]) * weights.t().flatten()[slots, None])
    return out


def positive_share(self, x, weights, ids):
    """The rows are those whose score is not zero, of scores that were divided by their sum."""
    weights = weights / weights.sum(dim=-1, keepdim=True)
    scores = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(1, ids, weights)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = scores[:, e] > 0
        if mask.any():
            out[mask] += scores[mask, e].unsqueeze(-1) * expert(x[mask])
    return out


def all_behind_one_guard(self, x, weights, ids):
    """That no expert has a token says so of each."""
    out = torch.zeros_like(x)
    if F.one_hot(ids, len(self.experts)).any():
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def counts_beside(self, x, weights, ids):
    """How many tokens each expert has is noted in a tensor, where none is zero."""
    out, counts = torch.zeros_like(x), x.new_zeros(len(self.experts))
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
            out[mask] += expert(x[mask]) * share[mask]
            counts[e] += mask.sum()
    return out * counts.max()


GUARDED = (
    all_behind_one_guard, positive_share, counts_beside, slots_by_division, slots_by_function, slots_of_turned_ids,
    if_any, if_any_rows, if_flat_any, numel_continue, shape_continue, not_any_continue, len_positive, sum_is_zero,
    count_is_not_zero, gathered_size, any_item, hit_rows, hit_rows_squeezed, hit_ids,
)  # fmt: skip


# Near misses: what is skipped is not nothing, or the condition says something else.


def counts_experts(self, x, weights, ids):
    out, used = torch.zeros_like(x), 0
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        used += 1
    return out * used


def collects_in_an_expression(self, x, weights, ids):
    """The list is made here, so that nothing outside sees the write."""
    out, seen = torch.zeros_like(x), []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        unused = seen.append(e)  # noqa: F841
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out * len(seen)


def _skipped(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def _hit(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        e = e[0]
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


_BEGIN = "out = torch.zeros_like(x)\n"
_NO_ROWS = "if token.numel() == 0:\n            continue\n"
_IF_ANY = "        if mask.any():\n            token, slot = torch.where(mask)\n"
_RETURN = "    return out"
_CHANGES = {
    "else_branch": (if_any, (_RETURN, "        else:\n            out = out + 1.0\n    return out")),
    "other_mask": (if_any, ("if mask.any()", "if (ids == e + 1).any()")),  # the condition is about the next expert
    "changes_the_mask": (  # the mask that is asked is not the one that selected
        if_any,
        (_IF_ANY, "        token, slot = torch.where(mask)\n        mask.logical_and_(ids > 0)\n        if mask.any():\n"),
    ),
    "reads_the_count": (
        if_any, (_BEGIN, "out, total = torch.zeros_like(x), 0\n"),
        ("if mask.any()", "count = int(mask.sum())\n        if count > 0"),
        (_RETURN, "            total += count * (e + 1)\n    return out * total"),
    ),
    "bias_to_all_rows": (_skipped, (_RETURN, "        out += 0.5\n    return out")),
    "counts_on_the_module": (_skipped, (_RETURN, "        self.calls += 1\n    return out")),
    "breaks": (_skipped, ("continue", "break")),
    "more_than_two": (_skipped, (_NO_ROWS, "if token.numel() > 2:\n    ")),
    "any_of_indices": (_skipped, (_NO_ROWS, "if token.any():\n    ")),  # false for token 0 alone, which is not nothing
    "keeps_the_last": (
        _skipped, (_BEGIN, "out, last = torch.zeros_like(x), x.sum()\n"),
        (_RETURN, "        last = x.mean() * e\n    return out + last"),
    ),
    "collects": (
        _skipped, (_BEGIN, "out, seen = torch.zeros_like(x), []\n"),
        (_RETURN, "        seen.append(e)\n    return out * len(seen)"),
    ),
    "next_of_an_iterator": (
        _skipped, (_BEGIN, "out, experts = torch.zeros_like(x), iter(self.experts)\n"),
        ("for e, expert in enumerate(self.experts)", "for e in range(len(self.experts))"),
        ("        out.index", "        expert = next(experts)\n        out.index"),
    ),
    "a_longer_list": (_skipped, (_RETURN, "        out[token.tolist() + [0]] += 1\n    return out")),  # longer than its parts
    "a_sum_is_there_without_rows": (
        slots_by_division,
        (_RETURN, "        out.index_add_(0, (slots.sum() % x.shape[0]).view(1), torch.ones_like(x[:1]))\n    return out"),
    ),
    "share_of_one_slot": (  # of two slots with one expert one is stored
        positive_share, ("    scores =", "    ids = ids // 2\n    scores ="),
    ),
    "count_is_not_one": (count_is_not_zero, ("!= 0", "!= 1")),
    "some_behind_one_guard": (all_behind_one_guard, ("len(self.experts)).any", "len(self.experts))[..., 1:].any")),
    "share_of_one_at_least": (positive_share, ("if mask.any()", "if scores[:, e].sum() >= 1")),
    "counts_one_more": (counts_beside, ("+= mask.sum()", "+= mask.sum() + 1")),
    "counts_for_another": (counts_beside, ("counts[e] +=", "counts[0] =")),
    "share_of_the_next": (positive_share, ("if mask.any()", "if (scores[:, e - 1] > 0).any()")),
    "hit_counted": (
        _hit, (_BEGIN, "out, hits = torch.zeros_like(x), 0\n"), (_RETURN, "        hits = hits + 1\n    return out * hits"),
    ),
    "hit_more_than_once": (_hit, (")), 0)", ")), 1)")),
    "hit_then_break": (_hit, ("        slot", "        if e == 2:\n            break\n        slot")),
    "hit_as_number": (_hit, ("None])", "None] * (e + 1))")),  # the variable is part of the result, as a tensor
}  # fmt: skip
NEAR_MISSES = (counts_experts, *all_changed(_CHANGES).values())
