"""Experts that a router chooses for whole sequences, or for positions: all tokens of one have the same ids and weights."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as switch
from moeblaze_ops import config
from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.changed import all_changed
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("fp64")

B, S, K = 5, 4, 2


class Sequences(nn.Module):
    """``combine`` gets the layer, tokens ``[B, S, D]``, and what ``choose`` makes of the scores of sequences, ``[B, E]``."""

    def __init__(self, combine, axis=1, experts=zoo.E):
        super().__init__()
        self.combine, self.axis = combine, axis
        self.gate = nn.Linear(zoo.D, experts, bias=False)
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(experts))

    def forward(self, x):
        return self.combine(self, x, self.gate(x.sum(self.axis)).softmax(-1))


def looped(self, x, scores):
    weights, ids = scores.topk(K, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        row, slot = torch.where(ids == e)
        out.index_add_(0, row, expert(x[row]) * weights[row, slot, None, None])
    return out


def masked(self, x, scores):
    weights, ids = scores.topk(K, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + (weights * (ids == e)).sum(-1)[:, None, None] * expert(x)
    return out


def gathered(self, x, scores):
    weights, ids = scores.topk(K, -1)
    y = torch.stack([expert(x) for expert in self.experts], 1)
    return (weights[..., None, None] * y[torch.arange(len(x))[:, None], ids]).sum(1)


def scored(self, x, scores):
    gate = (scores - 0.25).relu()
    return torch.einsum("be,ebsd->bsd", gate, torch.stack([expert(x) for expert in self.experts]))


def numbered(self, x, scores):
    """Ids alone, one for each sequence."""
    ids, out = scores.argmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out[ids == e] = expert(x[ids == e])
    return out


def positioned(self, x, scores):
    weights, ids = scores.topk(K, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + (weights * (ids == e)).sum(-1)[None, :, None] * expert(x)
    return out


def weighted_by_token(self, x, scores):
    """Ids of sequences, and weights of tokens."""
    ids, weights = scores.argmax(-1), self.gate(x).sigmoid()
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + (ids == e)[:, None, None] * weights[..., e, None] * expert(x)
    return out


def guarded(self, x, scores):
    weights, ids = scores.topk(K, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        row, slot = torch.where(ids == e)
        if row.numel() > 0:
            out.index_add_(0, row, expert(x[row]) * weights[row, slot, None, None])
    return out


def without_weights(self, x, scores):
    ids, out = scores.topk(K, -1).indices, torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + (ids == e).sum(-1)[:, None, None] * expert(x)
    return out


def of_all_scores(self, x, scores):
    ids, out = scores.topk(K, -1).indices, torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + (scores[:, e] * (ids == e).any(-1))[:, None, None] * expert(x)
    return out


LAYERS = [looped, masked, gathered, scored, numbered, weighted_by_token, without_weights, of_all_scores]


@pytest.mark.parametrize("combine", LAYERS, ids=lambda combine: combine.__name__)
def test_sequences_choose(combine):
    assert_replaced(check_against_eager(Sequences(combine), torch.randn(B, S, zoo.D)))


def test_branches_and_graphs_with_other_sizes():
    layer = Sequences(guarded)
    for sizes in ((B, S), (2, 7)):
        x = torch.randn(*sizes, zoo.D)
        torch._dynamo.reset()
        with rewriting_backend() as backend, switch.recording() as records:
            torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
        assert len(rewritten_in(records)) == 1


def test_positions_choose():
    assert_replaced(check_against_eager(Sequences(positioned, axis=0), torch.randn(B, S, zoo.D)))


@pytest.mark.parametrize("combine", [looped, weighted_by_token], ids=lambda combine: combine.__name__)
def test_router_of_sequences_stays(combine, monkeypatch):
    """The fused router has a row for each token, or none."""
    monkeypatch.setattr(config, "batch_invariant", True)
    backend = check_against_eager(Sequences(combine).float(), torch.randn(B, S, zoo.D, dtype=torch.float32))
    assert_replaced(backend)
    assert "route.default" not in backend.operators()


@pytest.mark.parametrize("shape", [(S, S), (1, S), (B, 1), (0, S), (B, 0)], ids=str)
def test_as_many_sequences_as_positions(shape):
    """A row of scores is that of a sequence, and not of a position, whichever is as long."""
    check_against_eager(Sequences(masked), torch.randn(*shape, zoo.D))
    if shape[0]:
        check_against_eager(Sequences(positioned, axis=0), torch.randn(*shape, zoo.D))


TWINS = all_changed({
    "ids_of_others": (masked, ("(ids == e)", "(ids.flip(0) == e)")),
    "of_the_next_sequence": (looped, ("expert(x[row])", "expert(x.roll(1, 0)[row])")),
    "shares_summed_over_tokens": (masked, ("* expert(x)", "* expert(x).mean(1, keepdim=True)")),
    "another_id": (gathered, ("[:, None], ids]", "[:, None], ids.clamp(max=1)]")),
    "not_rectified": (scored, (".relu()", ".relu() + 0.1")),
    "of_sequences_and_positions": (positioned, ("[None, :, None] *", "[None, :, None] * x.mean((1, 2), keepdim=True) *")),
})  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_twin_is_left_alone_or_right(name):
    axis = int(name != "of_sequences_and_positions")
    check_against_eager(Sequences(TWINS[name], axis), torch.randn(B, S, zoo.D))
