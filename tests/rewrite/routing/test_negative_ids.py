"""Weights indexed by ids that the graph is given: negative ids count from the end, others that are no expert's are an error."""

import linecache

import pytest
import torch
import torch.nn.functional as F

from tests.tools.rewrite_harness import compiled

T, D, HIDDEN, E, K = 7, 6, 5, 4, 2


def layer(x, weights, ids, up, down):
    h = F.silu(torch.einsum("td,tkdf->tkf", x, up[ids]))
    return (torch.einsum("tkf,tkfd->tkd", h, down[ids]) * weights.unsqueeze(-1)).sum(1)


@pytest.fixture
def operands():
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return [torch.randn(T, D), torch.rand(T, K), ids, torch.randn(E, D, HIDDEN), torch.randn(E, HIDDEN, D)]


@pytest.mark.parametrize(("lowest", "dtype"), [(0, torch.int32), (-1, torch.int64), (-E, torch.int64)])
def test_ids_count_from_the_end(operands, lowest, dtype):
    operands[2][3, 1] = lowest
    operands[2] = operands[2].to(dtype)
    run, backend = compiled(layer)
    torch.testing.assert_close(run(*operands), layer(*operands))
    assert len(backend.rewritten) == 1


@pytest.mark.parametrize("wrong", [E, -E - 1])
def test_ids_of_no_expert_raise(operands, wrong):
    operands[2][3, 1] = wrong
    run, backend = compiled(layer)
    with pytest.raises(IndexError):
        layer(*operands)
    with pytest.raises(IndexError):
        run(*operands)
    assert len(backend.rewritten) == 1


def test_ids_of_a_choice_are_taken_as_they_are(operands):
    def chosen(x, logits, up, down):
        return layer(x, *logits.topk(K), up, down)

    x, _, _, up, down = operands
    run, backend = compiled(chosen)
    logits = torch.randn(T, E)
    torch.testing.assert_close(run(x, logits, up, down), chosen(x, logits, up, down))
    assert "arange" not in backend.operators()


# Weights that are a part of a larger tensor: which one, of which tensor, and how many of its parts there are.

PARTS = {
    "first_layer": (lambda w: w[0], (2, E)),
    "second_layer": (lambda w: w[1], (2, E)),
    "first_rows": (lambda w: w[:E], (2 * E,)),
    "last_rows": (lambda w: w[E:], (2 * E,)),
    "flattened": (lambda w: w.flatten(0, 1)[:E], (2, E)),
    "unflattened": (lambda w: w.view(2, E, *w.shape[1:])[0], (2 * E,)),
    "gathered": (lambda w: w[torch.arange(E)], (2 * E,)),
    "narrow": (lambda w: w.narrow(0, 1, E), (2 * E,)),
    "by_vmap": (lambda w: torch.vmap(lambda own: own.T.contiguous().T)(w[:E]), (2 * E,)),
}


def of_parts(part):
    return lambda x, weights, ids, up, down: layer(x, weights, ids, part(up), part(down))


def stored(operands, axes):
    return [*operands[:3], torch.randn(*axes, D, HIDDEN), torch.randn(*axes, HIDDEN, D)]


@pytest.mark.parametrize(("name", "lowest"), [(name, (-E, -1)[number % 2]) for number, name in enumerate(PARTS)])
def test_ids_count_from_the_end_of_a_part(operands, name, lowest):
    part, axes = PARTS[name]
    operands[2][3, 1] = lowest
    run, backend = compiled(of_parts(part))
    operands = stored(operands, axes)
    torch.testing.assert_close(run(*operands), of_parts(part)(*operands))
    assert all(candidate.E == E for candidate in backend.rewritten)
    assert len(backend.rewritten) == (name != "by_vmap")


@pytest.mark.parametrize("name", ["second_layer", "gathered"])
def test_ids_outside_of_a_part_raise(operands, name):
    part, axes = PARTS[name]
    operands[2][3, 1] = E
    run, _ = compiled(of_parts(part))
    with pytest.raises(IndexError):
        run(*stored(operands, axes))


def test_scores_of_more_experts_than_a_part_has(operands):
    """As long as no other is chosen it is a layer of these; that is an error as it is in eager."""

    def chosen(x, logits, up, down):
        return layer(x, *logits.topk(K), up[:E], down[:E])

    x, _, _, up, down = stored(operands, (2 * E,))
    logits = torch.randn(T, 2 * E)
    logits[:, E:] -= 100
    run, backend = compiled(chosen)
    torch.testing.assert_close(run(x, logits, up, down), chosen(x, logits, up, down))
    assert [candidate.E for candidate in backend.rewritten] == [E]
    with pytest.raises(IndexError):
        run(x, logits + 200 * (torch.arange(2 * E) >= E), up, down)


@pytest.mark.parametrize("lowest", [0, -1])
def test_weights_of_several_numbers_of_experts(operands, lowest):
    """Up weights of E, down weights of more: the last of these is another than the last of those."""
    operands[2][3, 1] = lowest
    operands[4] = torch.randn(E + 2, HIDDEN, D)
    run, backend = compiled(layer)
    torch.testing.assert_close(run(*operands), layer(*operands))
    assert backend.reasons == ["EXPERT_COVERAGE"]


@pytest.mark.parametrize("lowest", [0, -1])
def test_outputs_of_all_experts_by_vmap(operands, lowest):
    """Each token reads those of its experts: what is read is not told from the tensor that has the part."""

    def dense(x, weights, ids, up, down):
        y = torch.vmap(lambda up, down: F.silu(x @ up) @ down)(up[:E], down[:E])
        return (y[ids, torch.arange(T).unsqueeze(1)] * weights.unsqueeze(-1)).sum(1)

    operands[2][3, 1] = lowest
    run, backend = compiled(dense)
    operands = stored(operands, (2 * E,))
    torch.testing.assert_close(run(*operands), dense(*operands))
    assert not backend.rewritten


