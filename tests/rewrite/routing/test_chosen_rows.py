"""Experts whose tokens are stored by one column of indices, kept by ``torch.where``, or chosen by a sort of all scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.modules import flat
from tests.tools.rewrite_harness import assert_replaced, check_against_eager


def megatron(self, x, weights, ids):
    """One expert a token; ``nonzero`` gives rows ``[n, 1]``."""
    out = torch.empty_like(x)
    for e, expert in enumerate(self.experts):
        rows = (ids[:, 0] == e).nonzero()
        out[rows, :] = expert(x[rows, :])
    return out * weights


def column_of_rows(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        rows = (ids[:, 0] == e).nonzero()
        out[rows, ...] += weights[rows] * expert(x[rows])
    return out


def where_added(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out = torch.where((ids == e).any(-1, keepdim=True), out + share * expert(x), out)
    return out


def where_replaced(self, x, weights, ids):
    """What a slot gives is that of the one expert it has."""
    out = torch.zeros_like(x)
    for k in range(ids.shape[-1]):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = torch.where((ids[..., k] == e).unsqueeze(-1), expert(x), y)
        out = out + weights[..., k, None] * y
    return out


def where_in_place(self, x, weights, ids):
    y = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        y = y.masked_fill(ids == e, 0) + torch.where(ids == e, expert(x), 0.0)
    return y * weights


def sorted_scores(self, x, weights, ids, descending=True, dim=-1):
    shape = x.shape
    x, _, _ = flat(x, weights, ids)
    shares, chosen = torch.sort(self.router.gate(x).softmax(-1), dim=dim, descending=descending)
    shares, chosen = shares[:, : ids.shape[-1]], chosen[:, : ids.shape[-1]]
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        out[token] += shares[token, slot, None] * expert(x[token])
    return out.view(shape)


def argsorted_scores(self, x, weights, ids):
    shape = x.shape
    x, _, _ = flat(x, weights, ids)
    scores = self.router.gate(x).softmax(-1)
    chosen = scores.argsort(dim=1, descending=True)[:, : ids.shape[-1]]
    outs, rows = torch.stack([expert(x) for expert in self.experts]), torch.arange(x.shape[0])
    shares = scores.gather(1, chosen)
    return sum(shares[:, k, None] * outs[chosen[:, k], rows] for k in range(ids.shape[-1])).view(shape)


def taken_along(self, x, weights, ids, axis=-2):
    """The indices are those of whole rows, broadcast along the features."""
    outs = torch.stack([expert(x) for expert in self.experts], dim=axis)
    rows = torch.take_along_dim(outs, ids.unsqueeze(-1), dim=axis)
    return (rows * weights.unsqueeze(-1)).sum(axis)


def first_true_slot(self, x, weights, ids, other=0, dim=-1, keepdim=True):
    """The slot with which a token chose the expert is where the largest of its mask is."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        token = mask.any(dim=-1).nonzero().squeeze(-1)
        slot = (ids == e + other)[token].int().argmax(dim=dim, keepdim=keepdim)
        share = weights[token].gather(-1, slot) if keepdim else weights[token, slot].unsqueeze(-1)
        out.index_add_(0, token, expert(x[token]) * share)
    return out.view(shape)


def first_true_slot_without_its_axis(self, x, weights, ids):
    return first_true_slot(self, x, weights, ids, keepdim=False)


ONE_EXPERT = (megatron, column_of_rows, where_in_place)
SEVERAL = (
    where_added, where_replaced, sorted_scores, argsorted_scores, taken_along, first_true_slot, first_true_slot_without_its_axis,
)  # fmt: skip


@pytest.mark.parametrize("combine", ONE_EXPERT, ids=lambda f: f.__name__)
def test_one_expert_a_token(fp64, combine):
    assert_replaced(check_against_eager(zoo.ModuleListMoE(combine, K=1), torch.randn(10, zoo.D)))


