"""Experts store their rows over a tensor: a token that no expert keeps stays what it was there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moeblaze_ops import compile as moeblaze_compile
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch")

B, S, E, D, W, C = 2, 12, 4, 6, 5, 3


class Layer(nn.Module):
    """``store(layer, x, mask)`` stores what experts make of the tokens that their masks ``[B, S, E]`` keep."""

    def __init__(self, store, room=C):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.shared = nn.Linear(D, E, bias=False), nn.Linear(D, D)
        self.up = nn.ModuleList(nn.Linear(D, W) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(W, D) for _ in range(E))
        self.store, self.room = store, room

    def expert(self, e, rows):
        return self.down[e](F.relu(self.up[e](rows)))

    def forward(self, x):
        scores = self.router(x).softmax(dim=-1)
        chosen = F.one_hot(scores.argmax(dim=-1), E)
        mask = chosen * (chosen.cumsum(dim=-2) <= self.room)
        return scores.max(dim=-1).values.unsqueeze(-1) * self.store(self, x, mask)


def over(start):
    def store(layer, x, mask):
        out = start(layer, x)
        for e in range(E):
            rows = mask[:, :, e].bool()
            out[rows] = layer.expert(e, x[rows])
        return out

    return store


def at_indices(layer, x, mask):
    out = x.clone()
    for e in range(E):
        b, s = torch.where(mask[:, :, e] > 0)
        out[b, s] = layer.expert(e, x[b, s])
    return out


def of_hits(layer, x, mask):
    out = torch.zeros_like(x)
    hits = mask.bool().reshape(-1, E).sum(dim=0)
    for e in torch.nonzero(hits, as_tuple=True)[0].tolist():
        rows = mask[:, :, e].bool()
        out[rows] = layer.expert(e, x[rows])
    return out


def of_rows_that_stand_there(layer, x, mask):
    """No two experts keep one token, so that each reads what was there first."""
    out = x.clone()
    for e in range(E):
        rows = mask[:, :, e].bool()
        out[rows] = layer.expert(e, out[rows])
    return out


SPELLINGS = {
    "over zeros": over(lambda layer, x: torch.zeros_like(x)),
    "over the tokens": over(lambda layer, x: x.clone()),
    "over another product": over(lambda layer, x: layer.shared(x)),
    "over a sum": over(lambda layer, x: x + layer.shared(x)),
    "at indices": at_indices,
    "of hits": of_hits,
}


def trained(layer, run, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    (out * torch.arange(1.0, D + 1, dtype=x.dtype)).sum().backward()
    zero = torch.zeros((), dtype=x.dtype)
    return out, x.grad, [zero if parameter.grad is None else parameter.grad.clone() for parameter in layer.parameters()]


def layers_of(layer, *batches, **close):
    """How many layers are rewritten; results and gradients agree with eager mode for each batch."""
    layer = layer.to(batches[0].dtype)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend)
        for x in batches:
            torch.testing.assert_close(trained(layer, run, x), trained(layer, layer, x), **close)
    return len(rewritten_in(records))


@pytest.mark.parametrize(("store", "room"), [*((store, C) for store in SPELLINGS), ("over zeros", 1), ("of hits", S)])
def test_tokens_that_no_expert_keeps(store, room):
    torch.manual_seed(1)
    batches = [torch.randn(B, S, D, dtype=torch.float64), torch.randn(B, S - 5, D, dtype=torch.float64)]
    assert layers_of(Layer(SPELLINGS[store], room), *batches) == 2


@pytest.mark.parametrize("dtype, close", [(torch.float32, {}), (torch.bfloat16, {"atol": 0.2, "rtol": 0.1})], ids=str)
def test_lower_precision(dtype, close):
    torch.manual_seed(1)
    assert layers_of(Layer(SPELLINGS["over the tokens"]), torch.randn(B, S, D, dtype=dtype), **close) == 1


@pytest.mark.parametrize("tokens", [1, 0])
@pytest.mark.parametrize("store", ["over zeros", "over the tokens"])
def test_few_tokens(store, tokens):
    torch.manual_seed(1)
    layers_of(Layer(SPELLINGS[store]), torch.randn(1, tokens, D, dtype=torch.float64))


def test_all_tokens_to_one_expert():
    torch.manual_seed(1)
    layer, x = Layer(SPELLINGS["over the tokens"]), torch.rand(B, S, D, dtype=torch.float64)
    nn.init.zeros_(layer.router.weight)
    nn.init.ones_(layer.router.weight[1])
    assert layers_of(layer, x) == 1


def test_a_token_that_is_stored_over_may_be_infinite():
    """It is not in the sum: what was there is gone."""
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(over(lambda layer, x: x / 0))

        def forward(self, x):
            return torch.nan_to_num(self.layer(x))

    torch.manual_seed(1)
    with torch.no_grad():
        layer, x = Norm().double(), torch.randn(B, S, D, dtype=torch.float64)
        with rewriting_backend() as backend:
            torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))


class Overlapping(Layer):
    """Several experts may take a token, of which the last one's row is there."""

    def forward(self, x):
        scores = self.router(x).softmax(dim=-1)
        return self.store(self, x, scores > 0.2)


