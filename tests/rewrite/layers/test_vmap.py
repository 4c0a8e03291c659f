"""Experts evaluated by `torch.vmap` over their stacked parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.modules import flat
from tests.tools.rewrite_harness import assert_replaced, check_against_eager


def _weighted(self, x, weights, ids, y):
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter(1, ids, weights)
    return torch.einsum("te,etd->td", scores, y)


def of_weights(self, x, weights, ids):
    y = torch.vmap(lambda w1, w3, w2: (F.silu(x @ w1) * (x @ w3)) @ w2)(self.w1, self.w3, self.w2)
    return _weighted(self, x, weights, ids, y)


def of_weights_and_tokens(self, x, weights, ids):
    """Each expert has tokens of its own, which are all of them; the new axis is the second."""

    def expert(x, w1, w3, w2):
        return F.linear(F.silu(F.linear(x, w1.t())) * F.linear(x, w3.t()), w2.t())

    y = torch.vmap(expert, out_dims=1)(x.expand(self.E, *x.shape), self.w1, self.w3, self.w2)
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter(1, ids, weights)
    return (y * scores.unsqueeze(-1)).sum(1)


def of_weights_and_scores(self, x, weights, ids):
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter(1, ids, weights)

    def expert(score, w1, w3, w2):
        return score.unsqueeze(-1) * ((F.silu(x @ w1) * (x @ w3)) @ w2)

    return torch.vmap(expert, in_dims=(1, 0, 0, 0))(scores, self.w1, self.w3, self.w2).sum(0)


def of_computed_weights(self, x, weights, ids):
    """Those of another expert."""
    y = torch.vmap(lambda w1, w3, w2: (F.silu(x @ w1) * (x @ w3)) @ w2)(self.w1, self.w3, self.w2.flip(0))
    return _weighted(self, x, weights, ids, y)


def weights_of_tokens(self, x, weights, ids):
    y = torch.vmap(lambda w1, w3, w2: (F.silu(x @ w1) * (x @ w3)) @ w2)(self.w1, self.w3, self.w2 * x.mean())
    return _weighted(self, x, weights, ids, y)


def along_another_axis(self, x, weights, ids):
    """Tokens instead of experts."""
    y = torch.vmap(lambda x: (F.silu(x @ self.w1) * (x @ self.w3)).flip(0))(x)
    return _weighted(self, x, weights, ids, torch.einsum("tef,efd->etd", y, self.w2))


def writes_to_its_slice(self, x, weights, ids):
    def expert(w1, w3, w2):
        hidden = x @ w1
        hidden.view(-1).mul_(0.5)
        return (F.silu(hidden) * (x @ w3)) @ w2

    return _weighted(self, x, weights, ids, torch.vmap(expert)(self.w1, self.w3, self.w2))


def _stacked(experts):
    def layer(self, x, weights, ids):
        return experts(self, *flat(x, weights, ids)).view(x.shape)

    return zoo.StackedMoE(layer, "split")


class _Functional(nn.Module):
    """Modules whose parameters are stacked once, and one of them to call."""

    def __init__(self):
        super().__init__()
        self.E, self.router = zoo.E, zoo.Router()
        experts = [zoo.GluMLP() for _ in range(zoo.E)]
        stacked, _ = stack_module_state(experts)
        self.parameters_of = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(p.detach()) for name, p in stacked.items()})
        self.expert = [experts[0].requires_grad_(False)]

    def forward(self, x):
        weights, ids = self.router(x)
        stacked = {name.replace("/", "."): p for name, p in self.parameters_of.items()}
        y = torch.vmap(lambda parameters, x: functional_call(self.expert[0], parameters, x), in_dims=(0, None))(stacked, x)
        return _weighted(self, x, weights, ids, y)


@pytest.mark.parametrize(
    ("experts", "shape"),
    [(of_weights, (2, 5)), (of_weights_and_tokens, (10,)), (of_weights_and_scores, (1,)), (of_computed_weights, (10,))],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_experts_by_vmap(fp64, experts, shape):
    assert_replaced(check_against_eager(_stacked(experts), torch.randn(*shape, zoo.D)))


def test_experts_by_functional_call(fp64):
    backend = check_against_eager(_Functional(), torch.randn(10, zoo.D))
    assert_replaced(backend)
    assert backend.rewritten[0].copied_bytes == 0


@pytest.mark.parametrize("experts", [weights_of_tokens, along_another_axis, writes_to_its_slice], ids=lambda f: f.__name__)
def test_near_miss_is_left_alone(fp64, experts):
    assert not check_against_eager(_stacked(experts), torch.randn(10, zoo.D)).rewritten
