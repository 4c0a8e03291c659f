"""Experts without projections, which give the token, zeros or a vector: as part of a layer, and what is no such expert."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moeblaze_ops
from moeblaze_ops import config
from tests.corpus import zero_computation as corpus
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import OLD_SPELLINGS, check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

KINDS = {kind: (kind,) * corpus.Z for kind in corpus.KINDS} | {"all": ("identity", "constant", "zero", "mixture", "constant")}
PLACES = ("behind", "in front", "mixed")


_LOOPS = OLD_SPELLINGS - {"where"}
"""``where`` gives the experts their places where others stand between them."""


# A loop over all rows has experts of each kind, others have one or two in turns.
CASES = [
    *((corpus.dense, kind, PLACES[number % 3]) for number, kind in enumerate(KINDS)),
    (corpus.dense_in_place, "all", "mixed"), (corpus.dense_stack, "mixture", "behind"),
    (corpus.dense_slots, "identity", "behind"), (corpus.loop, "constant", "mixed"), (corpus.loop_on_residual, "zero", "in front"),
    (corpus.loop_unweighted, "identity", "behind"), (corpus.loop_unweighted, "zero", "in front"),
]  # fmt: skip


def _check(layer, T: int = 20):
    backend = check_against_eager(layer, torch.randn(T, zoo.D))
    (found,) = backend.rewritten
    assert found.E == zoo.E and not backend.reasons
    assert not _LOOPS & set(backend.operators())
    return found


@pytest.mark.parametrize(("combine", "kind", "place"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_rewritten(combine, kind, place):
    _check(corpus.Layer(combine, KINDS[kind], place))


@pytest.mark.parametrize(("kind", "place"), zip(["identity", "zero", "constant"], PLACES, strict=True))
def test_places(kind, place, monkeypatch):
    """No id of these is taken for a wrong one."""
    monkeypatch.setattr(config, "check_expert_ids", True)
    _check(corpus.Layer(corpus.loop, KINDS[kind], place))


@pytest.mark.parametrize(("kind", "T"), [("identity", 1), ("constant", 1), ("mixture", 0)])
def test_few_tokens(kind, T):
    _check(corpus.Layer(corpus.dense, KINDS[kind], "in front"), T)


@pytest.mark.parametrize(("count", "K"), [(1, 1), (1, 3), (6, 4), (6, 5)])
def test_sizes(count, K):
    _check(corpus.Layer(corpus.loop, ("identity",) * count, K=K))


def test_weights_on_input():
    _check(corpus.Layer(corpus.loop_weights_on_input, KINDS["identity"]))


def test_tokens_that_projections_make():
    """What the tokens are made of is no expert of the layer."""

    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = zoo.GluMLP(), corpus.Layer(corpus.loop, KINDS["identity"])

        def forward(self, x):
            x = self.first(x)
            return self.second.combine(self.second, x, *self.second.router(x))

    backend = check_against_eager(Behind(), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert found.became.endswith(" -> 3 identity experts") and not backend.reasons


def test_two_layers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(corpus.Layer(corpus.dense, KINDS["identity"], place) for place in PLACES[:2])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    backend = check_against_eager(Two(), torch.randn(20, zoo.D))
    assert [found.E for found in backend.rewritten] == [zoo.E, zoo.E] and not backend.reasons


def test_explained():
    layer = corpus.Layer(corpus.dense, ("identity", "constant", "identity"))
    (found,) = moeblaze_ops.explain(layer, torch.randn(9, zoo.D)).candidates
    assert found.became == "expert_up(relu) -> expert_down -> 2 identity experts, 1 constant expert"


def test_terms_without_experts_behind_a_layer_hide_none_of_it():
    """As rotary embeddings of attention behind LongCat-Flash's: sums of masked terms, of which none is an expert."""

    class Behind(corpus.Layer):
        def forward(self, x):
            weights, ids = self.router(x)
            out = self.combine(self, x, weights, ids)
            first, second = ((ids == e).any(-1, keepdim=True) for e in range(2))
            return out.cos() * first + out.sin() * second

    (found,) = check_against_eager(Behind(corpus.loop, KINDS["identity"]), torch.randn(20, zoo.D)).rewritten
    assert found.became.endswith(" -> 3 identity experts")


def test_experts_behind_the_others_are_counted():
    (found,) = moeblaze_ops.explain(corpus.Layer(corpus.loop, ("identity",) * 2), torch.randn(9, zoo.D)).candidates
    assert found.became == "expert_up(relu) -> expert_down -> 2 identity experts"


