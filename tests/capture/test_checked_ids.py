"""Ids out of range that operators of a layer, or of a condition, raise an error for: a rewritten layer raises one, too.

Layers are functions ``(layer, x, weights, ids) -> out`` for x [T, D], and their ids are given.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewrite_of, rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

T, E, K = 6, zoo.E, zoo.K
RANGES = {"in range": (0, E), "below": (-E, 0), "above": (E, 2 * E)}


def by_one_hot(self, x, weights, ids):
    share = torch.einsum("tke,tk->te", F.one_hot(ids, E).to(x.dtype), weights)
    return sum(share[:, e, None] * self.experts[e](x) for e in range(E))


def by_one_hot_of_slices(self, x, weights, ids):
    chosen = torch.vmap(lambda ids: F.one_hot(ids, E))(ids)
    return sum((weights * chosen[..., e]).sum(-1, keepdim=True) * self.experts[e](x) for e in range(E))


def by_scatter_add(self, x, weights, ids):
    share = x.new_zeros(len(x), E).scatter_add(1, ids, weights)
    return sum(share[:, e, None] * self.experts[e](x) for e in range(E))


def by_index_select(self, x, weights, ids):
    up, down = (w.index_select(0, ids.flatten()) for w in (self.w_up, self.w_down))
    rows = torch.bmm(down, F.silu(torch.bmm(up, x.repeat_interleave(K, 0)[..., None])))
    return (rows.view(len(x), K, -1) * weights[..., None]).sum(1)


def by_offsets(self, x, weights, ids):
    order = ids.flatten().argsort(stable=True)
    offs = torch.bincount(ids.flatten(), minlength=E).cumsum(0).int()
    h = F.silu(zoo.grouped_mm_fallback(x[order // K], self.w_up.transpose(1, 2), offs))
    rows = zoo.grouped_mm_fallback(h, self.w_down.transpose(1, 2), offs)
    return torch.zeros_like(x).index_add(0, order // K, rows * weights.flatten()[order, None])


def _guarded(self, x, weights, ids, has_tokens):
    out = torch.zeros_like(x)
    for e in range(E):
        if not has_tokens(e):
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def where_hits_are_one_hot(self, x, weights, ids):
    counts = F.one_hot(ids, E).sum((0, 1))
    return _guarded(self, x, weights, ids, lambda e: counts[e] > 0)


def where_hits_are_written(self, x, weights, ids):
    hit = torch.zeros(E, dtype=torch.bool)
    hit[ids.flatten()] = True
    return _guarded(self, x, weights, ids, lambda e: hit[e])


def where_hits_are_compared(self, x, weights, ids):
    return _guarded(self, x, weights, ids, lambda e: (ids == e).any())


def over_all_counts(self, x, weights, ids):
    counts = torch.bincount(ids.flatten(), minlength=E)
    out = torch.zeros_like(x)
    for e in range(len(counts)):
        if counts[e] > 0:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


class Layer(nn.Module):
    def __init__(self, combine):
        super().__init__()
        self.combine = combine
        self.experts = nn.ModuleList(zoo.PlainMLP() for _ in range(E))
        self.w_up, self.w_down = nn.Parameter(torch.randn(E, 5, zoo.D)), nn.Parameter(torch.randn(E, zoo.D, 5))

    def forward(self, x, weights, ids):
        return self.combine(self, x, weights, ids)


CASES = [
    *((combine, True) for combine in (by_one_hot, by_one_hot_of_slices, by_scatter_add, by_index_select, where_hits_are_one_hot)),
    (where_hits_are_written, True),  # a subscript below zero counts from the end
    (where_hits_are_compared, True),  # of any number it is known whether it is another
    (over_all_counts, False),  # there are more counts than experts where ids are above
]


@pytest.mark.parametrize(("combine", "rewritten"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_error_as_in_eager_mode(combine, rewritten):
    layer, x, weights = Layer(combine), torch.randn(T, zoo.D), torch.rand(T, K)
    for name, (low, high) in RANGES.items():
        torch._dynamo.reset()
        ids = torch.randint(low, high, (T, K))
        with rewriting_backend() as backend, moeblaze_compile.recording() as records:
            actual = _outcome(torch.compile(layer, backend=backend), x, weights, ids)
        torch.testing.assert_close(actual, _outcome(layer, x, weights, ids), msg=lambda text, name=name: f"{name}: {text}")
        assert bool(rewritten_in(records)) == rewritten


def _outcome(run, *args):
    """What a layer gives, or the number of the kind of error that it raises: numbers compare in one way."""
    errors = (RuntimeError, IndexError)
    try:
        return run(*args).detach()
    except errors as error:
        return torch.tensor(errors.index(type(error)))


@pytest.mark.parametrize("name", RANGES)
def test_more_offsets_than_groups(name):
    """torch's own grouped product raises a `RuntimeError` for them, that of transformers an `IndexError`."""
    layer, x, weights = Layer(by_offsets), torch.randn(T, zoo.D), torch.rand(T, K)
    ids = torch.randint(*RANGES[name], (T, K))
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = _outcome(torch.compile(layer, backend=backend), x, weights, ids)
    assert actual.ndim == _outcome(layer, x, weights, ids).ndim == (2 if name == "in range" else 0)
    assert rewritten_in(records)


