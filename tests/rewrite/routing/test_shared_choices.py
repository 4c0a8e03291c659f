"""Routers whose ids others read as well, losses say, and routers at ids that something else chose."""

import pytest
import torch
import torch.nn.functional as F

import moeblaze_ops
from tests.corpus.router_layers import D, E, K, Layer, T
from tests.tools.rewrite_harness import check_against_eager, compiled

pytestmark = pytest.mark.usefixtures("fused_routers")


def balance(ids, logits):
    return E * (F.one_hot(ids, E).float().mean((0, 1)) * logits.softmax(-1).mean(0)).sum()


def softmax_first(logits):
    weights, ids = logits.softmax(-1).topk(K)
    return weights / weights.sum(-1, keepdim=True), ids, balance(ids, logits)


def softmax_last(logits):
    values, ids = logits.topk(K)
    return values.softmax(-1), ids, balance(ids, logits) + ids.float().mean()


def biased(logits):
    scores = logits.sigmoid()
    ids = (scores + torch.tensor([0.31, -0.24, 0.12, -0.43])).topk(K).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids, torch.bincount(ids.view(-1), minlength=E).double().var()


def chosen_without_gradient(logits):
    scores = logits.softmax(-1)
    with torch.no_grad():
        ids = scores.topk(K).indices
    return scores.gather(1, ids), ids, balance(ids, logits)


def flattened(logits):
    weights, ids = logits.softmax(-1).topk(K)
    return weights, ids, (ids.view(-1) == 1).float().mean()


def test_others_read_ids_in_the_order_that_the_choice_gave():
    """Unsorted choices have one of their own, by which a buffer's places may be counted."""

    def unsorted(logits):
        weights, ids = logits.softmax(-1).topk(K, sorted=False)
        return weights, ids, (ids[:, 0] == 1).float().mean()

    rewriting = check_against_eager(Layer(unsorted), torch.randn(T, D))
    assert rewriting.rewritten and "route" not in " ".join(rewriting.operators())


SHARED = [softmax_first, softmax_last, biased, chosen_without_gradient, flattened]


def names(rewriting):
    """Of what still has a reader."""
    for gm in rewriting.modules:
        gm.graph.eliminate_dead_code()
    return " ".join(rewriting.operators())


@pytest.mark.parametrize("router", SHARED)
def test_others_read_the_ids_of_the_fused_router(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert "route.default" in names(rewriting) and "topk" not in names(rewriting)


def weights_are_read(logits):
    weights, ids = logits.softmax(-1).topk(K)
    return weights, ids, weights.sum()


def scores_of_few_are_read(logits):
    values, ids = logits.topk(K)
    return values.softmax(-1), ids, values.logsumexp(-1).mean()


def others_are_written(logits):
    """The layer's ids are a copy, to which is written."""
    weights, ids = logits.softmax(-1).topk(K)
    changed = ids.clone()
    changed[0] = changed[1]
    return weights, changed, ids.float().mean()


@pytest.mark.parametrize("router", [weights_are_read, scores_of_few_are_read, others_are_written])
def test_what_the_fused_router_does_not_give_stays(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert "topk" in names(rewriting)


GIVEN = torch.stack([torch.arange(T) % E, (torch.arange(T) // 3 + 1) % E], 1)
"""Some tokens name one expert twice."""


def given_softmax(logits):
    return logits.softmax(-1).gather(-1, GIVEN), GIVEN


def given_renormalized(logits):
    weights = logits.float().softmax(-1).gather(1, GIVEN)
    return weights / weights.sum(-1, keepdim=True), GIVEN


def given_logits(logits):
    return logits.gather(1, GIVEN).softmax(-1), GIVEN


def given_sigmoid(logits):
    weights = logits.sigmoid().gather(1, GIVEN)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, GIVEN


@pytest.mark.parametrize("router", [given_softmax, given_renormalized, given_logits, given_sigmoid])
def test_weights_of_given_ids_are_fused(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert "route_at.default" in names(rewriting) and "gather" not in names(rewriting)


def at_other_ids(logits):
    return logits.softmax(-1).gather(-1, GIVEN.flip(0)), GIVEN


def a_number_is_added(logits):
    weights = logits.softmax(-1).gather(1, GIVEN)
    return weights / (weights.sum(-1, keepdim=True) + 1e-13), GIVEN


def at_ids_before_they_changed(logits):
    ids = GIVEN.clone()
    ids[0] = ids[1]
    return logits.softmax(-1).gather(1, GIVEN), ids


def doubled(logits):
    return logits.softmax(-1).gather(1, GIVEN) + 1, GIVEN


@pytest.mark.parametrize("router", [at_other_ids, a_number_is_added, at_ids_before_they_changed, doubled])
def test_other_weights_of_given_ids_stay(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert "route_at.default" not in names(rewriting)


def test_a_replay_weighs_with_one_operator():
    model, x = torch.nn.Sequential(Layer(softmax_last)), torch.randn(T, D)
    with moeblaze_ops.replay_routing(model, {"0": GIVEN % E}):
        expected = model(x)
        run, rewriting = compiled(model)
        torch.testing.assert_close(run(x), expected)
    assert "route_at.default" in names(rewriting)
