"""Dropout inside of experts in training: numbers are drawn for the rows of all slots, and everything else is as written."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from moeblaze_ops.arguments.draws import SEEDS, dropped_rows
from tests.tools.rewrite_harness import check_against_eager, compiled, rewrite_of, rewriting_backend

T, D, H, E, K = 12, 8, 12, 4, 2
BETWEEN, BEHIND = 0.25, 0.5


class Layer(nn.Module):
    """``expert`` is one expert, with dropout; ``combine`` sums them."""

    def __init__(self, combine, expert, top_k=K, num_experts=E):
        super().__init__()
        self.router = nn.Linear(D, num_experts, bias=False)
        bias = expert not in (scaled, without_bias)
        self.gate, self.up = (nn.ModuleList(nn.Linear(D, H, bias) for _ in range(num_experts)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(H, D, bias) for _ in range(num_experts))
        self.combine, self.own, self.top_k = combine, expert, top_k

    def expert(self, e, x):
        return self.own(self, e, x)

    def forward(self, batch):
        x = batch.flatten(0, -2)
        weights, ids = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        return self.combine(self, x, weights, ids).view(batch.shape)


def behind(self, e, x):
    return F.dropout(self.down[e](F.silu(self.gate[e](x)) * self.up[e](x)), BEHIND, self.training)


def between(self, e, x):
    return self.down[e](F.dropout(F.silu(self.gate[e](x)) * self.up[e](x), BETWEEN, self.training))


def without_bias(self, e, x):
    return between(self, e, x)


def both(self, e, x):
    h = self.up[e](x)
    a = 0.5 * h * (1 + torch.erf(h / 2**0.5))  # the number stands in front of the sum over features, too
    return F.dropout(self.down[e](F.dropout(a, BETWEEN, self.training)), BEHIND, self.training)


def scaled(self, e, x):
    """A number that comes out of SiLU, and of the sum over features, where SiLU is written as h * sigmoid(h)."""
    return F.dropout(self.down[e](F.silu(self.up[e](x * 1.25))), BEHIND, self.training)


def loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.up)):
        token, k = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, k, None])
    return out


def loop_of_scaled_rows(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.up)):
        token, k = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token] * weights[token, k, None]))
    return out


def masked(self, x, weights, ids):
    return sum(self.expert(e, x) * (weights * (ids == e)).sum(-1, keepdim=True) for e in range(len(self.up)))


def by_mask(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.up)):
        mask = (ids == e).any(-1)
        share = (weights * (ids == e)).sum(-1)
        out[mask] += self.expert(e, x[mask]) * share[mask].unsqueeze(1)
    return out


def stacked(self, x, weights, ids):
    outputs = torch.stack([self.expert(e, x) for e in range(len(self.up))], 1)
    return (outputs.gather(1, ids.unsqueeze(-1).expand(-1, -1, D)) * weights.unsqueeze(-1)).sum(1)


def split(self, x, weights, ids):
    order = ids.flatten().argsort(stable=True)
    token = order // ids.shape[1]
    parts = x[token].split(F.one_hot(ids, len(self.up)).sum((0, 1)).tolist())
    y = torch.cat([self.expert(e, part) for e, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


def split_by_mask(self, x, weights, ids):
    gates = torch.zeros(len(x), len(self.up), dtype=x.dtype).scatter(1, ids, weights)
    chosen = torch.zeros_like(gates, dtype=torch.bool).scatter(1, ids, True)
    expert, token = chosen.t().nonzero(as_tuple=True)
    y = torch.cat([self.expert(e, part) for e, part in enumerate(x[token].split(chosen.sum(0).tolist()))])
    return torch.zeros_like(x).index_add(0, token, y * gates[token, expert, None])


def drawn(self, x):
    """The layer with the numbers that are drawn for the rows of all slots: for activations as they are sorted by expert."""
    shape, x = x.shape, x.flatten(0, -2)
    weights, ids = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
    order = ids.flatten().argsort(stable=True)
    kept = [torch.ones(len(order), width) for width in (H, D)]
    for i, p in enumerate(PROBABILITIES[self.own]):
        if p:
            kept[i] = dropped_rows(kept[i], torch.rand(1, dtype=torch.float32) * SEEDS, p)
    out = torch.zeros_like(x)
    for row, slot in enumerate(order.tolist()):
        t, k = divmod(slot, self.top_k)
        e = ids[t, k]
        read, weight = (x[t] * weights[t, k], 1) if self.combine is loop_of_scaled_rows else (x[t], weights[t, k])
        h = F.gelu(self.up[e](read)) if self.own is both else F.silu(self.gate[e](read)) * self.up[e](read)
        h = F.silu(self.up[e](read * 1.25)) if self.own is scaled else h
        out = out.index_add(0, torch.tensor([t]), (self.down[e](h * kept[0][row]) * kept[1][slot] * weight).unsqueeze(0))
    return out.view(shape)


PROBABILITIES = {
    behind: (0, BEHIND), between: (BETWEEN, 0), without_bias: (BETWEEN, 0), both: (BETWEEN, BEHIND), scaled: (0, BEHIND),
}  # fmt: skip


def _results(layer, run, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    out = run(x)
    out.square().sum().backward()
    own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in layer.parameters()]
    return [out.detach(), x.grad, *own]


# Each spelling with two of the three sizes, and with dropout at two of the places.
@pytest.mark.parametrize(("combine", "expert", "tokens", "top_k"), [
    (combine, (behind, between, both)[(n + i) % 3], *(((3, T // 3), K), ((1,), K), ((T,), 1))[(2 * n + i) % 3])
    for n, combine in enumerate((loop, masked, by_mask, stacked))
    for i in range(2)
] + [
    (stacked, scaled, (T,), K),
    (masked, between, (3, T // 3), K),
    (split, behind, (3, T // 3), K),
    (split_by_mask, both, (T,), K),
    (loop_of_scaled_rows, without_bias, (T,), K),
    (loop_of_scaled_rows, between, (T,), K),
    (loop_of_scaled_rows, scaled, (3, T // 3), 1),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_numbers_and_gradients(fp64, combine, expert, tokens, top_k):
    torch.manual_seed(0)
    layer, x = Layer(combine, expert, top_k), torch.randn(*tokens, D)
    run, backend = compiled(layer, aot=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = _results(layer, run, x)
    torch.testing.assert_close(actual, _results(layer, lambda x: drawn(layer, x), x))
    (candidate,) = backend.rewritten
    assert candidate.became.count("dropout") == sum(map(bool, PROBABILITIES[expert])) and not backend.reasons


@pytest.mark.parametrize("expert", [behind, both], ids=lambda f: f.__name__)
def test_evaluation_has_no_dropout(fp64, expert):
    backend = check_against_eager(Layer(loop, expert).eval(), torch.randn(T, D))
    assert "dropout" not in backend.rewritten[0].became


def gate_alone(self, e, x):
    return self.down[e](F.dropout(F.silu(self.gate[e](x)), BETWEEN) * self.up[e](x))


def several_probabilities(self, e, x):
    return F.dropout(behind(self.eval(), e, x), 0.1 * (e + 1))


def one_mask_for_all_tokens(self, e, x):
    return self.down[e](F.relu(self.up[e](x))) * F.dropout(torch.ones(D), BEHIND)


def mean_of_two_draws(self, e, x):
    twice = F.dropout(self.down[e](F.relu(self.up[e](x))).repeat_interleave(2, 0), BEHIND)
    return twice.view(-1, 2, D).mean(1)


def mean_of_expanded(self, e, x):
    return F.dropout(self.down[e](F.relu(self.up[e](x)))[:, None].expand(-1, 2, -1), BEHIND).mean(1)


def of_every_other_token(self, e, x):
    return behind(self, e, x[::2].repeat_interleave(2, 0))


def of_channels(self, e, x):
    return F.dropout1d(self.down[e](F.relu(self.up[e](x))), BEHIND)


def twice_used(self, e, x):
    dropped = behind(self, e, x)
    return dropped * dropped


TWINS = (
    gate_alone, several_probabilities, one_mask_for_all_tokens, mean_of_two_draws, mean_of_expanded, of_every_other_token,
    of_channels, twice_used,
)  # fmt: skip


@pytest.mark.parametrize("expert", TWINS, ids=lambda f: f.__name__)
def test_other_draws_are_left_alone(expert):
    backend = rewrite_of(Layer(masked, expert), torch.randn(T, D))
    assert not backend.rewritten and backend.reasons


def test_a_probability_that_changes():
    """Dynamo makes a symbol of a number that is another in the second call."""
    layer, x = Layer(masked, lambda self, e, x: F.dropout(self.down[e](F.relu(self.up[e](x))), self.p)), torch.randn(T, D)
    run, backend = compiled(layer, aot=True)
    for layer.p in (0.1, 0.2, 0.3, 0.0):
        run(x).sum().backward()
    became = [candidate.became for candidate in backend.rewritten]  # what gives a number is traced twice
    assert all(any(f"dropout({p})" in text for text in became) for p in (0.1, 0.2, 0.3)) and not backend.reasons
    assert "dropout" not in became[-1]


def one_hidden(self, x, weights, ids):
    h = F.dropout(F.silu(self.up[0](x)), BETWEEN)
    return sum(down(h) * (weights * (ids == e)).sum(-1, keepdim=True) for e, down in enumerate(self.down))


def one_hidden_of_dropped(self, x, weights, ids):
    h = F.dropout(F.silu(self.up[0](x)), BETWEEN)
    return sum(F.dropout(down(h), BEHIND) * (weights * (ids == e)).sum(-1, keepdim=True) for e, down in enumerate(self.down))


def one_hidden_drawn_for_each(self, x, weights, ids):
    h = F.silu(self.up[0](x))
    shares = ((weights * (ids == e)).sum(-1, keepdim=True) for e in range(E))
    return sum(down(F.dropout(h, BETWEEN)) * share for down, share in zip(self.down, shares, strict=True))


def outputs_of_all_slots(self, x, weights, ids):
    outputs = [self.expert(e, x) for e in range(E)]
    return sum(y * weights[:, k, None] * (ids[:, k, None] == e) for k in range(self.top_k) for e, y in enumerate(outputs))


@pytest.mark.parametrize(("combine", "top_k", "layers"), [
    (one_hidden, K, 0), (one_hidden_of_dropped, K, 0), (one_hidden, 1, 1), (one_hidden_drawn_for_each, K, 1),
    (outputs_of_all_slots, K, 1),
])  # fmt: skip
def test_experts_that_share_a_draw_are_left_alone(combine, top_k, layers):
    """Operators draw for each slot: that is another distribution where a token's experts have the same numbers dropped."""
    assert len(rewrite_of(Layer(combine, behind, top_k), torch.randn(T, D)).rewritten) == layers