def test_ids_without_an_expert_are_named():
    layer = corpus.Layer(corpus.dense, ("zero", "zero", "identity"), "mixed")
    (found,) = moeblaze_ops.explain(layer, torch.randn(9, zoo.D)).candidates
    assert found.became == "expert_up(relu) -> expert_down -> 1 identity expert, none for ids 0, 3"


def test_low_precision():
    """As far from fp64 as eager mode, where its sum is in fp32."""
    layer, x = corpus.Layer(corpus.dense, ("identity", "constant", "zero")), torch.randn(40, zoo.D)
    expected = layer(x)
    layer, x = layer.bfloat16(), x.bfloat16()
    backend = check_against_eager(layer, x, tolerance=0.05)
    assert backend.rewritten
    torch.testing.assert_close(layer(x).double(), expected, atol=0.1, rtol=0.1)


class Stacked(nn.Module):
    """A router over E + Z numbers, and E experts, of which LongCat-Flash has the first projections for all numbers."""

    def __init__(self, combine):
        super().__init__()
        self.router, self.norm = zoo.Router(zoo.E + corpus.Z, 3), nn.RMSNorm(zoo.D)
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(zoo.E))
        self.gate_up = nn.Parameter(torch.randn(zoo.E + corpus.Z, 2 * zoo.FF, zoo.D) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF) * 0.2)
        self.vectors = nn.Parameter(torch.randn(corpus.Z, zoo.D))
        self.combine = combine

    def forward(self, x):
        x = self.norm(x)
        return self.combine(self, x, *self.router(x))


def _rows(weights, ids, e):
    token, slot = torch.where(ids == e)
    return token, weights[token, slot, None]


def _numbers():
    return range(zoo.E + corpus.Z)


def _layer(self, x, weights, ids, given, expert=None):
    """``expert`` and ``given`` are called with a number and the rows of its tokens."""
    out = torch.zeros_like(x)
    for e in _numbers():
        token, share = _rows(weights, ids, e)
        if e >= zoo.E:
            y = given(e, x[token])
        elif expert is None:
            y = self.experts[e](x[token])
        else:
            y = expert(e, x[token])
        out.index_add_(0, token, y * share)
    return out


def _projected(self, e, x):
    gate, up = F.linear(x, self.gate_up[e]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, self.down[e])


def stacked(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: x, lambda e, x: _projected(self, e, x))


def rows_of_one_parameter(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: self.vectors[e - zoo.E].expand_as(x))


def twice_the_token(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: 2 * x)


def one_number_twice(self, x, weights, ids):
    out = _layer(self, x, weights, ids, lambda e, x: x)
    token, share = _rows(weights, ids, zoo.E)
    return out.index_add(0, token, x[token] * share)


def also_of_an_expert(self, x, weights, ids):
    """What its projections give is not all that the tokens of the last expert get."""
    out = _layer(self, x, weights, ids, lambda e, x: x)
    token, share = _rows(weights, ids, zoo.E - 1)
    return out.index_add(0, token, x[token] * share)


def with_a_gap(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: x if e != zoo.E + 1 else x * 0)


def an_expert_left_out(self, x, weights, ids):
    return sum(self.experts[e](x) * (weights * (ids == e)).sum(-1, keepdim=True) for e in (0, 1, 3))


def stacked_expert_left_out(self, x, weights, ids):
    return sum(_projected(self, e, x) * (weights * (ids == e)).sum(-1, keepdim=True) for e in range(1, zoo.E))


def weighted_by_token(self, x, weights, ids):
    """Of another token it would be another function: here it is the same for all features."""
    by_token, out = x.mean(-1, keepdim=True), torch.zeros_like(x)
    for e in _numbers():
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + (self.experts[e](x) if e < zoo.E else x * by_token) * share
    return out


