"""Experts that choose tokens of each sequence for themselves: EC-DiT's, V-MoE's of groups."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

B, S, C = 3, 7, 2


class Layer(nn.Module):
    """``spelling`` gets the layer, tokens ``[B, S, D]``, and their scores ``[B, S, E]``."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling
        self.gate = nn.Linear(zoo.D, zoo.E)
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(zoo.E))
        self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D) * 0.2)

    def forward(self, x):
        return self.spelling(self, x, self.gate(x).softmax(-1))

    def of_places(self, rows):
        """Of ``[B, E, C, D]``."""
        return torch.stack([expert(rows[:, e]) for e, expert in enumerate(self.experts)], dim=1)


def _chosen(scores, dim=1):
    return scores.topk(min(C, scores.shape[dim]), dim=dim)


def one_hot(self, x, scores, read=lambda x: x, experts=None):
    """EC-DiT's."""
    shares, token = _chosen(scores.transpose(1, 2), dim=-1)
    dispatch = F.one_hot(token, x.shape[1]).to(x.dtype)
    y = (self.of_places if experts is None else experts)(torch.einsum("becs,bsd->becd", dispatch, read(x)))
    return torch.einsum("becs,bec,becd->bsd", dispatch, shares, y)


def one_hot_of_stacked_experts(self, x, scores):
    def experts(rows):
        return torch.einsum("becf,efd->becd", F.silu(torch.einsum("becd,edf->becf", rows, self.up)), self.down)

    return one_hot(self, x, scores, experts=experts)


def by_scores_of_tokens(self, x, scores):
    """V-MoE's of groups: weights are those of the tokens."""
    dispatch = F.one_hot(_chosen(scores).indices, x.shape[1]).permute(0, 3, 2, 1).to(x.dtype)
    combine = torch.einsum("bse,bsec->bsec", scores, dispatch)
    return torch.einsum("becd,bsec->bsd", self.of_places(torch.einsum("bsec,bsd->becd", dispatch, x)), combine)


def gathered(self, x, scores, place=lambda index: index, read=lambda index: index):
    shares, token = _chosen(scores)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        index = token[:, :, e, None].expand(-1, -1, zoo.D)
        y = expert(x.gather(1, read(index))) * shares[:, :, e, None]
        out = out.scatter_add(1, place(index), y)
    return out


def one_by_one(self, x, scores):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        shares, token = _chosen(scores[:, :, e])
        index = token.unsqueeze(-1).expand(-1, -1, zoo.D)
        out = out.scatter_add(1, index, expert(x.gather(1, index)) * shares.unsqueeze(-1))
    return out


def without_weights(self, x, scores):
    dispatch = F.one_hot(_chosen(scores).indices, x.shape[1]).to(x.dtype)
    return torch.einsum("bces,becd->bsd", dispatch, self.of_places(torch.einsum("bces,bsd->becd", dispatch, x)))


SPELLINGS = (one_hot, one_hot_of_stacked_experts, by_scores_of_tokens, gathered, one_by_one, without_weights)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(B, S), (4, 4)], ids=str)
def test_rewritten(spelling, sizes):
    backend = check_against_eager(Layer(spelling), torch.randn(*sizes, zoo.D))
    (found,) = backend.rewritten
    assert (found.K, found.E) == (zoo.E, zoo.E) and not backend.reasons


@pytest.mark.parametrize("sizes", [(1, 5), (4, 1), (0, 5)], ids=str)
@pytest.mark.parametrize("spelling", [one_hot, gathered], ids=lambda f: f.__name__)
def test_few_tokens(spelling, sizes):
    check_against_eager(Layer(spelling), torch.randn(*sizes, zoo.D))


def shares_of_the_next_sequence(self, x, scores):
    """Weights are what stands beside a place, whoever was scored."""
    return one_hot(self, x, torch.cat([scores[1:], scores[:1]]))


def read_of_the_next_sequence(self, x, scores):
    return one_hot(self, x, scores, read=lambda x: torch.cat([x[1:], x[:1]]))


def sequences_of_a_position(self, x, scores):
    """Of each position experts choose sequences."""
    return one_hot(self, x, scores.transpose(0, 1), read=lambda x: x.transpose(0, 1))


OTHERS = (shares_of_the_next_sequence, read_of_the_next_sequence, sequences_of_a_position)


@pytest.mark.parametrize("spelling", OTHERS, ids=lambda f: f.__name__)
def test_others_are_equal(spelling):
    check_against_eager(Layer(spelling), torch.randn(4, 4, zoo.D))


# Near misses.


def read_by_the_choice_of_the_next_sequence(self, x, scores):
    return gathered(self, x, scores, read=lambda index: torch.cat([index[1:], index[:1]]))


def stored_where_the_next_place_is(self, x, scores):
    return gathered(self, x, scores, place=lambda index: index.flip(1))


def all_in_the_first_sequence(self, x, scores):
    """Numbers inside of sequences are taken for those of all tokens."""
    shares, token = _chosen(scores)
    out = torch.zeros_like(x).view(-1, zoo.D)
    for e, expert in enumerate(self.experts):
        rows = x.gather(1, token[:, :, e, None].expand(-1, -1, zoo.D))
        y = expert(rows) * shares[:, :, e, None]
        out = out.index_add(0, token[:, :, e].reshape(-1), y.reshape(-1, zoo.D))
    return out.view_as(x)


NEAR = (read_by_the_choice_of_the_next_sequence, stored_where_the_next_place_is, all_in_the_first_sequence)


@pytest.mark.parametrize("spelling", NEAR, ids=lambda f: f.__name__)
def test_near_misses(spelling):
    assert not check_against_eager(Layer(spelling), torch.randn(B, S, zoo.D)).rewritten
