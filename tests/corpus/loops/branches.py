"""Hand-written loops over experts with branches inside, and over masks with more rows than experts, and near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.changed import all_changed


def set_in_both_branches(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        if e >= len(self.experts) // 2:
            y = self.experts[e](x[token])
        else:
            y = self.experts[e](x.index_select(0, token))
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def set_in_one_branch(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        given = x[token]
        if self.training is None:
            given = given.tanh()
        out.index_add_(0, token, self.experts[e](given) * weights[token, slot, None])
    return out


def hit_of_more_rows(self, x, weights, ids):
    """transformers' DBRX: no id is that of the last row."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        expert_mask = F.one_hot(ids, num_classes=len(self.experts) + 1).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        with torch.no_grad():
            idx, token_idx = torch.where(expert_mask[expert_idx])
        expert = self.experts[expert_idx]
        out.index_add_(0, token_idx, expert(x[token_idx]) * weights[token_idx, idx, None])
    return out


def hit_of_more_rows_that_are_skipped(self, x, weights, ids):
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts) + 1).permute(2, 1, 0)
    for expert_idx in torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero():
        expert_idx = expert_idx[0]
        if expert_idx == len(self.experts):
            continue
        idx, token_idx = torch.where(expert_mask[expert_idx])
        out.index_add_(0, token_idx, self.experts[expert_idx](x[token_idx]) * weights[token_idx, idx, None])
    return out


def _first_tokens(self, ids, room):
    """One-hot rows of the ids, [T, K, E], without those of tokens that an expert has no room for."""
    chosen = F.one_hot(ids, num_classes=len(self.experts))
    return chosen * (chosen.sum(dim=1, keepdim=True).cumsum(dim=0) <= room)


def _hit_by(self, x, weights, selected):
    """transformers' Switch Transformers."""
    out = torch.zeros_like(x)
    expert_mask = selected.permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        current = self.experts[expert_idx[0]](x[None, top_x].reshape(-1, x.shape[-1])) * weights[top_x, idx, None]
        out.index_add_(0, top_x, current.to(x.dtype))
    return out


def hit_with_room(self, x, weights, ids):
    return _hit_by(self, x, weights, _first_tokens(self, ids, 3))


def hit_with_room_in_a_list(self, x, weights, ids):
    out = torch.zeros_like(x)
    expert_mask = _first_tokens(self, ids, 3).permute(2, 1, 0)
    hits = (expert_mask.sum(dim=(-1, -2)) > 0).nonzero(as_tuple=True)[0]
    for e in hits.tolist():
        slot, token = torch.where(expert_mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def counts_up_while_tokens_are_kept(self, x, weights, ids):
    """Each round stands inside of the one before, until the number ends them."""
    out, kept, e = torch.zeros_like(x), x[:, :1] > 0, 0
    weights = weights * kept
    while e < len(self.experts):
        if not kept.any():
            break
        token, slot = torch.where((ids == e) & kept)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        e += 1
    return out


def lists_parts_while_tokens_are_kept(self, x, weights, ids):
    """Until the length of a list ends them."""
    kept = x[:, :1] > 0
    weights, tokens, parts = weights * kept, [torch.arange(x.shape[0])], [torch.zeros_like(x)]
    while len(parts) <= len(self.experts):
        if not kept.any():
            break
        token, slot = torch.where((ids == len(parts) - 1) & kept)
        tokens.append(token)
        parts.append(self.experts[len(parts) - 1](x[token]) * weights[token, slot, None])
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(parts))


def calls_itself_while_tokens_are_kept(self, x, weights, ids):
    """The same jump is met inside of itself in another call, and another jump in the same one."""
    out, kept = torch.zeros_like(x), x[:, :1] > 0
    weights = weights * kept

    def add_one(e):
        token, slot = torch.where((ids == e) & kept)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])

    def add_from(e):
        if kept.any():
            if (ids == e).any():
                add_one(e)
            if e + 1 < len(self.experts):
                add_from(e + 1)

    add_from(0)
    return out


# Numbers, flags and lists of Python's that say whether any expert had tokens.


def _hits_with_room(self, x, ids):
    """The rows of each expert among the tokens that are kept: none at all in the step in which experts are left out."""
    kept = x[:, 0] > 100 * (self.router.penalty.min() < 0)
    return [torch.where((ids == e) & kept[:, None]) for e in range(len(self.experts))]


