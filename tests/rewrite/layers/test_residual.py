"""Layers whose sum starts from another tensor: shared experts, a residual."""

import pytest
import torch
from torch import Tensor

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


def _rows(self, x, weights, ids, e) -> tuple[Tensor, Tensor]:
    token, slot = torch.where(ids == e)
    return token, self.experts[e](x[token]) * weights[token, slot, None]


def shared_index_add(self, x, weights, ids):
    out = self.shared(x)
    for e in range(len(self.experts)):
        out.index_add_(0, *_rows(self, x, weights, ids, e))
    return out


def shared_masked(self, x, weights, ids):
    out = self.shared(x)
    for e, expert in enumerate(self.experts):
        out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def residual_rows(self, x, weights, ids):
    out = x.clone()
    for e in range(len(self.experts)):
        token, y = _rows(self, x, weights, ids, e)
        out[token] += y
    return out * 2


def onto_ones(self, x, weights, ids):
    out = torch.ones_like(x)
    for e, expert in enumerate(self.experts):
        out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def shared_changes_too(self, x, weights, ids):
    """The shared output is the buffer itself, seen through a view."""
    shared = self.shared(x)
    out = shared.view(1, *x.shape)[0]
    for e, expert in enumerate(self.experts):
        shared.add_(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True))
    return out, shared


def twice(self, x, weights, ids):
    """One layer on top of another."""
    return shared_index_add(self, torch.tanh(shared_masked(self, x, weights, ids)), weights, ids)


