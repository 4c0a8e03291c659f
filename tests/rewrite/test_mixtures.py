"""Mixtures in which every expert takes every token, weighted by a router: DS-MoE while it trains, ensembles, soft gates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, compiled

pytestmark = pytest.mark.usefixtures("fp64")

IS_MIXTURE = "every expert on every token"


class Mixture(nn.Module):
    """``combine`` gets the layer, the tokens and the shares ``[..., E]``."""

    def __init__(self, combine, score=lambda logits: logits.softmax(-1), expert=zoo.GluMLP):
        super().__init__()
        self.combine, self.score = combine, score
        self.gate, self.other_gate = nn.Linear(zoo.D, zoo.E), nn.Linear(zoo.D, zoo.E)
        self.experts = nn.ModuleList(expert() for _ in range(zoo.E))
        self.shared = zoo.PlainMLP()
        self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D) * 0.2)

    def forward(self, x):
        return self.combine(self, x, self.score(self.gate(x)))


def stacked(self, x, dim=-2):
    return torch.stack([expert(x) for expert in self.experts], dim)


def loop(self, x, shares):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + shares[..., e : e + 1] * expert(x)
    return out


def summed(self, x, shares):
    return (shares.unsqueeze(-1) * stacked(self, x)).sum(-2)


def features_first(self, x, shares):
    return (shares.unsqueeze(-2) * stacked(self, x, -1)).sum(-1)


def multiplied(self, x, shares):
    return torch.matmul(shares.unsqueeze(-2), stacked(self, x)).squeeze(-2)


def of_one_tensor(self, x, shares):
    h = F.silu(torch.einsum("...d,edf->...ef", x, self.up))
    return torch.einsum("...e,...ed->...d", shares, torch.einsum("...ef,efd->...ed", h, self.down))


def onto_the_tokens(self, x, shares):
    out = x
    for e, expert in enumerate(self.experts):
        out = out + shares[..., e : e + 1] * expert(x)
    return out


def beside_others(self, x, shares):
    return x + self.shared(x) + loop(self, x, shares)


SPELLINGS = [loop, summed, features_first, multiplied, of_one_tensor, beside_others, onto_the_tokens]

def straight_through(logits):
    """The largest one's output, and the gradient of all."""
    soft = logits.softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard - soft.detach() + soft


SCORES = {
    "straight_through": straight_through,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "logits": lambda logits: logits,
    "normed": lambda logits: logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True),
    "tempered": lambda logits: (logits / 0.7).softmax(-1) * 2,
}


