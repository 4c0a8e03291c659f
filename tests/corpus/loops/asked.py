"""Loops that ask in other ways whether an expert has tokens: by ``in``, by counts in any type; and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch

from tests.corpus.zoo.changed import all_changed


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


def count_nonzero(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if torch.count_nonzero(ids == e) == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


_ASKS, _COUNTS = "e in ids:", "torch.count_nonzero(ids == e) == 0"

_ASKED = all_changed(
    {
        "count_as_number": (sum_of_floats, ("mask.float().sum() == 0", "int(mask.long().sum()) <= 0")),
        "number_before_count": (among_ids, (_ASKS, "0 < (ids == e).sum().item():")),
        "all_differ": (count_nonzero, (_COUNTS, "(ids != e).all()")),
        "of_ids_in_a_row": (
            count_nonzero, (_COUNTS, "(ids.view(-1) == e).sum() == 0"), ("expert(", "self.experts[e]("),
            ("e, expert in enumerate(self.experts)", "e in range(len(self.experts))"),
        ),
    }
)  # fmt: skip

ASKED = (among_ids, not_among_ids_in_a_row, sum_of_floats, count_nonzero, *_ASKED.values())


# Near misses.


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


_OTHERS = all_changed(
    {
        "among_first_choices": (among_ids, (_ASKS, "e in ids[:, 0]:")),
        "next_among_ids": (among_ids, (_ASKS, "e + 1 in ids:")),
        "those_without_tokens": (among_ids, (_ASKS, "1 > (ids == e).sum().item():"), ("return out", "return out + x")),
        "any_differs": (count_nonzero, (_COUNTS, "(ids != e).any()"), ("return out", "return out + x")),
        "all_equal": (count_nonzero, (_COUNTS, "(ids == e).all()")),
    }
)

NEAR_MISSES = (*_OTHERS.values(), number_that_becomes_a_tensor, mean_of_floats)