def of_last(x, logits, up, down):
    weights, ids = logits.topk(K)
    return layer(x, weights, ids - 1, up[1:], down[1:])


def of_last_in_two_axes(x, logits, up, down):
    weights, ids = logits.topk(K)
    up, down = (w[1:].reshape(2, E // 2, *w.shape[1:]).flatten(0, 1) for w in (up, down))
    return layer(x, weights, ids - 1, up, down)


def of_next(x, logits, up, down):
    weights, ids = logits.topk(K)
    return layer(x, weights, E - 1 - ids, up[1:], down[1:])


@pytest.mark.parametrize("spelling", [of_last, of_last_in_two_axes, of_next], ids=lambda f: f.__name__)
def test_ids_that_are_shifted_count_from_the_end_of_a_part(operands, spelling):
    """The first expert's id, less one, is the last one's."""
    x, *_, up, down = stored(operands, (E + 1,))
    logits = torch.randn(T, E)
    run, backend = compiled(spelling)
    torch.testing.assert_close(run(x, logits, up, down), spelling(x, logits, up, down))
    assert not backend.rewritten


def test_subscripts_that_may_be_negative_are_named(operands):
    x, *_, up, down = stored(operands, (E + 1,))
    run, backend = compiled(of_last)
    run(x, torch.randn(T, E), up, down)
    (declined,) = backend.candidates
    assert declined.detail == "gathered by numbers that may be negative: they count from the end"
    file, _, line = declined.source.rpartition(":")
    assert "up[ids]" in linecache.getline(file, int(line))


# Numbers that may be below zero where they are compared: the first id, less one, is -1, and in a ring the last one's.


def in_a_ring(x, ids, expert):
    previous = (ids - 1) % E
    for e in range(E):
        yield torch.where(previous == e), expert(e, x)


def from_below(x, ids, expert):
    for e in range(E):
        yield torch.where(ids - 1 == e - 1), expert(e, x)


def halves(x, ids, expert):
    """Experts by the half of the number: -1 for the first two of them."""
    for e in range(E // 2):
        yield torch.where((ids - 2) // 2 == e - 1), expert(e, x)


@pytest.mark.parametrize("hits", [in_a_ring, from_below, halves], ids=lambda f: f.__name__)
def test_numbers_below_zero_are_compared(operands, hits):
    def looped(x, logits, up, down):
        weights, ids = logits.topk(K)
        out = torch.zeros_like(x)
        for (token, k), y in hits(x, ids, lambda e, rows: F.silu(rows @ up[e]) @ down[e]):
            out.index_add_(0, token, y[token] * weights[token, k, None])
        return out

    x, *_, up, down = operands
    logits = torch.randn(T, E)
    run, _ = compiled(looped)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(run(x, logits, up, down), looped(x, logits, up, down))


def of_halves(x, logits, up, down):
    weights, ids = logits.topk(K)
    return layer(x, weights, (ids - 2) // 2, up, down)


def of_halves_of_a_part(x, logits, up, down):
    weights, ids = logits.topk(K)
    return layer(x, weights, (ids - 2) // 2, up[1:], down[1:])


@pytest.mark.parametrize("spelling", [of_halves, of_halves_of_a_part], ids=lambda f: f.__name__)
def test_quotients_below_zero_count_from_the_end(operands, spelling):
    x, *_, up, down = operands
    logits = torch.randn(T, E)
    run, _ = compiled(spelling)
    torch.testing.assert_close(run(x, logits, up, down), spelling(x, logits, up, down))


# Scores that are stored at ids, which count from the end of the row where they are negative.

STORED = {
    "ids of a choice": (lambda ids: ids, 1),
    "ids of a choice, from the end": (lambda ids: ids - E, 0),
    "the other way round": (lambda ids: E - 1 - ids, 1),
    "the other way round, from the end": (lambda ids: -1 - ids, 0),
    "the last one for some": (lambda ids: torch.where(ids < 2, ids, -1), 0),
    "the first one for some": (lambda ids: torch.where(ids < 2, ids, 0), 1),
    "filled with the last one": (lambda ids: ids.masked_fill(ids < 2, -1), 0),
    "with a sign": (lambda ids: ids * torch.where(ids < 2, 1, -1), 0),
    "one less for some": (lambda ids: ids - (ids < 2).long(), 0),
}


@pytest.mark.parametrize("name", STORED)
def test_scores_stored_from_the_end(name, operands):
    places, rewritten = STORED[name]

    def dense(x, logits, up, down):
        weights, ids = logits.topk(K)
        at = torch.arange(T)[:, None], places(ids)
        scores = torch.zeros(T, E).index_put(at, weights, accumulate=True)
        return sum(scores[:, e, None] * (F.silu(x @ up[e]) @ down[e]) for e in range(E))

    x, _, _, up, down = operands
    logits = torch.randn(T, E)
    run, backend = compiled(dense)
    torch.testing.assert_close(run(x, logits, up, down), dense(x, logits, up, down))
    assert len(backend.rewritten) == rewritten


def test_scores_stored_at_given_ids(operands):
    """Nothing says that they are from zero on."""

    def dense(x, weights, ids, up, down):
        scores = torch.zeros(T, E).index_put((torch.arange(T)[:, None], ids), weights, accumulate=True)
        return sum(scores[:, e, None] * (F.silu(x @ up[e]) @ down[e]) for e in range(E))

    operands[2][3, 1] = -1
    run, backend = compiled(dense)
    torch.testing.assert_close(run(*operands), dense(*operands))
    assert not backend.rewritten
