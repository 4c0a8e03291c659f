"""Loops that make zeros for an expert without tokens, in a branch of its own; and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch

from tests.corpus.zoo.changed import all_changed


def _combined(self, outs, weights, ids):
    scores = torch.zeros(ids.shape[0], len(self.experts), dtype=weights.dtype).scatter(1, ids, weights)
    return (torch.stack(outs, dim=1) * scores.unsqueeze(-1)).sum(dim=1)


def zeros_in_the_other_branch(self, x, weights, ids):
    outs = []
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            y = torch.zeros_like(x)
            y[mask] = expert(x[mask])
        else:
            y = torch.zeros_like(x)
        outs.append(y)
    return _combined(self, outs, weights, ids)


def zeros_appended(self, x, weights, ids):
    outs = []
    for e, expert in enumerate(self.experts):
        token = (ids == e).any(dim=-1).nonzero().squeeze(-1)
        if token.numel() > 0:
            y = x.new_zeros(x.shape)
            y[token] = expert(x[token])
            outs.append(y)
        else:
            outs.append(x.new_zeros(x.shape))
    return _combined(self, outs, weights, ids)


def zeros_at_first(self, x, weights, ids):
    outs = []
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if not mask.any():
            outs.append(torch.zeros_like(x))
        else:
            y = torch.zeros_like(x)
            y[mask] += expert(x[mask])
            outs.append(y)
    return _combined(self, outs, weights, ids)


def zeros_that_are_added(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if len(token) == 0:
            y = torch.zeros_like(x)
        else:
            rows = expert(x[token]) * weights[token, slot, None]
            y = torch.zeros_like(x)
            y.index_add_(0, token, rows)
        out = out + y
    return out


def zeros_for_other_tokens(self, x, weights, ids):
    """They are the zeros that the sum begins with."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.any():
            share = (weights * mask).sum(dim=-1, keepdim=True)
            out = out + torch.where(mask.any(dim=-1, keepdim=True), expert(x) * share, torch.zeros_like(x))
    return out


ZEROS = (zeros_in_the_other_branch, zeros_appended, zeros_at_first, zeros_that_are_added, zeros_for_other_tokens)


# Near misses.


def ones_in_the_other_branch(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            y = torch.zeros_like(x)
            y[mask] = expert(x[mask])
        else:
            y = torch.ones_like(x)
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + 0.1 * y
    return out


def zeros_of_fewer_rows(self, x, weights, ids):
    """They are added to the first token alone, or to all: the same for zeros, but not known to be."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            y = torch.zeros_like(x)
            y[mask] = expert(x[mask])
        else:
            y = torch.zeros_like(x[:1])
        out = out + y + len(y)
    return out


def zeros_that_are_changed(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            y = torch.zeros_like(x)
            y[mask] = expert(x[mask])
            y += 1
        else:
            y = torch.zeros_like(x)
        out = out + y
    return out


def zeros_in_another_list(self, x, weights, ids):
    outs, rest = [x], []
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            y = torch.zeros_like(x)
            y[mask] = expert(x[mask])
            outs.append(y)
        else:
            rest.append(torch.zeros_like(x))
    return torch.stack(outs).mean(dim=0)


def zeros_that_are_counted(self, x, weights, ids):
    out, unused = torch.zeros_like(x), 0
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            y = torch.zeros_like(x)
            y[mask] = expert(x[mask])
        else:
            y = torch.zeros_like(x)
            unused += 1
        out = out + y
    return out + unused


_CHANGED = all_changed(
    {
        "ones_for_other_tokens": (zeros_for_other_tokens, ("share, torch.zeros_like(x)", "share, torch.ones_like(x)")),
        "zeros_with_more_rows_stored": (zeros_that_are_changed, ("y += 1", "y[:2] += 1")),
        "zeros_at_rows_of_others": (
            zeros_that_are_changed, ("mask = (", "mask, others = ("), (".any(dim=-1)", ".any(dim=-1), (ids != e).any(dim=-1)"),
            ("y[mask] = expert(x[mask])\n            y += 1", "y[others] = expert(x[others])"),
        ),
    }
)  # fmt: skip

NEAR_MISSES = (
    ones_in_the_other_branch, zeros_of_fewer_rows, zeros_that_are_changed, *_CHANGED.values(), zeros_in_another_list,
    zeros_that_are_counted,
)  # fmt: skip