def seen_between(layer, x, mask):
    out, seen = x.clone(), 0
    for e in range(E):
        rows = mask[:, :, e].bool()
        out[rows] = layer.expert(e, x[rows])
        seen = seen + out.sum()
    return out * seen


def changed_between(layer, x, mask):
    out = x.clone()
    for e in range(E):
        rows = mask[:, :, e].bool()
        out[rows] = layer.expert(e, x[rows])
        out *= 2
    return out


def negated(layer, x, mask):
    """What an expert does not keep is stored over, that of the experts before among it."""
    out = x.clone()
    for e in range(E):
        rows = ~mask[:, :, e].bool()
        out[rows] = layer.expert(e, x[rows])
    return out


def added_at_last(layer, x, mask):
    out = x.clone()
    for e in range(E):
        rows = mask[:, :, e].bool()
        if e < E - 1:
            out[rows] = layer.expert(e, x[rows])
        else:
            out[rows] += layer.expert(e, x[rows])
    return out


def of_one_sequence(layer, x, mask):
    out = x.clone()
    for e in range(E):
        rows = mask[0, :, e].bool()
        out[:, rows] = layer.expert(e, x[:, rows])
    return out


def of_all_but_the_last(layer, x, mask):
    out = x.clone()
    for e in range(E):
        b, s = torch.where(mask[:, :-1, e] > 0)
        out[b, s] = layer.expert(e, x[b, s])
    return out


TWINS = [seen_between, changed_between, negated, added_at_last, of_one_sequence, of_all_but_the_last]


@pytest.mark.parametrize("store", TWINS, ids=lambda store: store.__name__)
def test_twin_is_left_alone_or_right(store):
    torch.manual_seed(1)
    layers_of(Layer(store), torch.randn(B, S, D, dtype=torch.float64))


@pytest.mark.parametrize("store", [*SPELLINGS.values(), of_rows_that_stand_there], ids=[*SPELLINGS, "rows that stand there"])
def test_masks_that_overlap_are_left_alone(store):
    torch.manual_seed(1)
    assert layers_of(Overlapping(store), torch.randn(B, S, D, dtype=torch.float64)) == 0


def test_two_layers_one_over_the_other_end_in_no_error():
    """The other one's experts are not those of the first, wherever the first's rows end."""
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(at_indices), Layer(at_indices)

        def forward(self, x):
            mask = F.one_hot(self.first.router(x).argmax(dim=-1), E)
            out = at_indices(self.first, x, mask * (mask.cumsum(dim=-2) <= C))
            mask = F.one_hot(self.second.router(out).argmax(dim=-1), E)
            return at_indices(self.second, out, mask * (mask.cumsum(dim=-2) <= C))

    torch.manual_seed(1)
    layer, x = Two().double(), torch.randn(B, S, D, dtype=torch.float64)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(trained(layer, torch.compile(layer, backend=backend), x), trained(layer, layer, x))
    reasons = [c.reason for r in records if isinstance(r, moeblaze_compile.GraphRecord) for c in r.report.declined]
    assert reasons and "INTERNAL" not in reasons
