"""Scores of all experts, stored by pairs of indices: of a token, and of an expert."""

import pytest
import torch
from torch import Tensor, nn

from tests.corpus.zoo.modules import FF, D, E
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

K = 2


class Layer(nn.Module):
    def __init__(self, place, K: int = K):
        super().__init__()
        self.place, self.K = place, K
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, FF)), nn.Parameter(torch.randn(E, FF, D))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.K, dim=-1)
        scores = self.place(torch.zeros(x.shape[0], E), torch.arange(x.shape[0]), ids, weights)
        h = torch.einsum("td,edf->tef", x, self.up).relu()
        return torch.einsum("te,tef,efd->td", scores, h, self.down)


def column(scores, token, ids, weights):
    scores[token[:, None], ids] = weights
    return scores


def added_in_place(scores, token, ids, weights):
    scores[token.unsqueeze(-1), ids] += weights
    return scores


def expanded(scores, token, ids, weights):
    return scores.index_put((token.unsqueeze(1).expand_as(ids), ids), weights)


def one_after_another(scores, token, ids, weights):
    scores[token.repeat_interleave(ids.shape[1]), ids.flatten()] = weights.flatten()
    return scores


def accumulated(scores, token, ids, weights):
    return scores.index_put((token[:, None], ids), weights, accumulate=True)


def turned(scores, token, ids, weights):
    return scores.t().index_put((ids, token[:, None]), weights).t()


def by_the_tokens_own_number(scores, token, ids, weights):
    return column(scores, token, token[:, None] % E, weights[:, :1])


@pytest.mark.parametrize(("place", "chosen"), [
    (column, K), (added_in_place, 1), (expanded, K), (one_after_another, 1), (accumulated, K), (turned, K),
    (by_the_tokens_own_number, K),
])  # fmt: skip
def test_placed(place, chosen):
    backend = check_against_eager(Layer(place, chosen), torch.randn(7, D))
    assert len(backend.rewritten) == 1 and not backend.reasons


def of_another_token(scores, token, ids, weights):
    return column(scores, token.flip(0), ids, weights)


def of_one_expert_twice(scores, token, ids, weights):
    """The last of the two that are stored stays."""
    return column(scores, token, ids // E, weights[:, :1].expand(-1, ids.shape[1]))


def counted_from_the_end(scores, token, ids, weights):
    """Of the first expert it becomes the last."""
    return column(scores, token, ids - 1, weights)


def in_every_row_of_a_block(scores, token, ids, weights):
    """The tokens of one pair are 0, 0, 1, 1, ..., those of the ids are others."""
    return column(scores, token, ids[(token // 2)[:, None], torch.arange(ids.shape[1])], weights).cumsum(0)


@pytest.mark.parametrize("place", [of_another_token, of_one_expert_twice, counted_from_the_end, in_every_row_of_a_block])
def test_placed_elsewhere(place):
    assert not check_against_eager(Layer(place), torch.randn(7, D)).rewritten
