"""Loops over experts that had tokens at another time: ids are changed in between, through an alias that no source shows.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D]. What they compute depends on
the old hits, so that a loop over all experts is another function.
"""

from collections import namedtuple

import torch
import torch.nn.functional as F

from tests.corpus.zoo.changed import all_changed


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


def _over_hits(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


_IDS = "flat = _flat(ids)\n"
_SWAP = "flat.copy_(_others(ids).view(-1))\n"
_LAMBDA = (_IDS, "swap = lambda: ids.copy_(_others(ids))\n"), (_SWAP, "swap()\n")
_BEGIN = "out = torch.zeros_like(x)\n"
_RETURN = "    return out"
_CHANGES = {
    "listed_by_a_helper": (by_a_helper, ("unique()", "unique().tolist()")),
    "by_a_dict": (
        by_a_helper, ("unique()", "unique().tolist()"), ("flat = _flat(ids)", 'kept = {"ids": ids.view(-1)}'),
        ("flat.copy_", 'kept["ids"].copy_'),
    ),
    "by_a_closure": (by_a_helper, (_SWAP, "swap()\n"), (_IDS, f"flat = ids.view(-1)\n    def swap():\n        {_SWAP}")),
    "by_a_lambda": (by_a_helper, *_LAMBDA),
    "counts_by_a_lambda": (counts_by_a_helper, *_LAMBDA, ("self.experts))\n", "self.experts)).tolist()\n")),
    "present_by_a_helper": (
        counts_by_a_helper, ("counts[e] == 0", "e not in used"),
        ("counts = torch.bincount(ids.flatten(), minlength=len(self.experts))", "used = set(ids.unique().tolist())"),
    ),
    "hits_are_written": (  # the numbers themselves are changed
        _over_hits, ("    for e in ids.unique().tolist()", "    hit = ids.unique()\n    hit.fill_(1)\n    for e in hit"),
    ),
    "rows_are_counted": (  # how many rounds there were is part of the result
        _over_hits, (_BEGIN, "out, rounds = torch.zeros_like(x), 0\n"), (_RETURN, "        rounds += 1\n    return out * rounds"),
    ),
    "last_is_read": (_over_hits, (_RETURN, "    return out * (e + 1)")),
    "numbered": (  # rounds are numbered, experts are not
        _over_hits, ("for e in", "for i, e in enumerate("), ("tolist():", "tolist()):"), ("experts[e]", "experts[i]"),
    ),
    "stops_early": (_over_hits, (_RETURN, "        if e >= 1:\n            break\n    return out")),
    "first_slots_only": (_over_hits, ("ids.unique", "ids[:, 0].unique")),  # experts that no token has first are left out
    "expert_draws_an_iterator": (
        _over_hits, (_BEGIN, "out, drawn = torch.zeros_like(x), iter(self.experts)\n"), ("self.experts[e]", "next(drawn)"),
    ),
}  # fmt: skip
STALE = (by_a_helper, by_a_namedtuple, by_a_lambda_in_the_loop, counts_by_a_helper, *all_changed(_CHANGES).values())


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
