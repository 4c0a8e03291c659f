"""Experts that have room for some of the tokens that chose them, and drop the others."""

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.lowering.match.terms import routing_term
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

ROOM = 3


def _kept(self, ids):
    """[T, E]: whether an expert has room for a token."""
    return F.one_hot(ids, len(self.experts)).sum(dim=1).cumsum(dim=0) <= ROOM


def masked(self, x, weights, ids):
    kept, out = _kept(self, ids), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * share * kept[:, e, None]
    return out


def rows(self, x, weights, ids):
    chosen = F.one_hot(ids, len(self.experts))
    selected = (chosen * (chosen.sum(dim=1, keepdim=True).cumsum(dim=0) <= ROOM)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(selected[e])
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def first_of_each_sequence(self, x, weights, ids):
    """transformers' Switch Transformers: one expert for each token, with room counted by sequence."""
    chosen = F.one_hot(ids[:, 0].view(2, -1), len(self.experts))
    selected = (chosen * (torch.cumsum(chosen, dim=-2) <= ROOM)).view(-1, 1, len(self.experts)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(selected[e])
        out.index_add_(0, token, expert(x[token]) * weights[:, :1][token, slot, None])
    return out


def without_weights(self, x, weights, ids):
    kept, out = _kept(self, ids), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (ids == e).any(dim=-1, keepdim=True) * kept[:, e, None]
    return out


def unless_full(self, x, weights, ids):
    chosen = F.one_hot(ids, len(self.experts)).sum(dim=1)
    kept, out = chosen.cumsum(dim=0) - chosen < ROOM, torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * share * kept[:, e, None]
    return out


def without_padding_tokens(self, x, weights, ids):
    kept, out, is_token = _kept(self, ids), torch.zeros_like(x), torch.arange(len(x)) % 3 > 0
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * share * (kept[:, e] * is_token)[:, None]
    return out


def room_of_the_next(self, x, weights, ids):
    """The mask of another expert: one tensor of each says what it keeps."""
    kept, out = _kept(self, ids), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * share * kept[:, (e + 1) % len(self.experts), None]
    return out


@pytest.mark.parametrize(("combine", "expert"), [
    (masked, zoo.GluMLP), (masked, zoo.PlainMLP), (rows, zoo.PlainMLP), (first_of_each_sequence, zoo.GluMLP),
    (without_weights, zoo.PlainMLP), (unless_full, zoo.GluMLP), (without_padding_tokens, zoo.PlainMLP),
    (room_of_the_next, zoo.PlainMLP),
], ids=lambda f: f.__name__)  # fmt: skip
def test_rewritten(combine, expert):
    backend = check_against_eager(zoo.ModuleListMoE(combine, expert=expert), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert found.E == zoo.E and "expert_down.default" in backend.operators() and not backend.reasons


def test_nothing_is_left():
    operators = check_against_eager(zoo.ModuleListMoE(rows), torch.randn(20, zoo.D)).operators()
    assert not {"where", "nonzero", "index_add_"} & set(operators)


def half_a_token(self, x, weights, ids):
    kept, out = _kept(self, ids), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * share * (kept[:, e, None] + 0.5)
    return out


def dropped_from_the_input(self, x, weights, ids):
    """An expert with biases gives something for nothing."""
    kept, out = _kept(self, ids), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1, keepdim=True)
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x * mask * kept[:, e, None]) * share
    return out


def one_expert_has_room(self, x, weights, ids):
    kept, out = _kept(self, ids), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * (share * kept[:, e, None] if e else share)
    return out


def id_of_no_expert(self, x, weights, ids):
    """An id that is no expert's has no column in the mask."""
    ids = torch.where(x[:, :1] > 1, len(self.experts), ids)
    kept, out = F.one_hot(ids, len(self.experts) + 1).sum(dim=1)[:, :-1].cumsum(dim=0) <= ROOM, torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)
        out = out + expert(x) * share * kept[:, e, None]
    return out


@pytest.mark.parametrize(
    "combine", [half_a_token, dropped_from_the_input, one_expert_has_room, id_of_no_expert],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_near_misses(combine):
    backend = check_against_eager(zoo.ModuleListMoE(combine, expert=zoo.PlainMLP), torch.randn(20, zoo.D))
    assert not backend.rewritten and backend.reasons


def by_its_place(self, x, weights, ids):
    """Weighted by how many tokens of the expert stand before."""
    place, out = F.one_hot(ids, len(self.experts)).sum(dim=1).cumsum(dim=0), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * ((weights * (ids == e)).sum(dim=-1) * place[:, e])[:, None]
    return out


def test_a_number_keeps_nothing_whatever_the_matcher_says(monkeypatch):
    """Operators compare what is kept with zero: the statement says so, too."""
    monkeypatch.setattr(routing_term, "is_indicator", lambda e: True)
    backend = check_against_eager(zoo.ModuleListMoE(by_its_place), torch.randn(20, zoo.D))
    assert backend.reasons == ["STATEMENT"]
