"""Loops that ask in other ways whether an expert has tokens: by ``in``, by counts in any type; and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch


def among_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if e in ids:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def not_among_ids_in_a_row(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids.eq(e)
        if e not in ids.flatten():
            continue
        token, slot = mask.nonzero(as_tuple=True)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def sum_of_floats(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.float().sum() == 0:
            continue
        token, slot = torch.where(mask)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def count_as_number(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if int(mask.long().sum()) <= 0:
            continue
        token, slot = torch.where(mask)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def number_before_count(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if 0 < (ids == e).sum().item():  # noqa: SIM300
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def count_nonzero(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if torch.count_nonzero(ids == e) == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def all_differ(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if (ids != e).all():
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def of_ids_in_a_row(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        if (ids.view(-1) == e).sum() == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


ASKED = (
    among_ids, not_among_ids_in_a_row, sum_of_floats, count_as_number, number_before_count, count_nonzero, all_differ,
    of_ids_in_a_row,
)  # fmt: skip


# Near misses.


def among_first_choices(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if e in ids[:, 0]:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def next_among_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if e + 1 in ids:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def those_without_tokens(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if 1 > (ids == e).sum().item():  # noqa: SIM300
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out + x


def any_differs(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if (ids != e).any():
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out + x


def all_equal(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if (ids == e).all():
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def number_that_becomes_a_tensor(self, x, weights, ids):
    """Of one choice each: what has no equal in a row of all ids may have one beside it."""
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        expert = self.experts[e]
        e = ids.clone().fill_(e)
        if (ids.flatten() == e[0, 0] + 1).sum() == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def mean_of_floats(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.float().mean() > 0.3:
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out + x


NEAR_MISSES = (
    among_first_choices, next_among_ids, those_without_tokens, any_differs, all_equal, number_that_becomes_a_tensor,
    mean_of_floats,
)  # fmt: skip
