"""Routing weights on the experts' input, beside numbers and activations that keep them inside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager

T = 12


class Layer(nn.Module):
    """``scaled(x, weights)`` is what the layer makes of its input and of its routing weights."""

    def __init__(self, scaled, experts, activation=F.silu):
        super().__init__()
        torch.manual_seed(0)
        self.router = zoo.Router()
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(zoo.D, zoo.FF, bias=False), "down": nn.Linear(zoo.FF, zoo.D, bias=False)})
            for _ in range(zoo.E)
        )
        self.scaled, self.run, self.act = scaled, experts, activation

    def forward(self, x):
        weights, ids = self.router(x)
        return self.run(self, *self.scaled(x, weights), ids)


def dense(layer, x, weights, ids):
    """Every expert on every token, times scores that are zero for most."""
    scores = torch.zeros(x.shape[0], zoo.E, dtype=x.dtype).scatter(1, ids, weights)
    rows = x.unsqueeze(0).expand(zoo.E, -1, -1) * scores.t().unsqueeze(-1)
    up, down = (torch.stack([expert[name].weight for expert in layer.experts]) for name in ("up", "down"))
    return (layer.act(rows @ up.transpose(1, 2)) @ down.transpose(1, 2)).sum(0)


def dense_twin(layer, x, weights, ids):
    """The same where the input of the other experts is not zero."""
    scores = torch.zeros(x.shape[0], zoo.E, dtype=x.dtype).scatter(1, ids, weights) + 0.5
    rows = x.unsqueeze(0).expand(zoo.E, -1, -1) * scores.t().unsqueeze(-1)
    up, down = (torch.stack([expert[name].weight for expert in layer.experts]) for name in ("up", "down"))
    return (layer.act(rows @ up.transpose(1, 2)) @ down.transpose(1, 2)).sum(0)


def sorted_rows(layer, x, weights, ids):
    order = ids.flatten().argsort()
    token = order // zoo.K
    offs = torch.bincount(ids.flatten(), minlength=zoo.E).cumsum(0).int()
    rows = x[token] * weights.reshape(-1)[order].unsqueeze(-1)
    up, down = (torch.stack([expert[name].weight for expert in layer.experts]) for name in ("up", "down"))
    h = layer.act(zoo.grouped_mm_fallback(rows, up.transpose(1, 2), offs))
    return torch.zeros_like(x).index_add(0, token, zoo.grouped_mm_fallback(h, down.transpose(1, 2), offs))


def plain(x, weights):
    return x, weights


def written_over(x, weights):
    """The weights without the number are gone."""
    return x * 1.25, weights.mul_(2.5)


def both_kept(x, weights):
    return x * 1.25, weights * 2.5


def differently(x, weights):
    """One of a token's experts has another number."""
    weights[:, 0] *= 2.5
    return x * 1.25, weights


@pytest.mark.parametrize(("experts", "scaled", "activation"), [
    (dense, plain, F.relu), (dense, written_over, F.silu), (sorted_rows, plain, F.silu), (sorted_rows, both_kept, F.relu),
    (dense, both_kept, F.silu),
], ids=lambda f: f.__name__)  # fmt: skip
def test_rewritten(experts, scaled, activation):
    layer = Layer(scaled, experts, activation).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert len(rewriting.rewritten) == 1


@pytest.mark.parametrize("activation", [F.relu, F.silu], ids=lambda f: f.__name__)
def test_scores_of_all_experts_are_no_choice(activation):
    layer = Layer(written_over, dense_twin, activation).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert not rewriting.rewritten


def test_one_number_for_some_slots():
    layer = Layer(differently, sorted_rows).double()
    check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)


def test_a_weight_that_all_rows_share():
    """A mean over the rows of one slot: the scale is taken out of no more factors than there are."""

    def with_mean(g):
        a = g * torch.sigmoid(g) * g
        return a + a.mean()

    check_against_eager(Layer(plain, sorted_rows_of_one_slot, with_mean), torch.randn(T, zoo.D))


def sorted_rows_of_one_slot(layer, x, weights, ids):
    ids, order = ids[:, 0].sort()
    rows = x[order] * weights[:, :1][order]
    offs = F.one_hot(ids, zoo.E).sum(0).cumsum(0).int()
    up, down = (torch.stack([expert[name].weight for expert in layer.experts]) for name in ("up", "down"))
    h = layer.act(zoo.grouped_mm_fallback(rows, up.transpose(1, 2), offs))
    return torch.zeros_like(x).index_add(0, order, zoo.grouped_mm_fallback(h, down.transpose(1, 2), offs))


class BiasedLayer(Layer):
    """An activation that adds to the biased pre-activation; ``addend`` is what it adds to."""

    def __init__(self, addend):
        super().__init__(plain, sorted_rows_with_bias)
        self.bias = nn.Parameter(torch.randn(zoo.E, zoo.FF))
        self.addend = addend


def sorted_rows_with_bias(layer, x, weights, ids):
    order = ids.flatten().argsort()
    chosen, token = ids.flatten()[order], order // zoo.K
    offs = torch.bincount(chosen, minlength=zoo.E).cumsum(0).int()
    rows = x[token] * weights.reshape(-1)[order].unsqueeze(-1)
    up, down = (torch.stack([expert[name].weight for expert in layer.experts]) for name in ("up", "down"))
    product = zoo.grouped_mm_fallback(rows, up.transpose(1, 2), offs)
    g = product + layer.bias[chosen]
    h = 0.5 * g * (1 + torch.tanh(0.7978845608028654 * (layer.addend(product, g) + 0.044715 * g**3)))
    return torch.zeros_like(x).index_add(0, token, zoo.grouped_mm_fallback(h, down.transpose(1, 2), offs))


@pytest.mark.parametrize(("addend", "number"), [(lambda product, g: g, 1), (lambda product, g: product, 0)], ids=["gelu", "twin"])
def test_sum_that_a_biased_projection_is_two_terms_of(addend, number):
    """The twin adds to the projection without its bias."""
    layer = BiasedLayer(addend).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert len(rewriting.rewritten) == number


class MaskedLayer(Layer):
    """Biased experts of the first ``slots`` choices, of zeros for other tokens; ``selected`` says what becomes of these."""

    def __init__(self, slots, selected):
        super().__init__(plain, masked_input)
        self.slots, self.selected = slots, selected
        self.biases = nn.Parameter(torch.randn(zoo.E, zoo.FF))


def masked_input(layer, x, weights, ids):
    weights, ids = weights[:, : layer.slots], ids[:, : layer.slots]
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        scale = (weights * (ids == e)).sum(-1, keepdim=True)
        y = expert["down"](layer.act(expert["up"](x * scale) + layer.biases[e]))
        out = out + layer.selected(y, (ids == e).any(-1, keepdim=True))
    return out


@pytest.mark.parametrize(("selected", "number"), [(lambda y, mask: y * mask, 1), (lambda y, mask: y, 0)], ids=["masked", "twin"])
@pytest.mark.parametrize("slots", [1, 2])
def test_masks_of_input_and_output(slots, selected, number):
    """With one slot both masks are the same comparison; the twin adds what a bias makes of zeros."""
    layer = MaskedLayer(slots, selected).double()
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D, dtype=torch.float64), tolerance=1e-9)
    assert len(rewriting.rewritten) == number