class Given(Layer):
    """Ids of the caller: a token may name an expert twice."""

    def forward(self, x, ids):
        return self.combine(self, x, self.router(x)[:, :K].softmax(-1), ids)


def test_one_draw_for_two_slots_is_left_alone():
    x, ids = torch.randn(T, D), torch.randint(0, E, (T, K))
    assert rewrite_of(Given(masked, behind), x, ids).reasons == ["STATEMENT"]
    assert not rewrite_of(Given(split, behind), x, ids).rewritten
    assert len(rewrite_of(Given(masked, behind).eval(), x, ids).rewritten) == 1


def test_numbers_that_are_to_be_those_of_eager_mode():
    layer, x = Layer(masked, behind), torch.randn(T, D)
    with torch._inductor.config.patch(fallback_random=True):
        assert rewrite_of(layer, x).reasons == ["EFFECT"]
    assert len(rewrite_of(layer, x).rewritten) == 1
    assert "fallback_random" in str(moeblaze_ops.verify(layer, x))


@pytest.mark.parametrize("recomputed", [False, True])
def test_backward_draws_what_forward_drew(fp64, recomputed):
    """The gradient is the slope of the same function, of which a call is made again by torch's seed."""
    layer, x = Layer(loop, both), torch.randn(T, D)
    call = partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
    # One of them by Inductor: which numbers are drawn is decided in the graph that it is given.
    with nullcontext("inductor") if recomputed else rewriting_backend() as backend, moeblaze_ops.enabled():
        run = torch.compile(lambda x: call(x), backend=backend)

        def value():
            torch.manual_seed(7)
            return run(x).square().sum()

        value().backward()
        down = layer.down[0].weight
        direction, around = torch.randn_like(down), []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                down += step * direction
            around.append(value().item())
            with torch.no_grad():
                down -= step * direction
        slope = (down.grad * direction).sum().item()
        assert slope and abs((around[0] - around[1]) / 2e-6 - slope) < 1e-6 * abs(slope)
        assert not torch.equal(run(x), run(x))
    assert "dropout(0.25) -> expert_down -> dropout(0.5)" in str(moeblaze_ops.report())
