"""More loops over the experts that were hit: masks in other types and axes, numbers that counts tell; and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.changed import all_changed


def one_hot_in_floating_point(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, len(self.experts)).float().permute(2, 1, 0)
    for e in range(len(self.experts)):
        slot, token = torch.where(mask[e] > 0)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def hits_in_floating_point(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).to(x.dtype).permute(2, 1, 0)
    hit = (mask.sum((-1, -2)) > 0).nonzero()
    for e in hit:
        slot, token = torch.where(mask[e].squeeze(0))
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def hit_list_of_floats(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0).type_as(x)
    hit = torch.nonzero(mask.sum(dim=(1, 2)) > 0.0).flatten().tolist()
    for e in hit:
        slot, token = torch.where(mask[e] == 1.0)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def hits_of_booleans(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).bool().permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit:
        slot, token = torch.where(mask[e[0]])
        out.index_add_(0, token, self.experts[e[0]](x[token]) * weights[token, slot, None])
    return out


def booleans_at_last(self, x, weights, ids):
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0).bool()
        hit = mask.any(-1).any(-1).nonzero()
    for e in hit:
        slot, token = torch.where(mask[e].squeeze(0))
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def any_of_two_axes(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in mask.any(dim=(-1, -2)).nonzero().flatten().tolist():
        slot, token = mask[e].nonzero(as_tuple=True)
        out[token] += self.experts[e](x[token]) * weights[token, slot, None]
    return out


def nonzero_counts(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).to(torch.int32).permute(2, 1, 0).contiguous()
    for e in torch.nonzero(mask.sum(dim=(1, 2))).squeeze(-1):
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def one_sum_after_another(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in mask.sum(-1).sum(-1).ge(1).nonzero():
        slot, token = torch.where(mask[e].squeeze(0).ne(0))
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def experts_in_the_last_axis(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts))
    hit = (mask.sum((0, 1)) > 0).nonzero().flatten()
    for e in hit.tolist():
        token, slot = torch.where(mask[..., e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def experts_in_the_middle(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(0, 2, 1)
    for e in torch.where(mask.sum(dim=2).sum(dim=0) > 0)[0].tolist():
        token, slot = torch.where(mask[:, e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def of_matrix(self, x, weights, ids):
    """Switch-style: one expert for each token, and masks [T, E]."""
    mask = F.one_hot(ids[:, 0], len(self.experts)).bool()
    hit = torch.nonzero(mask.sum(dim=0), as_tuple=True)[0].tolist()
    out = torch.zeros_like(x)
    for idx in hit:
        out[mask[:, idx]] = self.experts[idx](x[mask[:, idx]])
    return weights[:, :1] * out


def counts_that_are_not_zero(self, x, weights, ids):
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
    for e in counts.nonzero().flatten().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def counts_above_zero(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in (ids.view(-1).bincount(minlength=len(self.experts)) > 0).nonzero(as_tuple=True)[0]:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def not_among_those_in_use(self, x, weights, ids):
    out = torch.zeros_like(x)
    used = set(ids.unique().tolist())
    for e, expert in enumerate(self.experts):
        if e not in used:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def among_those_in_use(self, x, weights, ids):
    out = torch.zeros_like(x)
    used = ids.unique()
    for e, expert in enumerate(self.experts):
        if e in used:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def sums_of_floats_are_zero(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).float().permute(2, 1, 0)
    for e in range(len(self.experts)):
        if mask[e].sum() == 0:
            continue
        slot, token = torch.where(mask[e] >= 0.5)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def rows_joined_behind_a_guard(self, x, weights, ids):
    """One `index_add` of all rows."""
    rows, tokens = [], []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        rows.append(expert(x[token]) * weights[token, slot, None])
        tokens.append(token)
    return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(rows, dim=0))


def rows_joined_of_those_in_use(self, x, weights, ids):
    rows = []
    tokens = []
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        rows.append(self.experts[e](x[token]) * weights[token, slot, None])
        tokens.append(token)
    return torch.zeros_like(x).index_add(0, torch.concat(tokens), torch.concat(rows, 0))


def _stacked(self):
    """The weights of all experts, as Qwen3-VL-MoE has them: [E, D, F], [E, D, F], [E, F, D]."""
    return (torch.stack([getattr(expert, name).weight.t() for expert in self.experts]) for name in ("w1", "w3", "w2"))


def rows_of_stacked_weights(self, x, weights, ids):
    """What a hit, of shape [1], takes of the weights keeps its axis; next to tokens it takes their shape."""
    gate, up, down = _stacked(self)
    scores = torch.zeros(x.shape[0], len(self.experts)).scatter_(1, ids, weights)
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit[:]:
        with torch.no_grad():
            _, token = torch.where(mask[e[0]])
        rows = x[token]
        y = (F.silu(rows @ gate[e]) * (rows @ up[e])) @ down[e]
        out.index_add_(0, token, y[0] * scores[token, e, None])
    return out


def sums_without_gradients(self, x, weights, ids):
    """Of a mask in floating point that is made where gradients are on, as in a calibration of GPT-OSS."""
    mask = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(-1, ids, 1)
    scores = torch.zeros_like(mask).scatter_(-1, ids, weights).t()
    mask = mask.t()
    with torch.no_grad():
        hit = torch.greater(mask.sum(dim=-1), 0).nonzero()
    out = torch.zeros_like(x)
    for e in hit:
        e = e[0]
        out += self.experts[e](x * mask[e].unsqueeze(1)) * scores[e].unsqueeze(1)
    return out


HITS = (
    rows_of_stacked_weights, sums_without_gradients,
    one_hot_in_floating_point, hits_in_floating_point, hit_list_of_floats, hits_of_booleans, booleans_at_last, any_of_two_axes,
    nonzero_counts, one_sum_after_another, experts_in_the_last_axis, experts_in_the_middle, of_matrix,
    counts_that_are_not_zero, counts_above_zero, not_among_those_in_use, among_those_in_use, sums_of_floats_are_zero,
    rows_joined_behind_a_guard, rows_joined_of_those_in_use,
)  # fmt: skip


# Near misses.


def scaled_mask(self, x, weights, ids):
    """No element reaches what rows are compared with."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).float().permute(2, 1, 0) * 0.25
    for e in range(len(self.experts)):
        slot, token = torch.where(mask[e] >= 0.5)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out + x