@pytest.mark.parametrize(
    "combine",
    [
        stacked, rows_of_one_parameter, twice_the_token, one_number_twice, also_of_an_expert, with_a_gap, an_expert_left_out,
        stacked_expert_left_out, weighted_by_token,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_other_numbers_and_factors(combine):
    backend = check_against_eager(Stacked(combine), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert found.E in (zoo.E, zoo.E - 1) and not backend.reasons
    assert not _LOOPS & set(backend.operators())


def of_another_tensor(self, x, weights, ids):
    out, other = torch.zeros_like(x), x.sin()
    for e in _numbers():
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, (self.experts[e](x[token]) if e < zoo.E else other[token]) * share)
    return out


def of_another_token(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: x.flip(0))


def a_vector_of_the_tokens(self, x, weights, ids):
    mean = x.mean(0)
    return _layer(self, x, weights, ids, lambda e, x: mean.expand_as(x).cos())


def a_vector_for_each_token(self, x, weights, ids):
    return _layer(self, x, weights, ids, lambda e, x: self.vectors[e - zoo.E] * x)


def weighted_twice(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in _numbers():
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, self.experts[e](x[token]) * share if e < zoo.E else x[token] * share.square())
    return out


def without_weights(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in _numbers():
        token, share = _rows(weights, ids, e)
        out.index_add_(0, token, self.experts[e](x[token]) * share if e < zoo.E else x[token])
    return out


def other_ids(self, x, weights, ids):
    out, shifted = torch.zeros_like(x), ids.roll(1, dims=0)
    for e in _numbers():
        token, share = _rows(weights, ids if e < zoo.E else shifted, e)
        out.index_add_(0, token, (self.experts[e](x[token]) if e < zoo.E else x[token]) * share)
    return out


def stored(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in _numbers():
        token, share = _rows(weights, ids, e)
        if e < zoo.E:
            out.index_add_(0, token, self.experts[e](x[token]) * share)
        else:
            out[token] = x[token] * share
    return out


def of_one_slot_alone(self, x, weights, ids):
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        for e in _numbers():
            if e < zoo.E or k == 0:
                share = (weights[:, k] * (ids[:, k] == e)).unsqueeze(-1)
                out = out + (self.experts[e](x) if e < zoo.E else x) * share
    return out


NEAR_MISSES = (
    of_another_tensor, of_another_token, a_vector_of_the_tokens, a_vector_for_each_token, weighted_twice, without_weights,
    other_ids, stored,
)  # fmt: skip
"""Of these the sum of the experts with projections is a layer, and the rest stays as it is."""


@pytest.mark.parametrize("combine", [*NEAR_MISSES, of_one_slot_alone], ids=lambda f: f.__name__)
def test_near_misses(combine):
    backend = check_against_eager(Stacked(combine), torch.randn(20, zoo.D))
    assert not backend.rewritten or combine in NEAR_MISSES
    assert not any("identity" in found.became or "constant" in found.became for found in backend.rewritten)
    assert combine is of_one_slot_alone or {"index_add_", "setitem"} & set(backend.operators())


@pytest.mark.parametrize(
    ("combine", "detail"),
    [
        (
            of_another_tensor,
            "an expert gives 'sin', which is neither two projections of its tokens, nor the tokens, nor one vector",
        ),
        (weighted_twice, ""),
        (other_ids, "an expert without projections is chosen by other ids than the others"),
    ],
    ids=["of_another_tensor", "weighted_twice", "other_ids"],
)
def test_what_is_said(combine, detail, monkeypatch):
    """Where the experts with projections come last, no sum of them alone is there."""
    monkeypatch.setattr(f"{__name__}._numbers", lambda: [*range(zoo.E, zoo.E + corpus.Z), *range(zoo.E)])
    backend = check_against_eager(Stacked(combine), torch.randn(20, zoo.D))
    assert not backend.rewritten
    assert [candidate.detail for candidate in backend.candidates] == [detail]


def test_base_that_other_ids_mask():
    """What a sum starts from is no expert of it, though a comparison decides which tokens have it."""

    class Masked(corpus.Layer):
        def forward(self, x):
            out = x * (x[:, 0].round().long() == 0).unsqueeze(-1)
            weights, ids = self.router(x)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out

    _check(Masked(corpus.loop, ("identity", "zero")))


def test_by_hand():
    """As ``docs/routing.md`` shows it."""
    layer, x = corpus.Layer(lambda self, *routed: routed, ("identity", "identity", "constant")), torch.randn(20, zoo.D)
    x, weights, ids = layer(x)
    w_up, w_down = (torch.stack([getattr(e, name) for e in layer.experts[: zoo.E]]) for name in ("up", "down"))
    experts, constant = ids.masked_fill(ids >= zoo.E, -1), ids == zoo.E + 2
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, activation="relu")
    out = out + x * weights.masked_fill((ids < zoo.E) | constant, 0).sum(-1, keepdim=True)
    out = out + layer.experts[-1].vector * weights.masked_fill(~constant, 0).sum(-1, keepdim=True)
    torch.testing.assert_close(out, corpus.loop(layer, x, weights, ids))