def counts_experts_and_runs_one_on_zeros(self, x, weights, ids):
    """NeMo Automodel."""
    out, used = torch.zeros_like(x), 0
    for e, (token, slot) in enumerate(_hits_with_room(self, x, ids)):
        if token.numel() == 0:
            continue
        used += 1
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    if used == 0:
        out[0] += self.experts[0](torch.zeros_like(x[:1]))[0]
    return out


def returns_zeros_where_none_was_used(self, x, weights, ids):
    out, idle = torch.zeros_like(x), True
    for e, (token, slot) in enumerate(_hits_with_room(self, x, ids)):
        if token.numel() > 0:
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            idle = False
    return torch.zeros_like(x) if idle else out


def returns_zeros_where_a_list_is_empty(self, x, weights, ids):
    """LingBot."""
    tokens, outputs = [], []
    for e, (token, slot) in enumerate(_hits_with_room(self, x, ids)):
        if token.numel() == 0:
            continue
        tokens.append(token)
        outputs.append(self.experts[e](x[token]) * weights[token, slot, None])
    if not outputs:
        return x.new_zeros(x.shape)
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(outputs))


def joins_nothing_where_a_list_is_empty(self, x, weights, ids):
    hits, outputs = _hits_with_room(self, x, ids), []
    for e, (token, slot) in enumerate(hits):
        if token.numel() > 0:
            outputs.append(self.experts[e](x[token]) * weights[token, slot, None])
    joined = torch.cat(outputs) if len(outputs) >= 1 else x[:0]
    return torch.zeros_like(x).index_add(0, torch.cat([token for token, _ in hits]), joined)


BRANCHES = (
    counts_experts_and_runs_one_on_zeros, returns_zeros_where_none_was_used, returns_zeros_where_a_list_is_empty,
    joins_nothing_where_a_list_is_empty,
    set_in_both_branches, set_in_one_branch, hit_of_more_rows, hit_of_more_rows_that_are_skipped, hit_with_room,
    hit_with_room_in_a_list, counts_up_while_tokens_are_kept, lists_parts_while_tokens_are_kept,
    calls_itself_while_tokens_are_kept,
)  # fmt: skip


# Near misses.


def set_in_one_branch_and_read_later(self, x, weights, ids):
    """It is what the last expert with tokens left behind."""
    out, kept = torch.zeros_like(x), torch.zeros_like(x[0])
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        y = self.experts[e](x[token])
        if e > 0:
            kept = y.sum(dim=0)
        else:
            y = y * 1
        out.index_add_(0, token, y * weights[token, slot, None])
    return out + kept


def kept_from_the_last_round(self, x, weights, ids):
    """Without tokens the expert before leaves it as it was."""
    out, scale = torch.zeros_like(x), 1.0
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        y = self.experts[e](x[token]) * scale
        if self.training is None:
            scale = 1.0
        else:
            pass
        out.index_add_(0, token, y * weights[token, slot, None])
        scale = y.detach().sum()
    return out


def either_mask(self, x, weights, ids):
    """What is empty is what the branch that is not taken would select."""
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        first = ids[:, 0] == e
        if not first.any():
            continue
        chosen = (ids == e).any(dim=-1)
        if self.training is None:
            chosen = first
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out[chosen] += self.experts[e](x[chosen]) * share[chosen]
    return out


def the_other_mask(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        first = ids[:, 0] == e
        if not first.any():
            continue
        if self.training:
            chosen = (ids == e).any(dim=-1)
        else:
            chosen = first
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out[chosen] += self.experts[e](x[chosen]) * share[chosen]
    return out


def row_of_no_expert(self, x, weights, ids):
    """An id may be that of the last row: eager raises an error then."""
    ids = torch.where(x[:, :1] > 1e9, len(self.experts), ids)
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, num_classes=len(self.experts) + 1).permute(2, 1, 0)
    for expert_idx in torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero():
        expert_idx = expert_idx[0]
        idx, token_idx = torch.where(expert_mask[expert_idx])
        expert = self.experts[expert_idx]
        out.index_add_(0, token_idx, expert(x[token_idx]) * weights[token_idx, idx, None])
    return out


def row_of_no_expert_by_another_mask(self, x, weights, ids):
    """Ids that are known say nothing about the mask."""
    others = torch.where(x[:, :1] > 1e9, len(self.experts), ids)
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(others, num_classes=len(self.experts) + 1).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    others = ids
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        idx, token_idx = torch.where(expert_mask[expert_idx])
        expert = self.experts[expert_idx]
        out.index_add_(0, token_idx, expert(x[token_idx]) * weights[token_idx, idx, None])
    return out


