"""Routers that choose an expert by two numbers, as product keys do (PEER, arXiv 2407.04153), and ids in another order."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.rewrite_harness import check_against_eager

D, WIDTH, SIDE, K = 16, 24, 3, 2
E = SIDE * SIDE


class ProductKeys(nn.Module):
    """Expert ``row * radix + column``, for the best of the pairs of the best rows and the best columns."""

    def __init__(self, combine, radix: int = SIDE, offset: int = 0):
        super().__init__()
        self.combine, self.radix, self.offset = combine, radix, offset
        self.query = nn.Linear(D, 2 * D, bias=False)
        self.keys = nn.Parameter(torch.randn(2, SIDE, D))
        self.w_up = nn.Parameter(torch.randn(E + offset, D, WIDTH) / 4)
        self.w_down = nn.Parameter(torch.randn(E + offset, WIDTH, D) / 4)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        queries = self.query(x).chunk(2, -1)
        (row_scores, rows), (column_scores, columns) = (
            (query @ key.t()).topk(K, -1) for query, key in zip(queries, self.keys, strict=True)
        )
        scores = (row_scores[:, :, None] + column_scores[:, None]).flatten(1)
        ids = (rows[:, :, None] * self.radix + columns[:, None] + self.offset).flatten(1)
        best, at = scores.topk(K, -1)
        return best.softmax(-1), ids.gather(1, at)

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x, *self.route(x))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return F.silu(x @ self.w_up[e]) @ self.w_down[e]


class Chosen(ProductKeys):
    """One top-k over all experts; ``turn`` is what becomes of its ids."""

    def __init__(self, combine, turn):
        super().__init__(combine)
        self.turn, self.gate = turn, nn.Linear(D, E, bias=False)

    def route(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        return weights, self.turn(ids)


def loop(layer, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out = out.index_add(0, token, layer.expert(e, x[token]) * weights[token, slot, None])
    return out


def stored(layer, x, weights, ids):
    """Right only if no token names an expert twice."""
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out[token] += layer.expert(e, x[token]) * weights[token, slot, None]
    return out


def scattered(layer, x, weights, ids):
    scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, weights)
    return sum(layer.expert(e, x) * scores[:, e, None] for e in range(E))


def masked(layer, x, weights, ids):
    return sum(layer.expert(e, x) * (ids == e).any(-1)[:, None] for e in range(E))


def gathered(layer, x, weights, ids):
    h = F.silu(torch.einsum("td,tkdf->tkf", x, layer.w_up[ids]))
    return torch.einsum("tkf,tkfd,tk->td", h, layer.w_down[ids], weights)


def gathered_from_flat_weights(layer, x, weights, ids):
    places = ids[..., None] * D + torch.arange(D)
    h = F.silu(torch.einsum("td,tkdf->tkf", x, layer.w_up.flatten(0, 1)[places]))
    return torch.einsum("tkf,tkfd,tk->td", h, layer.w_down[ids], weights)


def read_from_a_stack(layer, x, weights, ids):
    """All experts on all tokens, of which each token reads its own."""
    outputs = torch.stack([layer.expert(e, x) for e in range(E)], 1)
    return torch.einsum("tkd,tk->td", outputs[torch.arange(x.shape[0])[:, None], ids], weights)


ONCE = [stored, scattered, masked]
ALL = [loop, *ONCE, gathered, gathered_from_flat_weights, read_from_a_stack]


@pytest.mark.parametrize(("combine", "tokens"), [
    *((combine, 10) for combine in ALL), (masked, K), (gathered, K), (stored, 1), (gathered_from_flat_weights, 1),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_pairs_are_one_id(fp64, combine, tokens):
    backend = check_against_eager(ProductKeys(combine), torch.randn(tokens, D))
    assert [candidate.K for candidate in backend.rewritten] == [K] and not backend.reasons


@pytest.mark.parametrize("combine", ONCE, ids=lambda f: f.__name__)
def test_pairs_that_may_be_one_number(fp64, combine):
    """Row 0 and column 2 are row 1 and column 0, if two are a row."""
    backend = check_against_eager(ProductKeys(combine, radix=SIDE - 1), torch.randn(40, D))
    assert not backend.rewritten and set(backend.reasons) == {"DISTINCT_EXPERTS"}


def test_pairs_that_name_other_experts(fp64):
    """The first expert has no pair: its weights are never read."""
    check_against_eager(ProductKeys(gathered, offset=1), torch.randn(10, D))


@pytest.mark.parametrize("combine", ONCE, ids=lambda f: f.__name__)
def test_choices_of_as_many_tokens_as_slots(fp64, combine):
    """Ids that are turned around lie beside those of other tokens, of which two may be the same."""
    torch.manual_seed(3)
    backend = check_against_eager(Chosen(combine, lambda ids: ids.t()), torch.randn(K, D))
    assert not backend.rewritten and "DISTINCT_EXPERTS" in backend.reasons


ORDERS = {
    "list": lambda ids: ids[:, [1, 0]],
    "from_the_end": lambda ids: ids[:, [-1, -2]],
    "arange": lambda ids: ids[:, torch.arange(1, -1, -1)],
}


@pytest.mark.parametrize(("combine", "order"), [
    (stored, "from_the_end"), (scattered, "arange"), (masked, "list"),
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_choices_in_another_order(fp64, combine, order):
    backend = check_against_eager(Chosen(combine, ORDERS[order]), torch.randn(10, D))
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize("combine", ONCE, ids=lambda f: f.__name__)
def test_the_first_choice_twice(fp64, combine):
    backend = check_against_eager(Chosen(combine, lambda ids: ids[:, [0, 0]]), torch.randn(10, D))
    assert not backend.rewritten and backend.reasons