COMPUTED = {
    "as_they_are": lambda ids, weights: ids,
    "turned_round": lambda ids, weights: (ids + 1) % E,
    "next": lambda ids, weights: ids + 1,
    "before": lambda ids, weights: ids - 1,
    "doubled": lambda ids, weights: ids * 2,
    "one_more_than_there_are": lambda ids, weights: torch.where(weights > weights.mean(), ids, E),
    "minus_one": lambda ids, weights: ids.masked_fill(weights < weights.mean(), -1),
    "up_to_the_end": lambda ids, weights: (ids + 1) % (E + 1),
    "powers": lambda ids, weights: ids * ids,
    "rounded": lambda ids, weights: (ids.float() * 1.5).long(),
}


LINEAR = ("next", "before", "doubled", "up_to_the_end")
"""Computed ids that some expert never has, whatever the router chooses: what is left is no layer of all experts."""


@pytest.mark.parametrize(("name", "combine"), [
    (name, (by_one_hot, by_scatter_add, where_hits_are_one_hot)[number % 3]) for number, name in enumerate(COMPUTED)
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_error_for_ids_that_a_router_computes(combine, name):
    torch.manual_seed(0)
    layer, router, x = Layer(combine), nn.Linear(zoo.D, E), torch.randn(32, zoo.D)

    def routed(x):
        weights, ids = router(x).softmax(-1).topk(K, -1)
        return layer(x, weights, COMPUTED[name](ids, weights))

    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = _outcome(torch.compile(routed, backend=backend), x)
    torch.testing.assert_close(actual, _outcome(routed, x))
    assert rewritten_in(records) or combine is not by_one_hot or name in LINEAR


@pytest.mark.parametrize("first", [-1, E], ids=["the_last_row", "no_expert"])
@pytest.mark.parametrize("combine", [by_one_hot, by_scatter_add])
def test_ids_are_asserted_as_they_are_written(combine, first):
    """What writes a row gives no tensor itself: that in which it writes is read."""
    torch.manual_seed(0)
    layer, router, x = Layer(combine), nn.Linear(zoo.D, E), torch.randn(T, zoo.D)

    def routed(x):
        weights, ids = router(x).detach().softmax(-1).topk(K, -1)  # backward of topk would read the ids
        ids[0] = ids[first] if first < 0 else first
        return layer(x, weights, ids)

    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = _outcome(torch.compile(routed, backend=backend), x)
    torch.testing.assert_close(actual, _outcome(routed, x))
    assert rewritten_in(records)


def test_nothing_is_asserted_of_sorted_rows():
    backend = rewrite_of(zoo.stacked("sorted_index_add"), torch.randn(T, zoo.D))
    assert backend.rewritten and "_assert_async" not in backend.operators()


def test_nothing_is_asserted_of_a_routers_ids():
    layer = Layer(by_one_hot)
    router = nn.Linear(zoo.D, E)

    def routed(x):
        return layer(x, *router(x).softmax(-1).topk(K, -1))

    x, weights, ids = torch.randn(T, zoo.D), torch.rand(T, K), torch.randint(0, E, (T, K))
    for run, args, asserted in ((routed, (x,), 0), (layer, (x, weights, ids), 1)):
        backend = rewrite_of(run, *args)
        assert backend.rewritten and backend.operators().count("_assert_async") == asserted
