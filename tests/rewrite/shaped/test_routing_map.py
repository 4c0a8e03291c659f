"""Rows in the order of a map ``[E, T]`` of who chose whom, in groups as large as its rows have true elements."""

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.changed import changed
from tests.tools.rewrite_harness import check_against_eager, rewrite_of


def _maps(self, weights, ids):
    chosen_TE = torch.zeros(ids.shape[0], self.E, dtype=torch.bool).scatter(1, ids, True)
    return chosen_TE, torch.zeros(ids.shape[0], self.E, dtype=weights.dtype).scatter(1, ids, weights)


def _experts(self, x, token, ends, weights):
    mm = torch.ops.moe_zoo.grouped_mm_fallback
    y = mm(F.silu(mm(x[token], self.w1, ends)) * mm(x[token], self.w3, ends), self.w2, ends)
    return torch.zeros_like(x).index_add(0, token, y * weights[:, None])


def by_nonzero(self, x, weights, ids):
    chosen, weights = _maps(self, weights, ids)
    expert, token = chosen.T.nonzero(as_tuple=True)
    return _experts(self, x, token, chosen.sum(0).cumsum(0).int(), weights[token, expert])


def by_masked_select(self, x, weights, ids):
    """Megatron's permutation."""
    chosen, weights = _maps(self, weights, ids)
    by_expert = chosen.T.contiguous()
    token = torch.arange(x.shape[0]).unsqueeze(0).expand(self.E, -1).masked_select(by_expert)
    return _experts(self, x, token, chosen.sum(0).cumsum(0).int(), weights.T.contiguous().masked_select(by_expert))


def sorted_by_column(self, x, weights, ids):
    """Of the places of gates, which the sort of each column puts in the order of experts."""
    chosen, weights = _maps(self, weights, ids)
    places = weights.nonzero()
    order = places.sort(0).indices[:, 1]
    token, expert = places[order].unbind(1)
    return _experts(self, x, token, (weights > 0).sum(0).cumsum(0).int(), weights[token, expert])


def in_groups_of_other_experts(self, x, weights, ids):
    chosen, weights = _maps(self, weights, ids)
    expert, token = chosen.T.nonzero(as_tuple=True)
    return _experts(self, x, token, chosen.roll(1, 1).sum(0).cumsum(0).int(), weights[token, expert])


def in_the_order_of_tokens(self, x, weights, ids):
    chosen, weights = _maps(self, weights, ids)
    token, expert = chosen.nonzero(as_tuple=True)
    return _experts(self, x, token, chosen.sum(0).cumsum(0).int(), weights[token, expert])


def of_half_the_rows(self, x, weights, ids):
    """Each place stands there twice, in groups that are as large as if it stood there once."""
    chosen, weights = _maps(self, weights, ids)
    token, expert = weights.nonzero(as_tuple=True)
    order = expert.repeat_interleave(2).argsort()
    ends, rows = (weights > 0).sum(0).cumsum(0).int(), x[token.repeat_interleave(2)[order]]
    mm = torch.ops.moe_zoo.grouped_mm_fallback
    y = mm(F.silu(mm(rows, self.w1, ends)) * mm(rows, self.w3, ends), self.w2, ends)[order.argsort()]
    return torch.zeros_like(x).index_add(0, token, y.view(len(token), 2, -1)[:, 0] * weights[token, expert, None])


_sorted_by_token = changed(sorted_by_column, ("indices[:, 1]", "indices[:, 0]"), name="sorted_by_token")


def of_other_ids(self, x, weights, ids):
    chosen, weights = _maps(self, weights, ids)
    expert, token = chosen.T.nonzero(as_tuple=True)
    return _experts(self, x, token, torch.bincount(ids.view(-1).flip(0) ^ 1, minlength=self.E).cumsum(0).int(),
                    weights[token, expert])  # fmt: skip


@pytest.mark.parametrize("spelling", [by_nonzero, by_masked_select, sorted_by_column], ids=lambda f: f.__name__)
@pytest.mark.parametrize("top_k", [1, 2])
def test_groups_of_a_routing_map(fp64, spelling, top_k):
    backend = check_against_eager(zoo.StackedMoE(spelling, "split", K=top_k), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


NEAR_MISSES = (in_groups_of_other_experts, in_the_order_of_tokens, of_other_ids, of_half_the_rows, _sorted_by_token)


@pytest.mark.parametrize("spelling", NEAR_MISSES, ids=lambda f: f.__name__)
def test_groups_that_are_not_those_of_the_map_stay(spelling):
    backend = rewrite_of(zoo.StackedMoE(spelling, "split"), torch.randn(10, zoo.D))
    assert not backend.rewritten and backend.reasons == ["SAME_PERMUTATION"]


# As many rows for every expert.

PLACES = 4


def in_padded_groups(self, x, weights, ids):
    """Megatron's padded capacity: a token that did not choose the expert, and fills a place, has the weight zero."""
    scores = _maps(self, weights, ids)[1]
    best = torch.topk(scores, k=PLACES, dim=0, sorted=False).indices
    taken = torch.zeros_like(scores).scatter(0, best, 1).bool()
    token = taken.T.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :PLACES].reshape(-1)
    place = torch.arange(self.E).unsqueeze(1) * x.shape[0] + token.view(self.E, PLACES)
    kept = (scores * taken).T.reshape(-1).index_select(0, place.view(-1))
    groups = x[token].split(PLACES)
    y = [F.silu(rows @ self.w1[e]) * (rows @ self.w3[e]) @ self.w2[e] for e, rows in enumerate(groups)]
    return torch.zeros_like(x).index_add(0, token, torch.cat(y) * kept.unsqueeze(1))


_PADDED = {
    "of_other_tokens": ("groups = x[token]", "groups = x[token.flip(0)]"),
    "written_to_other_tokens": ("index_add(0, token,", "index_add(0, token.roll(1),"),
    "weights_of_another_expert": ("kept.unsqueeze(1)", "kept.roll(1).unsqueeze(1)"),
    "groups_of_other_lengths": (".split(PLACES)", ".split([PLACES + 1, PLACES - 1, PLACES, PLACES])"),
}


@pytest.mark.parametrize(("num_tokens", "top_k"), [(10, 2), (10, 1), (PLACES, 4)])
def test_padded_groups(fp64, num_tokens, top_k):
    layer = zoo.StackedMoE(in_padded_groups, "split", K=top_k)
    (found,) = check_against_eager(layer, torch.randn(num_tokens, zoo.D)).rewritten
    assert found.K == zoo.E


def test_padded_groups_in_bf16():
    layer = zoo.StackedMoE(in_padded_groups, "split").to(torch.bfloat16)
    assert check_against_eager(layer, torch.randn(10, zoo.D).bfloat16(), tolerance=2**-4).rewritten


@pytest.mark.parametrize("name", _PADDED)
def test_padded_groups_of_something_else_stay(fp64, name):
    layer = zoo.StackedMoE(changed(in_padded_groups, _PADDED[name], name=name), "split")
    backend = check_against_eager(layer, torch.randn(10, zoo.D))
    assert not backend.rewritten
