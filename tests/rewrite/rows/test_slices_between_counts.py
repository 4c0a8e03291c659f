"""Slices between running sums of counts are the rows of one expert, told by the algebra in the graph."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moeblaze_ops.lowering.tracing.branches import Branches
from moeblaze_ops.lowering.tracing.watch import tracing
from tests.tools.rewrite_harness import check_against_eager

T, D, H, E, K = 10, 16, 24, 4, 2


class Layer(nn.Module):
    def __init__(self, combine):
        super().__init__()
        self.combine = combine
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)) for _ in range(E))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        order = ids.view(-1).argsort()
        return self.combine(self, x, ids, order // K, weights.view(-1)[order].unsqueeze(1))


def _counts(ids):
    return F.one_hot(ids.view(-1), E).sum(0)


def _added(self, x, token, scale, bounds):
    rows, out = x[token], torch.zeros_like(x)
    for e, (start, end) in enumerate(bounds):
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
    return out


def bounds_of_a_list(self, x, ids, token, scale):
    bounds = [0] + _counts(ids).cumsum(0).tolist()
    return _added(self, x, token, scale, zip(bounds[:-1], bounds[1:], strict=True))


def bounds_on_the_device(self, x, ids, token, scale):
    """As in Aria and in Megatron's sequential experts."""
    counts = torch.histc(ids.view(-1).float(), E, 0, E - 1).long()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    rows, out = x[token], torch.zeros_like(x[token])
    for e in range(E):
        start, end = int(ends[e]), int(ends[e + 1])
        out[start:end] = self.experts[e](rows[start:end])
    return torch.zeros_like(x).index_add(0, token, out * scale)


def running_start(self, x, ids, token, scale):
    """As in OLMo-core."""
    counts, rows = _counts(ids), x[token]
    out, start = torch.empty_like(rows), 0
    for e in range(E):
        size = int(counts[e])
        out[start : start + size] = self.experts[e](rows[start : start + size])
        start += size
    return torch.zeros_like(x).index_add(0, token, out * scale)


def routing_map(self, x, ids, token, scale):
    chosen = torch.zeros(x.shape[0], E, dtype=torch.bool).scatter(1, ids, True)
    parts = torch.split(x[token], chosen.sum(0).tolist())
    return torch.zeros_like(x).index_add(0, token, torch.cat([f(p) for f, p in zip(self.experts, parts, strict=True)]) * scale)


def axis_behind_the_slice(self, x, ids, token, scale):
    bounds, scale = [0] + _counts(ids).cumsum(0).tolist(), scale.squeeze(1)
    rows, out = x[token], torch.zeros_like(x)
    for e, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end, ...]) * scale[start:end, None])
    return out


def sums_of_first_counts(self, x, ids, token, scale):
    return _added(self, x, token, scale, _summed(_counts(ids)))


def _summed(counts):
    return [(int(counts[:e].sum()), int(counts[: e + 1].sum())) for e in range(E)]


LAYERS = (bounds_of_a_list, bounds_on_the_device, running_start, routing_map, axis_behind_the_slice, sums_of_first_counts)


def _twin(change):
    """`bounds_of_a_list` with other bounds."""

    def combine(self, x, ids, token, scale):
        return _added(self, x, token, scale, change(_counts(ids), ids))

    return combine


def _bounds(counts):
    ends = [0] + counts.cumsum(0).tolist()
    return list(zip(ends[:-1], ends[1:], strict=True))


def written_between(counts, ids):
    """The counts are others when they are read."""
    counts.copy_(counts.flip(0))
    return _bounds(counts)


TWINS = {
    "of_other_ids": lambda counts, ids: _bounds(_counts(ids // 2 * 2)),
    "written_between": written_between,
    "start_is_reset": lambda counts, ids: [(0, int(counts[e])) for e in range(E)],
    "ranges_overlap": lambda counts, ids: [(start, start + int(counts[e]) + 1) for e, (start, _) in enumerate(_bounds(counts))],
    "in_another_order": lambda counts, ids: _bounds(counts)[::-1],
    "sums_of_other_ids": lambda counts, ids: _summed(_counts(ids // 2 * 2)),
    "sums_of_the_next_counts": lambda counts, ids: _summed(counts.roll(1)),
    "sums_behind_the_first": lambda counts, ids: [(int(counts[1 : e + 1].sum()), int(counts[: e + 1].sum())) for e in range(E)],
    "signed": lambda counts, ids: _bounds(counts - 2 * (torch.arange(E) == 1) * counts),
}


def _check(combine):
    torch.manual_seed(0)
    torch._dynamo.reset()
    with tracing(Branches()):
        return check_against_eager(Layer(combine), torch.randn(T, D))


@pytest.mark.parametrize("combine", LAYERS, ids=lambda f: f.__name__)
def test_rows_of_groups(combine):
    assert len(_check(combine).rewritten) == 1


def test_features_behind_the_slice():
    """Whatever a subscript says of the features, it says of the rows of the slice."""

    def combine(self, x, ids, token, scale):
        rows, out = x[token], torch.zeros_like(x)
        for e, (start, end) in enumerate(_bounds(_counts(ids))):
            out.index_add_(0, token[start:end], self.experts[e](rows[start:end, list(range(D))[::-1]]) * scale[start:end])
        return out

    _check(combine)


def test_experts_left_out():
    """The last expert does nothing: a layer of the others."""
    (candidate,) = _check(_twin(lambda counts, ids: _bounds(counts)[:-1])).rewritten
    assert candidate.E == E - 1


@pytest.mark.parametrize("name", TWINS)
def test_other_rows(name):
    """A slice that fits no group may be left in the graph, where it has no size that Dynamo knows: nothing is rewritten."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    reports = []

    def backend(gm, example_inputs):
        from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph

        reports.append(rewrite_graph(gm))
        return gm.forward

    layer = Layer(_twin(TWINS[name]))
    with tracing(Branches()):
        try:
            torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(T, D))
        except Exception:
            assert reports
    became = [candidate for report in reports for candidate in report.rewritten]
    if name in ("in_another_order",):
        assert len(became) <= 1  # experts numbered in another way are a layer
    else:
        assert not became


def test_counts_of_a_symbolic_number():
    """How many ids are equal to any of T numbers is no sum of so many counts as the graph knows."""

    def combine(self, x, ids, token, scale):
        below = (ids.view(-1, 1) == torch.arange(x.shape[0])).sum(0).sum()
        ends = [*_counts(ids).cumsum(0)[:-1].tolist(), int(below)]
        return _added(self, x, token, scale, zip([0, *ends[:-1]], ends, strict=True))

    with tracing(Branches()):
        check_against_eager(Layer(combine), torch.randn(T, D), dynamic=True)
