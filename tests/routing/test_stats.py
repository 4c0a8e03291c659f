"""Counts of what routers choose, by layer and expert."""

import math

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops.routing.choice import Choice
from moeblaze_ops.routing.stats import RoutingStats
from tests.corpus.module_lists import D, E, K, ModuleListMoE, T


def test_counts_are_those_of_the_record():
    torch.manual_seed(0)
    model = nn.Sequential(ModuleListMoE(), moeblaze_ops.MoE(D, 12, E, K))
    with moeblaze_ops.record_routing(model) as record, moeblaze_ops.routing_stats(model) as stats, torch.no_grad():
        model(torch.randn(T, D))
        model(torch.randn(3, D))
    assert list(stats) == list(record.ids) == ["0", "1"] and len(stats) == 2
    for name in stats:
        counts = torch.bincount(record.ids[name].flatten(), minlength=E)
        assert torch.equal(stats[name].counts_E, counts) and stats[name].num_tokens == T + 3
        assert stats[name].dropped == 0 and stats[name].dead == int((counts == 0).sum())
        torch.testing.assert_close(stats[name].load_E, counts / counts.sum())
        assert math.isclose(stats[name].max_over_mean, counts.max().item() * E / counts.sum().item(), rel_tol=1e-5)
    assert len(str(stats).splitlines()) == 3 and repr(stats) == str(stats)


@pytest.mark.parametrize(
    ("ids", "dead", "dropped", "max_over_mean", "entropy"),
    [
        ([[0, 1], [2, 3]], 0, 0, 1.0, 1.0),
        ([[0, 0], [0, 0]], 3, 0, 4.0, 0.0),
        ([[0, 1], [-1, -1]], 2, 2, 2.0, 0.5),
        ([[-1, -1], [-1, -1]], 4, 4, 0.0, 0.0),
    ],
)
def test_what_the_numbers_say(ids, dead, dropped, max_over_mean, entropy):
    stats = RoutingStats()
    stats.add("layer", Choice(torch.tensor(ids), 4))
    found = stats["layer"]
    assert (found.dead, int(found.dropped), found.max_over_mean) == (dead, dropped, max_over_mean)
    assert math.isclose(found.entropy, entropy, abs_tol=1e-6)
    assert found.num_tokens == 2


def test_rejects():
    with pytest.raises(TypeError, match="routing_stats: model must be an nn.Module, got 3"), moeblaze_ops.routing_stats(3):
        pass
    with (
        pytest.raises(TypeError, match="routing_stats: layers must be a function of a name and a module, got 'gate'"),
        moeblaze_ops.routing_stats(ModuleListMoE(), layers="gate"),
    ):
        pass