def on_a_layer_of_others(self, x, weights, ids):
    """The sum of a layer and of another one, which is unknown and given what the first one computes."""
    y = sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))
    weights, ids = self.router(y)
    return y + sum(expert(y) * (weights * (ids <= e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))


def partial_sum_is_read(self, x, weights, ids):
    out, half = self.shared(x), 0
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        half = out.detach().abs() if e == 1 else half
    return out * half


def scaled_on_the_way(self, x, weights, ids):
    out = self.shared(x)
    for e, expert in enumerate(self.experts):
        out = out * 0.5 + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def stored_over(self, x, weights, ids):
    """Rows of the shared output are lost."""
    out = self.shared(x)
    for e in range(len(self.experts)):
        token, y = _rows(self, x, weights, ids, e)
        out[token] = y
    return out


def base_of_one_token(self, x, weights, ids):
    """What the sum starts from is no tensor of its own."""
    out = self.shared(x)
    out[0] = 0
    for e in range(len(self.experts)):
        out.index_add_(0, *_rows(self, x, weights, ids, e))
    return out


def _layer(combine) -> zoo.ModuleListMoE:
    layer = zoo.ModuleListMoE(combine)
    layer.shared = zoo.GluMLP()
    return layer


def shared_added(self, x, weights, ids):
    out = self.shared(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def rows_onto_ones(self, x, weights, ids):
    out = torch.ones_like(x)
    for e, expert in enumerate(self.experts):
        token = (ids == e).any(-1)
        out[token] += expert(x[token]) * (weights * (ids == e)).sum(-1, keepdim=True)[token]
    return out.view(1, *x.shape)


def reads_the_buffer_before(self, x, weights, ids):
    """What the experts read depends on the buffer, as it is before anything is written to it."""
    out = torch.zeros_like(x)
    x = x + 0 * out
    for e in range(len(self.experts)):
        token, y = _rows(self, x, weights, ids, e)
        out[token] = out[token] + y
    return out


def base_is_used_again(self, x, weights, ids):
    shared = self.shared(x)
    out = shared
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    shared.mul_(2)
    return out * shared


def reads_the_buffer_between(self, x, weights, ids):
    out, shift = self.shared(x), 0
    for e, expert in enumerate(self.experts):
        if e == 2:
            shift = out[:1].clone()
        out += expert(x + shift) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def tokens_read_the_buffer_between(self, x, weights, ids):
    """A write that the tokens depend on stays: what the sum starts from is not what was there at first."""
    out = self.shared(x)
    for e, expert in enumerate(self.experts):
        if e == 1:
            x = torch.stack((x, out))[0]
        out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def buffer_is_scaled_first(self, x, weights, ids):
    out = self.shared(x)
    out *= 3
    for e, expert in enumerate(self.experts):
        out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def base_is_detached(self, x, weights, ids):
    out = self.shared(x).detach()
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def base_is_broadcast(self, x, weights, ids):
    out = self.shared(x)[:1]
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def buffer_seen_elsewhere(self, x, weights, ids):
    """A view of some rows is read after the sum."""
    out = self.shared(x)
    head = out[:2]
    for e in range(len(self.experts)):
        out.index_add_(0, *_rows(self, x, weights, ids, e))
    return out * head.sum()


@pytest.mark.parametrize("combine, layers", [
    (shared_added, 1), (residual_rows, 1), (base_is_used_again, 1), (base_is_detached, 1), (reads_the_buffer_before, 1),
    (shared_index_add, 1), (shared_masked, 1), (onto_ones, 1), (rows_onto_ones, 1), (shared_changes_too, 1), (twice, 2),
])  # fmt: skip
def test_is_rewritten(combine, layers):
    backend = check_against_eager(_layer(combine), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == layers and not backend.reasons


@pytest.mark.parametrize("combine", [
    base_is_broadcast, buffer_is_scaled_first, buffer_seen_elsewhere, tokens_read_the_buffer_between,
])  # fmt: skip
def test_other_sums_are_right(combine):
    check_against_eager(_layer(combine), torch.randn(10, zoo.D))


@pytest.mark.parametrize("combine", [partial_sum_is_read, scaled_on_the_way, stored_over, reads_the_buffer_between])
def test_near_misses_are_left_alone(combine):
    assert not check_against_eager(_layer(combine), torch.randn(10, zoo.D)).rewritten


def test_a_layer_in_a_later_sum_is_computed_once():
    assert len(check_against_eager(_layer(on_a_layer_of_others), torch.randn(10, zoo.D)).rewritten) == 1


def test_a_base_with_a_row_stored_over_is_right():
    check_against_eager(_layer(base_of_one_token), torch.randn(10, zoo.D))


class FlattenedInput(torch.nn.Module):
    """The result has axes that the flattened tokens do not have."""

    def __init__(self):
        super().__init__()
        self.router = zoo.Router()
        self.w1, self.w2 = (torch.nn.Parameter(torch.randn(zoo.E, *s) * 0.2) for s in ((zoo.D, zoo.FF), (zoo.FF, zoo.D)))

    def forward(self, x):
        rows = x.reshape(-1, zoo.D)
        weights, ids = self.router(rows)
        scores = torch.zeros(rows.shape[0], zoo.E, dtype=x.dtype).scatter(1, ids, weights).t()
        y = (torch.relu(rows.expand(zoo.E, -1, -1) @ self.w1) @ self.w2).view(zoo.E, x.shape[0], -1, zoo.D)
        return (y * scores.view(zoo.E, x.shape[0], -1)[..., None]).sum(0)


@pytest.mark.parametrize("shape", [(2, 5), (3, 7)])
def test_result_with_symbolic_axes(shape):
    backend = check_against_eager(FlattenedInput(), torch.randn(*shape, zoo.D), dynamic=True)
    assert len(backend.rewritten) == 1 and not backend.reasons


class OneBiasedExpert(torch.nn.Module):
    """Tokens weighted on their way in go through one expert each, whose output has a bias, onto ``base(x)``."""

    def __init__(self, base):
        super().__init__()
        self.router, self.base = torch.nn.Linear(zoo.D, zoo.E, bias=False), base
        self.w1, self.w2 = (torch.nn.Parameter(torch.randn(zoo.E, *s) * 0.2) for s in ((zoo.D, zoo.FF), (zoo.FF, zoo.D)))
        self.b2, self.table = (torch.nn.Parameter(torch.randn(rows, zoo.D)) for rows in (zoo.E, zoo.E + 1))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(1)
        chosen, order = ids.flatten().sort()
        offs = torch.bincount(chosen, minlength=zoo.E).cumsum(0).int()
        h = torch.relu(zoo.grouped_mm_fallback((x * weights)[order], self.w1, offs))
        y = zoo.grouped_mm_fallback(h, self.w2, offs) + self.b2[chosen]
        return self.base(self, x, ids).index_add(0, order, y)


def looked_up(layer, x, ids):
    return layer.table[ids[:, 0]]


@pytest.mark.parametrize(("base", "layers"), [(lambda layer, x, ids: x.tanh(), 1), (looked_up, 0)], ids=["tanh", "looked_up"])
def test_bias_of_one_expert_beside_a_base(base, layers):
    """What else the ids look up is no bias."""
    assert len(check_against_eager(OneBiasedExpert(base), torch.randn(10, zoo.D)).rewritten) == layers


class Stream(torch.nn.Module):
    """Layers that add to one residual stream, each to what the one before left."""

    def __init__(self, experts, count: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(zoo.StackedMoE(experts, "linear", K=1) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def one_choice(self, x, weights, ids):
    """The weight comes last: only the stream is a sum."""
    chosen = ids[:, 0]
    gate, up = (torch.bmm(w[chosen], x.unsqueeze(-1)) for w in (self.w1, self.w3))
    return torch.bmm(self.w2[chosen], torch.nn.functional.silu(gate) * up).squeeze(-1) * weights


@pytest.mark.parametrize("count", [2, 3])
def test_layers_on_a_stream(count):
    backend = check_against_eager(Stream(one_choice, count), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == count and not backend.reasons


class SharedChoices(Stream):
    """All layers have the choices of the first."""

    def forward(self, x):
        weights, ids = self.layers[0].router(x)
        for layer in self.layers:
            x = x + one_choice(layer, x, weights, ids)
        return x


def test_layers_on_a_stream_with_the_same_choices():
    """Where one ends is told by what the experts of the next are given."""
    backend = check_against_eager(SharedChoices(one_choice, 2), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 2