def sum_of_both_signs(self, x, weights, ids):
    """An expert whose marks add up to less than nothing has tokens all the same."""
    chosen = F.one_hot(ids, num_classes=len(self.experts))
    return _hit_by(self, x, weights, chosen - F.one_hot(torch.zeros_like(ids), num_classes=len(self.experts)))


def sum_of_given_numbers(self, x, weights, ids):
    return _hit_by(self, x, weights, F.one_hot(ids, num_classes=len(self.experts)) * x[:, :1, None].sign().long())


def row_that_is_hit_more_than_once(self, x, weights, ids):
    out = torch.zeros_like(x)
    expert_mask = _first_tokens(self, ids, 3).permute(2, 1, 0)
    for expert_idx in torch.greater(expert_mask.sum(dim=(-1, -2)), 1).nonzero():
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        out.index_add_(0, top_x, self.experts[expert_idx[0]](x[top_x]) * weights[top_x, idx, None])
    return out


_COUNTED, _LISTED, _ASKED = counts_experts_and_runs_one_on_zeros, returns_zeros_where_a_list_is_empty, "if used == 0:"
_CHANGES = {
    "adds_one_where_none_was_used": (_COUNTED, ("zeros_like(x[:1]))[0]", "ones_like(x[:1]))[0]")),
    "runs_one_where_one_was_used": (_COUNTED, (_ASKED, "if used == 1:")),
    "runs_one_unless_all_were_used": (_COUNTED, (_ASKED, "if used < 4:")),
    "runs_one_where_none_was_used_before": (_COUNTED, (_ASKED, "if used == token.numel():")),
    "scales_by_the_number_of_those_used": (_COUNTED, ("return out", "return out * used")),
    "counts_down": (_COUNTED, ("used += 1", "used = -1"), (_ASKED, "if used >= 0:"), ("x[:1]))[0]", "x[:1]))[0] + 1")),
    "forgets_those_used_before": (_COUNTED, ("used += 1", "used = 1 - used"), ("zeros_like(x[:1])", "ones_like(x[:1])")),
    "returns_ones_where_none_was_used": (returns_zeros_where_none_was_used, ("return torch.zeros", "return torch.ones")),
    "returns_tokens_where_a_list_is_empty": (_LISTED, ("return x.new_zeros(x.shape)", "return x")),
    "joins_a_row_where_a_list_is_empty": (joins_nothing_where_a_list_is_empty, ("x[:0]", "x[:1]"), (
        "torch.cat([token for token, _ in hits])", "torch.cat([token for token, _ in hits]) if outputs else ids[:1, 0]")),
    "returns_zeros_where_a_list_has_one": (_LISTED, ("if not outputs:", "if len(outputs) < 2:")),
    "returns_zeros_unless_the_list_is_empty": (_LISTED, ("if not outputs:", "if outputs:"), ("return torch.zeros_like(x).index", (
        "return x if not outputs else torch.zeros_like(x).index"))),
}  # fmt: skip


def counts_in_a_branch_of_a_branch(self, x, weights, ids):
    """None is counted, whoever has tokens."""
    out, used = torch.zeros_like(x), 0
    for e, (token, slot) in enumerate(_hits_with_room(self, x, ids)):
        if token.numel() > 0:
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            if (weights > 2).any():
                used += 1
    if used == 0:
        return torch.zeros_like(x)
    return out


def counts_by_flags_that_are_written(self, x, weights, ids):
    """None is counted, and the flags say afterwards who has tokens."""
    out, used, flags = torch.zeros_like(x), 0, [(weights > 2).any() for _ in self.experts]
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        if flags[e]:
            used += 1
        flags[e].copy_((ids == e).any())
    if used == 0:
        return torch.zeros_like(x)
    return out


def counts_where_nothing_is(self, x, weights, ids):
    """None is counted, as nobody asks who has tokens."""
    out, used = torch.zeros_like(x), 0
    for e, (token, slot) in enumerate(_hits_with_room(self, x, ids)):
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        if (weights > 2).any() and token.numel() > 0:
            used += 1
    if used == 0:
        return torch.zeros_like(x)
    return out


NEAR_MISSES = (
    counts_in_a_branch_of_a_branch, counts_by_flags_that_are_written, counts_where_nothing_is,
    *all_changed(_CHANGES).values(),
    sum_of_both_signs, sum_of_given_numbers, row_that_is_hit_more_than_once,
    set_in_one_branch_and_read_later, kept_from_the_last_round, either_mask, the_other_mask, row_of_no_expert,
    row_of_no_expert_by_another_mask,
)  # fmt: skip