@pytest.mark.usefixtures("mixtures_of_all")
class TestRewritten:
    @pytest.mark.parametrize("combine", SPELLINGS)
    @pytest.mark.parametrize("shape", [(14, zoo.D), (2, 7, zoo.D)], ids=str)
    def test_spellings(self, combine, shape):
        backend = check_against_eager(Mixture(combine), torch.randn(shape))
        (layer,) = backend.rewritten
        assert (layer.spelling, layer.K, layer.E) == (IS_MIXTURE, zoo.E, zoo.E) and not backend.reasons
        assert_replaced(backend)

    @pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
    def test_scores(self, score):
        assert check_against_eager(Mixture(summed, score), torch.randn(14, zoo.D)).rewritten

    @pytest.mark.parametrize("tokens", [0, 1, 2])
    def test_few_tokens(self, tokens):
        """One has no rows that a router could tell apart."""
        assert bool(check_against_eager(Mixture(loop), torch.randn(tokens, zoo.D)).rewritten) == (tokens != 1)

    def test_numbers_of_tokens_that_change(self):
        assert check_against_eager(Mixture(loop), torch.randn(11, zoo.D), dynamic=True).rewritten

    def test_experts_with_biases(self):
        assert check_against_eager(Mixture(loop, expert=zoo.PlainMLP), torch.randn(14, zoo.D)).rewritten

    @pytest.mark.parametrize("power", [1, 2, -1])
    def test_a_number_that_is_another_at_the_next_call(self, power):
        def scaled(self, x, shares):
            return x + sum(shares[:, e, None] * (expert(x) * self.scale**power) for e, expert in enumerate(self.experts))

        layer, x = Mixture(scaled), torch.randn(14, zoo.D, requires_grad=True)
        run, backend = compiled(layer)
        for layer.scale in (2.0, 0.7, 3.1):
            learned = [x, layer.gate.weight, *layer.experts.parameters()]
            actual, expected = ((out := call(x), torch.autograd.grad(out.sum(), learned)) for call in (run, layer))
            torch.testing.assert_close(actual, expected)
        assert len(backend.rewritten) == 2 and not backend.reasons  # of any number from the second on

    def test_columns_in_another_order(self):
        def turned(self, x, shares):
            return sum(shares[:, (e + 1) % zoo.E, None] * expert(x) for e, expert in enumerate(self.experts))

        assert check_against_eager(Mixture(turned), torch.randn(14, zoo.D)).rewritten

    def test_scores_of_the_next_token(self):
        def rolled(self, x, shares):
            return loop(self, x, shares.roll(1, 0))

        assert check_against_eager(Mixture(rolled), torch.randn(14, zoo.D)).rewritten

    @pytest.mark.parametrize("score", [torch.relu, lambda logits: logits.softmax(-1)], ids=["masked", "of all"])
    def test_another_layer_is_added_to_the_sum_in_place(self, score):
        """Who reads the sum behind that layer reads both, and who reads it before reads one."""

        def both(self, x, shares):
            out = loop(self, x, score(self.other_gate(x)))
            first, (weights, ids) = out * 2, shares.topk(2)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out, first

        backend = check_against_eager(Mixture(both), torch.randn(14, zoo.D))
        assert len(backend.rewritten) == 2 and not backend.reasons

    @pytest.mark.parametrize("read", [lambda x, shares: x.flip(0), lambda x, shares: x + shares[:, :1]])
    def test_an_expert_that_reads_something_else_is_no_part(self, read):
        def other(self, x, shares):
            out = shares[:, :1] * self.experts[0](x)
            x = read(x, shares)
            return out + sum(shares[:, e, None] * self.experts[e](x) for e in range(1, zoo.E))

        backend = check_against_eager(Mixture(other), torch.randn(14, zoo.D))
        assert [layer.E for layer in backend.rewritten] == [zoo.E - 1]

    def test_an_expert_twice_is_right(self):
        def twice(self, x, shares):
            return loop(self, x, shares) + shares[:, :1] * self.experts[1](x)

        check_against_eager(Mixture(twice), torch.randn(14, zoo.D))

    def test_gates_of_several_tasks_stay(self):
        """Outputs of experts that two sums read would be computed twice."""

        def tasks(self, x, shares):
            outputs, others = stacked(self, x), self.other_gate(x).softmax(-1)
            return torch.cat([torch.einsum("te,ted->td", each, outputs) for each in (shares, others)], -1)

        backend = check_against_eager(Mixture(tasks), torch.randn(14, zoo.D))
        assert not backend.rewritten and set(backend.reasons) == {"EXTRA_USER"}


def test_mixtures_stay_on_a_cpu():
    backend = check_against_eager(Mixture(loop), torch.randn(14, zoo.D))
    assert backend.reasons == ["ALL_EXPERTS"]


def test_steps_of_a_scaled_sum_are_one_layer():
    """Steps of one sum are not several layers, of which the whole sum would have nothing of its own."""

    def scaled(self, x, shares):
        out = x
        for e, expert in enumerate(self.experts):
            out = out + shares[:, e, None] * (expert(x) * 2.0)
        return out

    backend = check_against_eager(Mixture(scaled), torch.randn(14, zoo.D))
    assert backend.reasons == ["ALL_EXPERTS"]


@pytest.mark.usefixtures("mixtures_of_all")
def test_what_has_no_router_is_no_layer():
    """Gates between blocks."""

    def highway(self, x, shares):
        gate = shares[:, :1].sigmoid()
        return gate * self.experts[0](x) + (1 - gate) * self.experts[1](x)

    def scaled(self, x, shares):
        return x + torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.experts[0](x) + x.amax(-1, keepdim=True) * self.shared(x)

    for combine in (highway, scaled):
        assert not check_against_eager(Mixture(combine), torch.randn(14, zoo.D)).candidates