@pytest.mark.parametrize(("combine", "K"), [
    *((combine, 2) for combine in SEVERAL), (where_replaced, 1), (argsorted_scores, 1), (taken_along, 1),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_experts_of_a_token(fp64, combine, K):
    backend = check_against_eager(zoo.ModuleListMoE(combine, K=K), torch.randn(2, 5, zoo.D))
    assert [candidate.K for candidate in backend.rewritten] == [K] and not backend.reasons


class Function(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.run = forward

    def forward(self, x):
        return self.run(x)


PICKED = {
    "by two subscripts": "torch.stack(outs)[ids[:, 0], torch.arange(len(x))]",
    "of the middle axis": "torch.stack(outs, 1)[torch.arange(len(x)), ids[:, 0]]",
    "by gather": "torch.stack(outs, 1).gather(1, ids[:, :, None].expand(-1, -1, x.shape[-1])).squeeze(1)",
    "of the last axis": "torch.stack(outs, -1).gather(-1, ids[..., None].expand(-1, x.shape[-1], 1))[..., 0]",
    "along": "torch.take_along_dim(torch.stack(outs, 1), ids.unsqueeze(-1), 1)[:, 0]",
}
NOT_PICKED = {
    "next token": ("torch.arange(len(x))]", "torch.arange(len(x)).roll(1)]"),
    "counted from the end": ("ids[:, 0]", "ids[:, 0] - 1"),
    "the outputs so far": ("torch.stack(outs)", "torch.stack(outs).cumsum(0)"),
    "an output of all tokens": ("torch.stack(outs)", "torch.stack([*outs[:-1], outs[-1].flip(0)])"),
}


def picks(line):
    """A layer of one expert a token that is no sum: ``line`` picks its output, weighted or not."""
    namespace = {"torch": torch}
    exec(f"def picked(self, x, weights, ids):\n outs = [expert(x) for expert in self.experts]\n return {line}", namespace)
    return namespace["picked"]


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("name", PICKED)
def test_one_of_the_outputs_is_picked(fp64, name, weighted):
    layer = zoo.ModuleListMoE(picks(PICKED[name] + " * weights" * weighted), K=1)
    assert_replaced(check_against_eager(layer, torch.randn(10, zoo.D)))


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("name", NOT_PICKED)
def test_what_is_not_picked_of_the_outputs(fp64, name, weighted):
    line = PICKED["by two subscripts"]
    assert line.count(NOT_PICKED[name][0]) == 1
    layer = zoo.ModuleListMoE(picks(line.replace(*NOT_PICKED[name]) + " * weights" * weighted), K=1)
    assert not check_against_eager(layer, torch.randn(10, zoo.D)).rewritten


def test_picked_rows_are_no_layer():
    """Neither tokens that are kept, nor one of several states of each: no experts, hence nothing to say of them."""
    states, at = torch.randn(3, 10, 4), torch.randint(3, (10,))
    kept = torch.rand(3, 10).topk(5, -1).indices[..., None].expand(-1, -1, 4)
    backend = check_against_eager(Function(lambda s: s.gather(1, kept) * 2), states)
    assert not backend.candidates
    stacked = Function(lambda s: torch.stack([s[0], s[1].sin(), s[2].cos()])[at, torch.arange(10)] * 2)
    assert not check_against_eager(stacked, states).candidates


class GatedLinearUnit(nn.Module):
    """``torch.nn.GLU`` over ``dim`` between two layers."""

    def __init__(self, dim: int = -1):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.D, 2 * zoo.FF), nn.Linear(zoo.FF, zoo.D)
        self.dim = dim

    def forward(self, x):
        if self.dim == -1:
            return self.down(F.glu(self.up(x)))
        return self.down(F.glu(self.up(torch.cat([x, x.flip(0)])), dim=0)[:, : zoo.FF])


def test_glu_of_packed_projections(fp64):
    backend = check_against_eager(zoo.ModuleListMoE(zoo.masked_sum, expert=GatedLinearUnit), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


def test_glu_of_tokens(fp64):
    """Its gate is another token's."""
    backend = check_against_eager(
        zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: GatedLinearUnit(dim=0)), torch.randn(10, zoo.D)
    )
    assert not backend.rewritten


@pytest.mark.parametrize("axes", [([1], [1]), ([-1], [-2])])
def test_tensordot(fp64, axes):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(zoo.D, zoo.E)
            self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF))
            self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D))

        def forward(self, x):
            weights, ids = self.router(x).softmax(-1).topk(zoo.K)
            scores = torch.zeros(x.shape[0], zoo.E).scatter(1, ids, weights)
            h = torch.tensordot(x, self.up, dims=axes).relu()
            return torch.tensordot(h * scores.unsqueeze(-1), self.down, dims=2)

    assert_replaced(check_against_eager(Layer(), torch.randn(10, zoo.D)))


