"""Which ids are known to be numbers of experts."""

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.capture import row_groups
from moeblaze_ops.lowering.obligations.check import unknown_ids, unknown_masks

T, E, K = 6, 4, 2


def captured(make_ids, count):
    """The graph of a loop over the experts among the ids that ``make_ids`` makes of scores."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return lambda *args: (torch.zeros(()),)  # the checks of wrong ids would raise

    def layer(scores):
        ids = make_ids(scores)
        return sum((ids == e).sum() for e in row_groups.numbers(ids, count))

    torch._dynamo.reset()
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(T, E))
    return graphs[0]


def checks(gm) -> int:
    return sum(node.target is torch._assert_async for node in gm.graph.nodes)


KNOWN = {
    "topk": lambda scores: scores.topk(K).indices,
    "argmax": lambda scores: scores.argmax(-1),
    "view": lambda scores: scores.topk(K).indices.flatten(),
    "column": lambda scores: scores.topk(K).indices[:, 0],
}


@pytest.mark.parametrize("make_ids", KNOWN.values(), ids=KNOWN.keys())
def test_checks_of_known_ids_are_removed(make_ids):
    gm = captured(make_ids, E)
    assert checks(gm) == 1
    assert not unknown_ids(gm)
    assert checks(gm) == 0
    gm.graph.lint()


UNKNOWN = {
    "computed": lambda scores: scores.clamp(0, 1).long(),
    "shifted": lambda scores: scores.topk(K).indices - 1,
    "negated": lambda scores: -scores.topk(K).indices,
    "written": lambda scores: scores.topk(K).indices.sub_(1),
    "filled": lambda scores: scores.topk(K).indices.masked_fill(scores[:, :K] > 0, -1),
}


@pytest.mark.parametrize("make_ids", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_checks_of_other_ids_stay(make_ids):
    gm = captured(make_ids, E)
    assert unknown_ids(gm)
    assert checks(gm) == 1


def test_fewer_experts_than_ids_may_name():
    assert unknown_ids(captured(KNOWN["topk"], E - 1))
    assert not unknown_ids(captured(KNOWN["topk"], E + 1))


def test_numbers():
    ids = torch.tensor([[0, 3], [2, 0]])
    assert row_groups.numbers(ids, E) == range(E)
    for wrong in (ids + 1, ids - 1):
        with pytest.raises(RuntimeError):
            row_groups.numbers(wrong, E)


def masked(make_mask):
    """The graph of a loop over the experts that a mask of ids hits."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return lambda *args: (torch.zeros(()),)

    def layer(scores):
        mask = make_mask(F.one_hot(scores.topk(K).indices, E), scores)
        return sum(mask[:, :, e].sum() for e in row_groups.masked_numbers(mask.permute(2, 1, 0), 0, 3))

    torch._dynamo.reset()
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(T, E))
    return graphs[0]


COUNTS = {
    "one-hot": lambda chosen, scores: chosen,
    "with room": lambda chosen, scores: chosen * (chosen.cumsum(0) <= 2),
    "of some tokens": lambda chosen, scores: chosen * (scores[:, :1, None] > 0),
    "truth values": lambda chosen, scores: chosen.bool(),
}


@pytest.mark.parametrize("make_mask", COUNTS.values(), ids=COUNTS.keys())
def test_checks_of_masks_are_removed(make_mask):
    gm = masked(make_mask)
    assert checks(gm) == 1
    assert not unknown_masks(gm)
    assert checks(gm) == 0
    gm.graph.lint()


OF_BOTH_SIGNS = {
    "difference": lambda chosen, scores: chosen - chosen.roll(1, dims=0),
    "negated": lambda chosen, scores: -chosen,
    "signs": lambda chosen, scores: chosen * scores[:, :1, None].sign().long(),
    "written": lambda chosen, scores: (chosen * 1).sub_(1),
}


@pytest.mark.parametrize("make_mask", OF_BOTH_SIGNS.values(), ids=OF_BOTH_SIGNS.keys())
def test_checks_of_other_masks_stay(make_mask):
    gm = masked(make_mask)
    assert unknown_masks(gm)
    assert checks(gm) == 1


def test_masked_numbers():
    mask = F.one_hot(torch.tensor([[0, 3], [2, 0]]), E).permute(2, 1, 0)
    assert row_groups.masked_numbers(mask, 0, 3) == row_groups.masked_numbers(mask.permute(2, 1, 0), 2, 3) == range(E)
    with pytest.raises(RuntimeError):
        row_groups.masked_numbers(-mask, 0, 3)
    with pytest.raises(ValueError, match="must have 2 axes, got 3"):
        row_groups.masked_numbers(mask, 0, 2)


def test_hit_numbers():
    ids = torch.tensor([[0, 3], [2, 0]])
    mask = F.one_hot(ids, E + 1).permute(2, 1, 0)
    assert row_groups.hit_numbers(mask, ids, E + 2) == range(E + 1)
    assert row_groups.hit_numbers(mask, ids, E) == range(E)
    with pytest.raises(RuntimeError):
        row_groups.hit_numbers(mask, ids, E - 1)
