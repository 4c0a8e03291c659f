"""Weights that are zero where a mask says so: no expert takes these slots, such as those of experts of other ranks."""

import random
import sys
from functools import partial

import pytest
import torch
from torch import fx, nn

from moeblaze_ops import compile as switch
from tests.corpus.zoo.catalogue import grouped_mm_fallback
from tests.tools.rewrite_harness import check_against_eager, rewriting_backend, rewritten_in
from tests.tools.sharded_layers import assert_close, train

T, D, HIDDEN, E, K, WORLD = 11, 6, 5, 3, 3, 9


class Layer(nn.Module):
    """Experts of one rank, batched by slot, after ``mask(ids, weights)`` of choices among the experts of all ranks."""

    def __init__(self, mask, clamps=True):
        super().__init__()
        self.router = nn.Linear(D, WORLD, bias=False)
        self.up = nn.Parameter(torch.randn(E, 2 * HIDDEN, D))
        self.down = nn.Parameter(torch.randn(E, D, HIDDEN))
        self.mask, self.clamps = mask, clamps

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        ids, weights = self.mask(ids, weights)
        ids, weights = ids.reshape(-1), weights.reshape(-1)
        if self.clamps:
            weights, ids = weights.masked_fill(ids >= E, 0.0), ids.clamp(0, E - 1)
        gate, up = torch.bmm(self.up[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[ids], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.unsqueeze(-1)).view(*x.shape[:1], K, D).sum(1)

    def own(self, x):
        """How many slots have a weight that no mask has made zero."""
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        ids, weights = self.mask(ids, weights)
        return int(((weights != 0) & ((ids < E) | (not self.clamps))).sum())


class Sorted(Layer):
    """Rows sorted by expert, in grouped products that leave those behind the last group as they were."""

    def masked(self, rows, ids):
        return rows.masked_fill(ids >= E, 0.0)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        ids, weights = self.mask(ids, weights)
        return self.combine(x, weights, ids)

    def combine(self, x, weights, ids):
        ids, order = torch.sort(ids.reshape(-1))
        ends = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        ids = ids.unsqueeze(-1)
        rows = self.masked(x[order // K], ids)
        rows = self.masked(grouped_mm_fallback(rows, self.up.transpose(1, 2), ends), ids)
        gate, up = rows.chunk(2, -1)
        rows = self.masked(grouped_mm_fallback(nn.functional.silu(gate) * up, self.down.transpose(1, 2), ends), ids)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        return rows[order.argsort()].view(*x.shape[:1], K, D).sum(1)


class Looped(Layer):
    """A loop over the experts that have tokens, which skips the number behind the last one."""

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        ids, weights = self.mask(ids, weights)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = nn.functional.one_hot(ids, E + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == E:
                continue
            slot, token = torch.where(mask[e])
            gate, up = nn.functional.linear(x[token], self.up[e]).chunk(2, -1)
            y = nn.functional.linear(nn.functional.silu(gate) * up, self.down[e])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def owner_differs(ids, weights):
    foreign = (ids // E) != 1
    return torch.where(foreign, E, ids % E), weights.masked_fill(foreign, 0.0)


def range_of_ids(ids, weights):
    here = (ids >= 2) & (ids < 5)
    return torch.where(here, ids - 2, E), weights * here


def filled_where_foreign(ids, weights):
    foreign = ~((ids >= 2) & (ids < 5))
    return (ids - 2).masked_fill(foreign, E), weights.masked_fill(foreign, 0.0)


MASKS = (owner_differs, range_of_ids, filled_where_foreign)


class _Slots(fx.Interpreter):
    used = 0

    def call_function(self, target, args, kwargs):
        if target is torch.ops.moeblaze.dispatch.default:
            self.used += int(((args[0] >= 0) & (args[0] < E)).sum())
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize(("mask", "clamps"), [*zip(MASKS, (True, False, True), strict=True)])
def test_slots_of_other_ranks(fp64, mask, clamps):
    """They are computed by nobody, and gradients are those of eager mode."""

    def within(ids, weights):
        ids, weights = mask(ids, weights)
        return (ids, weights) if clamps else (ids.clamp(0, E - 1), weights)

    layer, x = Layer(within, clamps), torch.randn(T, D)
    backend = check_against_eager(layer, x)
    assert len(backend.rewritten) == 1 and not backend.reasons
    slots = _Slots(backend.modules[0])
    named = {"x": x, "router": layer.router.weight, "up": layer.up, "down": layer.down}
    names = [node.name for node in slots.module.graph.find_nodes(op="placeholder")]
    slots.run(*(next(value for key, value in named.items() if f"_{key}_" in name) for name in names))
    assert slots.used == layer.own(x) < T * K


def drawn(seed):
    """A mask and ids of any kind: of this slot, of another one, of numbers; written in one way or another, or several."""
    choice = random.Random(seed)
    kinds = choice.choices(("owner", "range", "large", "next slot", "weights"), k=choice.choice([1, 1, 2]))
    ways = choice.choices(("fill", "times", "where"), k=2)
    of_ids = choice.choice(("modulo", "clamp", "where"))

    def mask(ids, weights):
        for kind, way in zip(kinds, ways, strict=False):
            if kind == "owner":
                off = (ids // E) != 1
            elif kind == "range":
                off = (ids < 2) | (ids >= 6)
            elif kind == "next slot":
                off = ids.roll(1, -1) >= E
            else:
                off = ids > 4 if kind == "large" else weights < 0.1
            if way == "where":
                weights = torch.where(off, 0.0, weights)
            else:
                weights = weights.masked_fill(off, 0.0) if way == "fill" else weights * ~off
        if of_ids == "where":
            return torch.where(ids < E, ids, 0), weights
        return (ids % E if of_ids == "modulo" else ids.clamp(0, E - 1)), weights

    return mask


@pytest.mark.parametrize("mask", MASKS)
def test_grouped_rows_of_no_expert(fp64, mask):
    backend = check_against_eager(Sorted(mask), torch.randn(T, D))
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize("mask", MASKS)
def test_a_loop_without_the_number_of_no_expert(fp64, mask):
    torch._dynamo.reset()
    layer, x = Looped(mask), torch.randn(T, D)
    with switch.recording() as records, rewriting_backend() as backend:
        assert_close(train(layer, torch.compile(layer, backend=backend), x), train(layer, layer, x))
    assert len(rewritten_in(records)) == 1


def skipped(ids, weights, *, to=0, number=E, at=None, value=0.0):
    """ZAYA: who chose the number behind the last expert goes to the first one, with a weight of zero."""
    return ids.masked_fill(ids == number, to), weights.masked_fill(ids == (number if at is None else at), value)


@pytest.mark.parametrize(("changed", "top_k"), [
    ({}, 1), ({}, K), ({"to": 1}, K), ({"at": 0}, K), ({"at": 0, "to": 2}, 1), ({"value": 2.0}, K), ({"value": 2.0, "to": E}, K),
])  # fmt: skip
def test_tokens_that_chose_no_expert_go_to_another_with_a_weight_of_zero(fp64, monkeypatch, changed, top_k):
    """And with any other number, if something else is masked. Where all that is masked is zero it is the same layer."""
    monkeypatch.setattr(sys.modules[__name__], "WORLD", E + 1)
    monkeypatch.setattr(sys.modules[__name__], "K", top_k)
    layer, x = Looped(partial(skipped, **changed)), torch.randn(T, D)
    for rows in (x, x[:1], x[:1].expand(4, D)) if not changed or "at" in changed else (x,):
        torch._dynamo.reset()
        with switch.recording() as records, rewriting_backend() as backend:
            compiled = torch.compile(layer, backend=backend)
            assert_close(train(layer, compiled, rows), train(layer, layer, rows))
            assert compiled(x[:0]).shape == (0, D)
        assert changed or len(rewritten_in(records)) >= 1


class Filled(Layer):
    """A loop over all experts, which fills the weights of others, or asks how often each expert was chosen."""

    def __init__(self, mask, counts):
        super().__init__(mask)
        self.counts = counts

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        ids, weights = self.mask(ids, weights)
        counts = torch.bincount(ids.flatten(), minlength=E) if self.counts else None
        out = torch.zeros_like(x)
        for e in range(E):
            if counts is None:
                share = weights.masked_fill(ids != e, 0).sum(-1, keepdim=True)
                out = out + torch.sigmoid(x @ self.up[e].T) @ torch.cat([self.down[e], self.down[e]], 1).T * share
            elif counts[e] > 0:
                token, slot = torch.where(ids == e)
                y = torch.sigmoid(x[token] @ self.up[e].T) @ torch.cat([self.down[e], self.down[e]], 1).T
                out = out.index_add(0, token, y * weights[token, slot, None])
        return out


@pytest.mark.parametrize(("counts", "number", "top_k"), [(False, E, 1), (False, E, K), (True, E, 1), (True, E - 1, K)])
def test_ids_that_were_filled(fp64, monkeypatch, counts, number, top_k):
    """Of a number behind the experts, or of the last of them, which no token has then."""
    monkeypatch.setattr(sys.modules[__name__], "WORLD", number + 1)
    monkeypatch.setattr(sys.modules[__name__], "K", top_k)
    torch._dynamo.reset()
    layer, x = Filled(partial(skipped, number=number), counts), torch.randn(T, D)
    with switch.recording() as records, rewriting_backend() as backend:
        assert_close(train(layer, torch.compile(layer, backend=backend), x), train(layer, layer, x))
    assert len(rewritten_in(records)) == 1


@pytest.mark.parametrize("layer", [Layer, Sorted])
def test_more_slots_than_experts_of_this_rank(fp64, monkeypatch, layer):
    monkeypatch.setattr(sys.modules[__name__], "E", K - 1)
    assert len(check_against_eager(layer(owner_differs), torch.randn(T, D)).rewritten) == 1


class Given(Sorted):
    """Its caller has chosen, and masked the weights."""

    def forward(self, x, weights, ids):
        return self.combine(x, weights, ids)


def test_ids_that_a_caller_gives(fp64):
    weights, ids = torch.randn(T, WORLD).softmax(-1).topk(K, -1)
    ids, weights = owner_differs(ids, weights)
    assert len(check_against_eager(Given(owner_differs), torch.randn(T, D), weights, ids).rewritten) == 1 and (ids == E).any()


class Fewer(Sorted):
    """The tokens of the last expert are masked as well."""

    def masked(self, rows, ids):
        return rows.masked_fill(ids >= E - 1, 0.0)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_an_expert_stays(fp64, mask):
    check_against_eager(Fewer(mask), torch.randn(T, D))


def range_from_too_low(ids, weights):
    here = (ids >= 1) & (ids < 5)
    return torch.where(here, ids - 2, E), weights * here


def test_ids_that_may_be_negative_stand_before_the_first_expert(fp64):
    assert not check_against_eager(Sorted(range_from_too_low), torch.randn(T, D)).rewritten


@pytest.mark.parametrize("seed", range(12))
def test_any_mask_is_right(fp64, seed):
    """Whatever is masked by whatever, results and gradients are those of eager mode."""
    torch.manual_seed(seed)
    check_against_eager(Layer(drawn(seed), clamps=bool(seed % 2)), torch.randn(T, D))