# Near misses.


def megatron_of_several(self, x, weights, ids):
    """The last expert's rows stay where a token has several."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        rows = (ids == e).any(-1).nonzero()
        out[rows, :] = expert(x[rows, :])
    return out * weights.sum(-1, keepdim=True)


def rows_of_the_next(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        rows = (ids[:, 0] == e).nonzero()
        out[rows, :] = expert(x[(rows + 1) % x.shape[0], :])
    return out


def where_keeps_the_last(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = torch.where((ids == e).any(-1, keepdim=True), weights[:, :1] * expert(x), out)
    return out


def where_forgets(self, x, weights, ids):
    """What was added before is dropped where the expert is not chosen."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = torch.where((ids == e).any(-1, keepdim=True), out, out + expert(x))
    return out * weights[:, :1]


def sorted_upwards_by_token(self, x, weights, ids):
    """Along the tokens, so that a token may have one expert twice."""
    order = self.router.gate(x).argsort(dim=0)[:, : ids.shape[-1]] % len(self.experts)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(order == e)
        out[token] += weights[token, slot, None] * expert(x[token])
    return out


def taken_for_another_slot(self, x, weights, ids):
    return taken_along(self, x, weights, ids.sort(-1).values)


def read_elsewhere_than_stored(self, x, weights, ids):
    """What a token gets is added to what the one before it has."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out[token] = out[token - 1] + weights[token, slot, None] * expert(x[token])
    return out


def read_before_the_last_expert(self, x, weights, ids):
    before = out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        before, out = out, out.index_put((token,), before[token] + weights[token, slot, None] * expert(x[token]))
    return out


def first_slot_of_another_expert(self, x, weights, ids):
    return first_true_slot(self, x, weights, ids, other=1)


def first_true_slot_of_repeated_ids(self, x, weights, ids):
    return first_true_slot(self, x, weights, ids // 2 * 2)


def first_true_of_the_rows(self, x, weights, ids):
    """Where the largest of each slot is among the rows of the expert."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        token = mask.any(dim=-1).nonzero().squeeze(-1)
        padded = torch.cat([mask[token], mask.new_ones(1, ids.shape[-1])])
        slot = padded.int().argmax(dim=0)[:1] % ids.shape[-1]
        out.index_add_(0, token, expert(x[token]) * weights[token, slot].unsqueeze(-1))
    return out


OTHERS = (
    first_slot_of_another_expert, first_true_slot_of_repeated_ids, first_true_of_the_rows,
    taken_for_another_slot, read_elsewhere_than_stored, read_before_the_last_expert, megatron_of_several, rows_of_the_next,
    where_keeps_the_last, where_forgets, sorted_upwards_by_token,
)  # fmt: skip


@pytest.mark.parametrize("combine", OTHERS, ids=lambda f: f.__name__)
def test_near_miss_is_left_alone(fp64, combine):
    assert not check_against_eager(zoo.ModuleListMoE(combine), torch.randn(10, zoo.D)).rewritten
