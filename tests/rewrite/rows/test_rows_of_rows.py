"""Loops that look for an expert's slots once more, among the rows that they selected for it."""

import pytest
import torch

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.changed import all_changed
from tests.tools.rewrite_harness import assert_replaced, check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


def both_places(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        some = (ids == e).any(-1)
        own = weights[some][(ids[some] == e).nonzero(as_tuple=True)]
        out[some] += expert(x[some]) * own.unsqueeze(-1)
    return out


def columns(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        some = (ids == e).any(dim=1)
        token, own = torch.nonzero(some).squeeze(-1), weights[some]
        slot = (ids[some] == e).nonzero()[:, 1]
        out[token] += expert(x[token]) * own[torch.arange(len(own)), slot].unsqueeze(-1)
    return out


def by_subscript(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        some = (ids == e).any(-1)
        out[some] += expert(x[some]) * weights[some][ids[some] == e].unsqueeze(-1)
    return out


def beside_the_whole_mask(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        some, (token, _) = (ids == e).any(-1), torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[some][ids[some] == e].unsqueeze(-1))
    return out


def with_a_check(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        some = (ids == e).any(-1)
        slot = torch.where(ids[some] == e)[1]
        torch._check(slot.shape[0] == x[some].shape[0])
        out.index_add_(0, torch.where(some)[0], expert(x[some]) * weights[some].gather(1, slot[:, None]))
    return out


LAYERS = {layer.__name__: layer for layer in (both_places, columns, by_subscript, beside_the_whole_mask, with_a_check)}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tokens", [11, 1])
def test_slots_among_selected_rows(name, tokens):
    assert_replaced(check_against_eager(zoo.ModuleListMoE(LAYERS[name]), torch.randn(tokens, zoo.D)))


TWINS = all_changed({
    "the_rows": (columns, ("nonzero()[:, 1]", "nonzero()[:, 0].clamp(max=1)")),
    "reversed": (columns, ("nonzero()[:, 1]", "nonzero()[:, 1].flip(0)")),
})  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_twin_is_left_alone(name):
    assert not check_against_eager(zoo.ModuleListMoE(TWINS[name]), torch.randn(11, zoo.D)).rewritten


class Repeated(zoo.ModuleListMoE):
    """Ids of which a token may have one twice."""

    def forward(self, x):
        weights, ids = self.router(x)
        return self.combine(self, x, weights, torch.stack([ids[:, 0], ids.amin(-1)], -1))


def located(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        some = (ids == e).any(-1)
        row, slot = torch.where(ids[some] == e)
        token = torch.where(some)[0][row]
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


@pytest.mark.parametrize("layer", [zoo.ModuleListMoE, Repeated])
def test_rows_with_two_true_elements_are_two_rows(layer):
    check_against_eager(layer(located), torch.randn(11, zoo.D))
