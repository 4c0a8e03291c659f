"""Loops over experts that had tokens at another time: ids are changed in between, through an alias that no source shows.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D]. What they compute depends on
the old hits, so that a loop over all experts is another function.
"""

from collections import namedtuple

import torch
import torch.nn.functional as F


def _flat(ids):
    return ids.view(-1)


def _others(ids):
    """Ids that have experts which ``ids`` may not have."""
    return (ids + 1) % 4


def _loop(self, x, weights, ids, hit):
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def by_a_helper(self, x, weights, ids):
    ids = ids.clone()
    flat = _flat(ids)
    hit = ids.unique()
    flat.copy_(_others(ids).view(-1))
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def listed_by_a_helper(self, x, weights, ids):
    ids = ids.clone()
    flat = _flat(ids)
    hit = ids.unique().tolist()
    flat.copy_(_others(ids).view(-1))
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def by_a_dict(self, x, weights, ids):
    ids = ids.clone()
    kept = {"ids": ids.view(-1)}
    hit = ids.unique().tolist()
    kept["ids"].copy_(_others(ids).view(-1))
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def by_a_namedtuple(self, x, weights, ids):
    ids = ids.clone()
    kept = namedtuple("Kept", "ids")(ids.view(-1))
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
    kept.ids.copy_(_others(ids).view(-1))
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e[0])
        out.index_add_(0, token, self.experts[e[0]](x[token]) * weights[token, slot, None])
    return out


def by_a_closure(self, x, weights, ids):
    ids = ids.clone()
    def swap():
        flat.copy_(_others(ids).view(-1))

    flat = ids.view(-1)
    hit = ids.unique()
    swap()
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def by_a_lambda(self, x, weights, ids):
    ids = ids.clone()
    swap = lambda: ids.copy_(_others(ids))  # noqa: E731
    hit = ids.unique()
    swap()
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def by_a_lambda_in_the_loop(self, x, weights, ids):
    ids = ids.clone()
    swap = lambda: ids.copy_(_others(ids))  # noqa: E731
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        swap()
    return out


def counts_by_a_helper(self, x, weights, ids):
    ids = ids.clone()
    flat = _flat(ids)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
    flat.copy_(_others(ids).view(-1))
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def counts_by_a_lambda(self, x, weights, ids):
    ids = ids.clone()
    swap = lambda: ids.copy_(_others(ids))  # noqa: E731
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    swap()
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if counts[e] > 0:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def present_by_a_helper(self, x, weights, ids):
    ids = ids.clone()
    flat = _flat(ids)
    used = set(ids.unique().tolist())
    flat.copy_(_others(ids).view(-1))
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if e not in used:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def hits_are_written(self, x, weights, ids):
    """The numbers themselves are changed."""
    hit = ids.unique()
    hit.fill_(1)
    out = torch.zeros_like(x)
    for e in hit:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def rows_are_counted(self, x, weights, ids):
    """How many rounds there were is part of the result."""
    out, rounds = torch.zeros_like(x), 0
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        rounds += 1
    return out * rounds


def last_is_read(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out * (e + 1)


def numbered(self, x, weights, ids):
    """Rounds are numbered, experts are not."""
    out = torch.zeros_like(x)
    for i, e in enumerate(ids.unique().tolist()):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[i](x[token]) * weights[token, slot, None])
    return out


def stops_early(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        if e >= 1:
            break
    return out


def first_slots_only(self, x, weights, ids):
    """Experts that no token has first are left out."""
    out = torch.zeros_like(x)
    for e in ids[:, 0].unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def expert_draws_an_iterator(self, x, weights, ids):
    out, drawn = torch.zeros_like(x), iter(self.experts)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, next(drawn)(x[token]) * weights[token, slot, None])
    return out


STALE = (
    by_a_helper, listed_by_a_helper, by_a_dict, by_a_namedtuple, by_a_closure, by_a_lambda, by_a_lambda_in_the_loop,
    counts_by_a_helper, counts_by_a_lambda, present_by_a_helper, hits_are_written, rows_are_counted, last_is_read, numbered,
    stops_early, first_slots_only, expert_draws_an_iterator,
)  # fmt: skip


# Layers all the same.


def in_a_helper(self, x, weights, ids):
    return _loop(self, x, weights, ids, ids.unique())


def in_a_helper_of_numbers(self, x, weights, ids):
    return _loop(self, x, weights, ids, _flat(ids).unique().tolist())


def copied_before(self, x, weights, ids):
    """The loop compares with what the hits are of; what they were taken from is changed."""
    ids = ids.clone()
    mine = ids.clone()
    hit = ids.unique()
    ids.copy_(_others(ids))
    return _loop(self, x, weights, mine, hit)


def body_in_a_lambda(self, x, weights, ids):
    out = torch.zeros_like(x)
    add = lambda e, token, slot: out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])  # noqa: E731
    for e in ids.unique():
        add(e, *torch.where(ids == e))
    return out


LAYERS = (in_a_helper_of_numbers, in_a_helper, copied_before, body_in_a_lambda)