def signed_sums(self, x, weights, ids):
    """Tokens of one expert may cancel: it is not hit then, and has them all the same."""
    out = torch.zeros_like(x)
    sign = (torch.arange(ids.shape[0]) % 2 * 2 - 1).to(x.dtype)
    mask = (F.one_hot(ids, num_classes=len(self.experts)) * sign[:, None, None]).permute(2, 1, 0)
    for e in (mask.sum((-1, -2)) > 0).nonzero():
        slot, token = torch.where(mask[e].squeeze(0))
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out + x


def sums_of_other_axes(self, x, weights, ids):
    """Slots and experts in each other's place."""
    out, ids = torch.zeros_like(x), ids.clamp(max=1)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in (mask.sum((0, 2)) > 0).nonzero().flatten().tolist():
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def first_slots_only(self, x, weights, ids):
    """What is summed over tokens has slots and experts left, of which the first coordinates are those of slots."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts))
    for e in (mask.sum(0) > 0).nonzero(as_tuple=True)[0].unique().tolist():
        token, slot = torch.where(mask[..., e])
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def more_than_one_token(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).float().permute(2, 1, 0)
    for e in (mask.sum((-1, -2)) > 1).nonzero():
        slot, token = torch.where(mask[e].squeeze(0))
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def counts_of_first_choices(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in torch.bincount(ids[:, 0], minlength=len(self.experts)).nonzero().flatten().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def used_changes_by_a_function(self, x, weights, ids):
    def leave():
        used.pop()

    out = torch.zeros_like(x)
    used = ids.unique().tolist()
    leave()
    for e, expert in enumerate(self.experts):
        if e not in used:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def compared_with_all(self, x, weights, ids):
    """Two comparisons with the same tensor, one of which is of all pairs."""
    out, others = torch.zeros_like(x), ids.flip(0)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        same = ids == others
        if not same.any():
            continue
        every = ids.unsqueeze(-1) == others.unsqueeze(1)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        out[every.any(-1).any(-1)] += 1
    return out


def means_are_joined(self, x, weights, ids):
    """A group without rows would give a row."""
    means = []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        means.append((expert(x[token]) * weights[token, slot, None]).sum(0, keepdim=True))
    return torch.cat(means).mean(0) + torch.zeros_like(x)


def joined_parts_are_counted(self, x, weights, ids):
    rows, tokens = [], []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        rows.append(expert(x[token]) * weights[token, slot, None])
        tokens.append(token)
    return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(rows)) / len(rows)


def ones_are_joined(self, x, weights, ids):
    """How many experts were hit, told by what is concatenated."""
    out, ones = torch.zeros_like(x), []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        ones.append(torch.ones(1, dtype=x.dtype))
    return out / torch.cat(ones).sum()


def joined_in_a_function(self, x, weights, ids):
    def count():
        return len(rows)

    rows, tokens = [], []
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        rows.append(expert(x[token]) * weights[token, slot, None])
        tokens.append(token)
    return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(rows)) / count()


def hits_apart_from_tokens(self, x, weights, ids):
    """With None in between, the shape of the two indices together goes in front."""
    scores = torch.zeros(x.shape[0], len(self.experts)).scatter_(1, ids, weights)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        _, token = torch.where(mask[e[0]])
        out.index_add_(0, token, self.experts[e](x[token]) * scores[token, None, e])
    return out


_CHANGED = all_changed(
    {
        # Rows of the tokens that did not choose an expert: they are none where all did.
        "zeros_of_the_mask": (sums_of_floats_are_zero, ("mask[e] >= 0.5", "mask[e] < 1")),
        "among_first_choices": (not_among_those_in_use, ("ids.unique()", "ids[:, 0].unique()")),
        "next_is_in_use": (among_those_in_use, ("ids.unique()", "set(ids.unique().tolist())"), ("if e in", "if e + 1 in")),
        # An expert is left out though it has tokens.
        "used_changes": (not_among_those_in_use, (".tolist())", ".tolist())\n    used.discard(2)")),
    }
)

NEAR_MISSES = (
    *_CHANGED.values(), scaled_mask, signed_sums, sums_of_other_axes, first_slots_only, more_than_one_token,
    counts_of_first_choices, used_changes_by_a_function, compared_with_all, means_are_joined, joined_parts_are_counted,
    ones_are_joined, joined_in_a_function,
)  # fmt: skip
TRACED = (hits_apart_from_tokens,)
