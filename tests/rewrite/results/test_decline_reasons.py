"""What is left alone says why in the words of who wrote it: the line, the construct, what would be recognised."""

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.lookalikes import LOOKALIKES
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, rewrite_of


def _in_two_widths(self, x, weights, ids):
    out = 0
    for e in range(self.E):
        for width in (slice(0, zoo.FF // 2), slice(zoo.FF // 2, zoo.FF)):
            hidden = F.silu(x @ self.w1[e, :, width]) * (x @ self.w3[e, :, width])
            out = out + hidden @ self.w2[e, width] * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def test_width_that_is_split():
    (layer,) = rewrite_of(zoo.StackedMoE(_in_two_widths, "split"), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "EXPERT_COVERAGE"
    assert "expert 0 adds two products to the sum" in layer.detail and "width F is split" in layer.detail


def _of_rows(function):
    def spelling(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            rows = function(x[token])
            y = (F.silu(rows @ self.w1[e]) * (rows @ self.w3[e])) @ self.w2[e]
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out

    return zoo.StackedMoE(spelling, "split")


@pytest.mark.parametrize(
    "name, function",
    {
        "tanh": torch.tanh,
        "layer_norm": lambda rows: F.layer_norm(rows, rows.shape[1:]),
    }.items(),
)
def test_a_function_of_selected_rows(name, function):
    (layer,) = rewrite_of(_of_rows(function), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "DIFFERENT_INPUTS"
    assert f"an expert reads '{name}' of the rows that it selects; compute it of all tokens first" in layer.detail


def test_a_projection_that_all_share_is_one_of_tokens():
    first = torch.randn(zoo.D, zoo.D)
    (layer,) = rewrite_of(_of_rows(lambda rows: torch.tanh(rows @ first)), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "DIFFERENT_INPUTS" and "compute it of all tokens first" in layer.detail


def _dropped_when_joined(self, x, weights, ids):
    order = ids.flatten().argsort()
    parts = x[order // ids.shape[1]].split(F.one_hot(ids.flatten(), self.E).sum(0).tolist())
    y = torch.cat([(F.silu(p @ self.w1[e]) * (p @ self.w3[e])) @ self.w2[e] for e, p in enumerate(parts)])
    y = F.dropout(y, 0.5) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // ids.shape[1], y)


def test_dropout_of_joined_outputs_is_told_so():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (layer,) = rewrite_of(zoo.StackedMoE(_dropped_when_joined, "split"), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "NOT_TWO_PROJECTIONS" and "dropout of rows of several experts" in layer.detail
    inner = _of_rows(lambda rows: rows).experts
    dropped = zoo.StackedMoE(lambda self, x, *routing: F.dropout(inner(self, x, *routing)), "split")
    backend = rewrite_of(dropped, torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


def _of_three(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def _mixture_of_three(self, x, weights, ids):
    return torch.einsum("te,ted->td", self.router.gate(x).softmax(-1), torch.stack([expert(x) for expert in self.experts], 1))


def _three_layers():
    return nn.Sequential(nn.Linear(zoo.D, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, zoo.D))


@pytest.mark.parametrize("combine", [_of_three, _mixture_of_three])
def test_three_projections_are_told_so(combine):
    """What stands between the first two is no function of the tokens that could be computed before they are selected."""
    layer = zoo.ModuleListMoE(combine, _three_layers)
    (left,) = rewrite_of(nn.Sequential(nn.Linear(zoo.D, zoo.D), layer), torch.randn(10, zoo.D)).candidates
    assert left.reason == "NOT_TWO_PROJECTIONS" and "three projections" in left.detail


def test_norm_of_rows_of_a_projection_is_one_of_tokens():
    def normed():
        return nn.Sequential(nn.LayerNorm(zoo.D), nn.Linear(zoo.D, 8), nn.ReLU(), nn.Linear(8, zoo.D))

    layer = zoo.ModuleListMoE(_of_three, normed)
    (left,) = rewrite_of(nn.Sequential(nn.Linear(zoo.D, zoo.D), layer), torch.randn(10, zoo.D)).candidates
    assert left.reason == "DIFFERENT_INPUTS" and "compute it of all tokens first" in left.detail


def test_a_number_in_place_of_weights_is_named():
    def doubled(self, x, weights, ids):
        chosen = ids[:, 0]
        return sum((chosen == e)[:, None] * (2.0 * expert(x)) for e, expert in enumerate(self.experts))

    (left,) = rewrite_of(zoo.ModuleListMoE(doubled), torch.randn(10, zoo.D)).candidates
    assert left.reason == "SLOT_WEIGHTS" and "the routing weights are the number 2; multiply" in left.detail


def _one_projection(self, x, weights, ids):
    shares = [(weights * (ids == e)).sum(-1, keepdim=True) for e in range(self.E)]
    return sum(x @ self.w1[e, :, : zoo.D] * share for e, share in enumerate(shares))


def _normed(self, x, weights, ids):
    shares = [(weights * (ids == e)).sum(-1, keepdim=True) for e in range(self.E)]
    return sum(F.rms_norm(F.silu(x @ self.w1[e]), (zoo.FF,)) @ self.w2[e] * share for e, share in enumerate(shares))


def test_experts_of_one_projection_are_told_so_wherever_they_stand():
    """What a block's tokens are made of, another layer of two projections or of one, makes no difference."""
    odd, whole = zoo.StackedMoE(_one_projection, "split"), zoo.stacked("dense_bmm")
    stack = torch.nn.ModuleList([odd, whole, odd, odd])

    def run(x):
        for layer in stack:
            x = x + layer(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        return x

    report = rewrite_of(run, torch.randn(10, zoo.D))
    assert len(report.rewritten) == 1
    left = [layer for layer in report.candidates if layer.reason]
    assert [layer.reason for layer in left] == ["NOT_TWO_PROJECTIONS"] * 3
    words = "experts of one projection each, without an activation, which no operator computes"
    assert {layer.detail for layer in left} == {words}


def test_experts_with_a_norm_are_not_experts_of_one_projection():
    (layer,) = rewrite_of(zoo.StackedMoE(_normed, "split"), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "NOT_TWO_PROJECTIONS"
    assert layer.detail == "'rms_norm' where a pointwise function of a projection is expected"


class _OverOneMLP(nn.Module):
    """MixLoRA: experts are what their adapters add to one MLP, whose products are computed once for each token."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(zoo.D, zoo.E), nn.Linear(zoo.D, zoo.FF), nn.Linear(zoo.FF, zoo.D)
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(zoo.D, 2), nn.Linear(2, zoo.FF)) for _ in range(zoo.E))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        out, h = torch.zeros_like(x), self.up(x)
        for e, adapter in enumerate(self.adapters):
            token, slot = torch.where(ids == e)
            y = self.down(F.silu(h[token] + adapter(x[token])))
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def test_experts_over_one_projection_are_told_so():
    (layer,) = rewrite_of(_OverOneMLP(), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "ACTIVATION"
    assert "experts share" in layer.detail and "computed once for each token" in layer.detail


class _Residual(nn.Module):
    """As adapters of recommenders have it."""

    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.D, zoo.FF, bias), nn.Linear(zoo.FF, zoo.D, bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) + x


def _residual_behind(self, x, weights, ids):
    out = sum(e.down(F.gelu(e.up(x))) * (weights * (ids == n)).sum(-1, keepdim=True) for n, e in enumerate(self.experts))
    return out + x * weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_that_add_their_input(bias):
    """What they are told to write computes the same, and is rewritten."""
    layer, x = zoo.ModuleListMoE(_of_three, lambda: _Residual(bias)), torch.randn(10, zoo.D)
    (left,) = rewrite_of(layer, x).candidates
    assert left.reason == "NOT_TWO_PROJECTIONS" and "x * weights.sum(-1, keepdim=True)" in left.detail
    expected, layer.combine = layer(x), _residual_behind
    torch.testing.assert_close(layer(x), expected)
    assert_replaced(check_against_eager(layer, x))


def test_experts_of_one_feature_are_not_the_features_of_one_expert():
    """As Doge and PEER have them: experts are two rows of embeddings each, and the sum over slots is that over features."""

    def of_one_feature(x, up, down, gate):
        weights, ids = (x @ gate).softmax(-1).topk(3, -1)
        hidden = torch.matmul(up[ids], x.unsqueeze(-1)).squeeze(-1)
        return torch.matmul((F.silu(hidden) * weights).unsqueeze(1), down[ids]).squeeze(1)

    (layer,) = rewrite_of(of_one_feature, *map(torch.randn, [(10, 6), (8, 6), (8, 6), (6, 8)])).candidates
    assert layer.reason == "NOT_TWO_PROJECTIONS" and layer.detail.startswith("experts of one feature each (F = 1)")


def _by_routing_map(self, x, weights, ids):
    chosen = torch.zeros(x.shape[0], self.E).scatter(1, ids, 1.0).bool()
    ends = chosen.sum(0).cumsum(0).flip(0).int()
    order = ids.view(-1).argsort()
    mm, rows = torch.ops.moe_zoo.grouped_mm_fallback, x[order // ids.shape[1]]
    y = mm(F.silu(mm(rows, self.w1, ends)) * mm(rows, self.w3, ends), self.w2, ends)
    return torch.zeros_like(x).index_add(0, order // ids.shape[1], y * weights.view(-1)[order, None])


def test_ends_of_groups_that_are_no_counts():
    (layer,) = rewrite_of(zoo.StackedMoE(_by_routing_map, "split"), torch.randn(10, zoo.D)).candidates
    line = _by_routing_map.__code__.co_firstlineno + 2
    assert layer.reason == "SAME_PERMUTATION" and layer.source.endswith(f"test_decline_reasons.py:{line}")
    assert "bincount(ids, minlength=E).cumsum(0)" in layer.detail


def _with_ids(turned, E=zoo.E):
    def spelling(self, x, weights, ids):
        ids = turned(ids)
        experts = ((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] for e in range(self.E))
        return sum(y * (weights * (ids == e)).sum(-1, keepdim=True) for e, y in enumerate(experts))

    return zoo.StackedMoE(spelling, "split", E=E)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_ids_of_few_bits_are_ids(fp64, dtype):
    assert_replaced(check_against_eager(_with_ids(lambda ids: ids.to(dtype)), torch.randn(10, zoo.D)))


def test_ids_of_too_few_bits_stay(caplog):
    (layer,) = rewrite_of(_with_ids(lambda ids: ids.to(torch.int8), E=130), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "OPERANDS" and "torch.int8, which has no number 129" in layer.detail
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@torch.library.custom_op("decline_reasons::add_rows", mutates_args=())
def add_rows(out: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return out.index_add(0, index, rows)


@torch.library.custom_op("decline_reasons::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


add_rows.register_fake(lambda out, index, rows: torch.empty_like(out))
doubled.register_fake(torch.empty_like)


def _by_loop(add, act=F.silu):
    def spelling(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            y = (act(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])) @ self.w2[e]
            out = add(out, token, y * weights[token, slot, None])
        return out

    return zoo.StackedMoE(spelling, "split")


def _grouped(self, x, weights, ids, add=lambda out, *rows: out.index_add(0, *rows)):
    mm, order = torch.ops.moe_zoo.grouped_mm_fallback, ids.view(-1).argsort()
    ends = torch.bincount(ids.view(-1), minlength=self.E).cumsum(0).int()
    rows = x[order // ids.shape[1]]
    y = mm(F.silu(mm(rows, self.w1, ends)) * mm(rows, self.w3, ends), self.w2, ends)
    return add(torch.zeros_like(x), order // ids.shape[1], y * weights.view(-1)[order, None])


def test_an_operator_of_a_library_is_named():
    with torch.no_grad():
        layer = zoo.StackedMoE(functools.partial(_grouped, add=add_rows), "split")
        (layer,) = rewrite_of(layer, torch.randn(10, zoo.D)).candidates
    assert layer.reason == "OTHER_TERMS"
    assert "'decline_reasons::add_rows' is no operator of torch: what it makes of the outputs of experts" in layer.detail


def test_an_operator_of_a_library_behind_a_layer_is_none():
    """Neither behind one that is rewritten, nor behind one that is declined for a reason of its own."""

    class Behind(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return doubled(self.layer(x))

    add = torch.Tensor.index_add
    with torch.no_grad():
        (layer,) = rewrite_of(Behind(_by_loop(lambda out, *rows: add(out, 0, *rows))), torch.randn(10, zoo.D)).candidates
        assert layer.reason is None
        softmax = _by_loop(lambda out, *rows: add(out, 0, *rows), lambda h: h.softmax(-1))
        (layer,) = rewrite_of(Behind(softmax), torch.randn(10, zoo.D)).candidates
        assert layer.reason == "ACTIVATION"


def test_other_terms_are_named():
    def spelling(self, x, weights, ids):
        out = x.tanh()
        for e in range(self.E):
            y = (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]
            out = (out + y * (weights * (ids == e)).sum(-1, keepdim=True)) * 2
        return out

    (layer,) = rewrite_of(zoo.StackedMoE(spelling, "split"), torch.randn(10, zoo.D)).candidates
    assert layer.reason == "OTHER_TERMS" and layer.detail


def test_a_function_without_gradient_of_a_layer_is_none():
    """An indexer reads a layer's output in a block without gradients, where layers are looked for apart from the others."""

    class Indexed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = zoo.StackedMoE(_grouped, "split")

        def forward(self, x):
            x = x + self.layer(x)
            with torch.no_grad():
                scores = (x * 0.5 + x.flip(-1)) @ x.T
            return x[scores.topk(2, -1).indices].sum(1)

    (layer,) = rewrite_of(Indexed(), torch.randn(10, zoo.D)).candidates
    assert layer.reason is None


def test_a_router_by_itself_is_none():
    """NLLB's, with a capacity: its experts are behind a graph break."""

    def router(x, weight):
        probs = (x @ weight).softmax(-1)
        first = F.one_hot(probs.argmax(-1), 4)
        second = F.one_hot(probs.masked_fill(first.bool(), float("-inf")).argmax(-1), 4)
        scores = [(probs * mask).sum(-1, keepdim=True) for mask in (first, second)]
        places = first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0)
        kept = [mask * (place < 6) for mask, place in zip((first, second), places, strict=True)]
        return scores[0] * kept[0] + scores[1] * kept[1]

    assert not rewrite_of(router, torch.randn(12, 8), torch.randn(8, 4)).candidates


def _stored(out, mask, y):
    out[mask] = y


def _added(out, mask, y):
    out[mask] += y


def _into(write):
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        shares = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(-1)
            write(out, mask, expert(x[mask]) * shares[mask, e, None])
        return out

    return zoo.ModuleListMoE(combine)


def test_outputs_that_are_stored_over_each_other(fp64):
    """The last expert of a token is the only one: what is written is another layer than what was meant."""
    (left,) = rewrite_of(_into(_stored), torch.randn(10, zoo.D)).candidates
    assert left.reason == "DISTINCT_EXPERTS" and "add them, out[mask] += y" in left.detail
    check_against_eager(_into(_added), torch.randn(10, zoo.D))


def test_scores_with_a_number_added_are_not_stored_over():
    up, down = ([nn.Linear(*sizes, bias=False) for _ in range(2)] for sizes in ((zoo.D, 8), (8, zoo.D)))

    def of_two(x):
        scores = x[:, :2].softmax(-1)
        first, second = (scores.argmax(-1, keepdim=True) == e for e in range(2))
        out = down[0](F.silu(up[0](x))) * scores[:, :1] * first
        return out + down[1](F.relu(up[1](x))) * (scores[:, 1:] + 1) * second

    (left,) = rewrite_of(of_two, torch.randn(10, zoo.D)).candidates
    assert left.reason == "SLOT_WEIGHTS"


def _best_of(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        first = weights[token, slot].argsort(descending=True)[:3]
        token, slot = token[first], slot[first]
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def _best_of_all(self, x, weights, ids):
    out, scores = torch.zeros_like(x), torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
    kept = torch.zeros_like(scores).scatter(0, scores.topk(3, dim=0).indices, 1) > 0
    for e, expert in enumerate(self.experts):
        token, slot = torch.where((ids == e) & kept[:, e, None])
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def _weighted_by(weigh):
    def combine(self, x, weights, ids):
        scores, out = self.router.gate(x).softmax(-1), torch.zeros_like(x)
        chosen = scores.argmax(-1)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            out[mask] = expert(x[mask]) * weigh(scores, mask)[:, None]
        return out

    return combine


@pytest.mark.parametrize(
    "name, combine, of_all",
    [
        ("first", _best_of, _best_of_all),
        ("max_1", _weighted_by(lambda scores, mask: scores[mask].max(-1)[0]), _weighted_by(lambda s, mask: s.max(-1)[0][mask])),
    ],
)
def test_what_is_computed_of_selected_rows_chooses_none(fp64, name, combine, of_all):
    (left,) = rewrite_of(zoo.ModuleListMoE(combine), torch.randn(10, zoo.D)).candidates
    assert left.reason == "ROUTING"
    assert f"'{name}' is computed of the rows that an expert selects" in left.detail and "of all tokens first" in left.detail
    check_against_eager(zoo.ModuleListMoE(of_all), torch.randn(10, zoo.D))


def _best_of_chosen(best):
    def combine(self, x, weights, ids):
        scores = torch.full((len(x), len(self.experts)), float("-inf"), dtype=x.dtype).scatter(1, ids, weights).softmax(-1)
        top, shares = best(scores)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            (token,) = torch.where(top == e)
            out.index_add_(0, token, expert(x[token]) * shares[token, e, None])
        return out

    return zoo.ModuleListMoE(combine)


def _by_one_topk(scores):
    share, top = scores.topk(1, -1)
    return top[:, 0], share.expand(-1, scores.shape[1])


def test_experts_that_two_choices_choose(fp64):
    (left,) = rewrite_of(_best_of_chosen(lambda scores: (scores.argmax(-1), scores)), torch.randn(10, zoo.D)).candidates
    assert left.reason == "STATEMENT" and "choose an expert together; take its ids and weights from one topk" in left.detail
    check_against_eager(_best_of_chosen(_by_one_topk), torch.randn(10, zoo.D))
    function, reason, *_ = LOOKALIKES["inputs_scaled_by_the_sum_of_repeated_ids"]
    (left,) = rewrite_of(zoo.ModuleListMoE(function), torch.randn(10, zoo.D)).candidates
    assert left.reason == reason == "STATEMENT" and not left.detail


def _in_places(drop, behind=lambda out: out):
    def combine(self, x, weights, ids):
        hot = F.one_hot(ids, self.E)
        place = (hot.flatten(0, 1).cumsum(0).view_as(hot) * hot).sum(-1) - 1
        sent = torch.einsum("tke,tkc->tkec", hot.to(x.dtype), F.one_hot(place, ids.numel()).to(x.dtype))
        rows = torch.einsum("tkec,td->ecd", sent, x)
        y = drop((F.silu(rows @ self.w1) * (rows @ self.w3)) @ self.w2)
        return behind(torch.einsum("tkec,tk,ecd->td", sent, weights, y))

    return zoo.StackedMoE(combine, "split")


def test_dropout_of_places_is_told_so():
    (left,) = rewrite_of(_in_places(F.dropout), torch.randn(10, zoo.D)).candidates
    assert left.reason == "NOT_TWO_PROJECTIONS" and "or the layer's output" in left.detail
    behind = rewrite_of(_in_places(lambda y: y, behind=F.dropout), torch.randn(10, zoo.D))
    assert len(behind.rewritten) == 1 and not behind.reasons


@pytest.mark.parametrize(
    "dropped",
    {
        "that all tokens share": lambda x, chosen: F.dropout(x).sum((0, 1)),
        "of tokens": lambda x, chosen: F.dropout(x) * chosen,
        "of one token": lambda x, chosen: F.dropout(x[0, 0]) * chosen,
    }.values(),
)
def test_dropout_of_no_experts_is_none(dropped):
    def added(x):
        return x + dropped(x, (x.argmax(-1, keepdim=True) == 1))

    assert not rewrite_of(added, torch.randn(2, 5, zoo.D)).candidates


def _stored_in(places):
    def combine(self, x, weights, ids):
        token, own = torch.arange(len(x)).repeat_interleave(ids.shape[1]), ids.flatten()
        rows = torch.zeros(self.E, len(own), zoo.D, dtype=x.dtype)
        place = places(F.one_hot(own, self.E))
        rows[own, place] = x[token]
        y = ((F.silu(rows @ self.w1) * (rows @ self.w3)) @ self.w2)[own, place]
        return torch.zeros_like(x).index_add_(0, token, y * weights.reshape(-1, 1))

    return zoo.StackedMoE(combine, "split")


def test_places_that_several_tokens_may_have(fp64):
    left, *_ = rewrite_of(_stored_in(lambda hot: (hot.cumsum(0) * hot).sum(1) // 2), torch.randn(10, zoo.D)).candidates
    assert "stored at places [E, C] that are not proven to be one's own each" in left.detail
    check_against_eager(_stored_in(lambda hot: (hot.cumsum(0) * hot).sum(1) - 1), torch.randn(10, zoo.D))
