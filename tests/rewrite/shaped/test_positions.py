"""Rows that are numbered by hand: slots as positions in all of them, groups by their ends, permutations turned around."""

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager


def placed_at_positions(self, x, weights, ids, first=0):
    rows = x.repeat_interleave(ids.shape[1], 0)
    y = torch.zeros_like(rows)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        position = token * ids.shape[1] + slot
        hidden = F.silu(F.linear(rows[position], self.w1[e])) * F.linear(rows[position], self.w3[e])
        y = y.index_copy(0, (position + first) % len(rows), F.linear(hidden, self.w2[e]))
    return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


def by_group(self, x, weights, order, group):
    """Each row of the slots in this order by the weights of its group."""
    token = order // weights.shape[1]
    hidden = F.silu(torch.einsum("nd,nfd->nf", x[token], self.w1[group])) * torch.einsum("nd,nfd->nf", x[token], self.w3[group])
    y = torch.einsum("nf,ndf->nd", hidden, self.w2[group])
    return token, y


def searched(self, x, weights, ids, search=torch.searchsorted, right=True):
    order = ids.view(-1).argsort(stable=True)
    ends, rows = ids.view(-1).bincount(minlength=self.E).cumsum(0), torch.arange(order.numel())
    group = search(*((ends, rows) if search is torch.searchsorted else (rows, ends)), right=right)
    token, y = by_group(self, x, weights, order, group)
    return torch.zeros_like(x).index_add(0, token, y * weights.view(-1)[order, None])


def searched_among(self, x, weights, ids):
    return searched(self, x, weights, ids, torch.bucketize)


def turned_around(self, x, weights, ids, shift=0):
    order = ids.view(-1).argsort(stable=True)
    position = torch.empty_like(order).scatter_(0, order, (torch.arange(order.numel()) + shift) % order.numel())
    _, y = by_group(self, x, weights, order, ids.view(-1)[order])
    return (y[position].view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("experts", [placed_at_positions, searched, searched_among, turned_around], ids=lambda f: f.__name__)
def test_numbers_of_rows(fp64, experts):
    assert_replaced(check_against_eager(zoo.StackedMoE(experts, "linear"), torch.randn(10, zoo.D)))


def placed_one_further(self, x, weights, ids):
    return placed_at_positions(self, x, weights, ids, first=1)


def searched_from_the_left(self, x, weights, ids):
    """The first row of each group has the weights of the group before."""
    return searched(self, x, weights, ids, right=False)


def turned_too_far(self, x, weights, ids):
    return turned_around(self, x, weights, ids, shift=1)


@pytest.mark.parametrize("experts", [placed_one_further, searched_from_the_left, turned_too_far], ids=lambda f: f.__name__)
def test_near_misses(fp64, experts):
    """At most rows that have one expert each are a layer."""
    rewritten = check_against_eager(zoo.StackedMoE(experts, "linear"), torch.randn(10, zoo.D)).rewritten
    assert {candidate.K for candidate in rewritten} <= {1}
