"""All experts on all tokens as [E, T, D], whose rows are added to their tokens: Llama 4 with a module for each expert."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

T, E, D, W = 18, 3, 6, 5


def stored(outputs):
    out = torch.zeros(len(outputs), *outputs[0].shape, dtype=outputs[0].dtype)
    for e, y in enumerate(outputs):
        out[e] = y
    return out


class Layer(nn.Module):
    """``join`` puts outputs of experts together, ``rows`` says which tokens theirs are."""

    def __init__(self, join, rows):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = (nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(E)) for sizes in ((D, W), (W, D)))
        self.join, self.rows = join, rows

    def forward(self, x):
        weights, ids = self.router(x).topk(1, dim=-1)
        scores = torch.full((len(x), E), float("-inf"), dtype=x.dtype).scatter_(1, ids, weights).sigmoid()
        given = (x * scores.mT[:, :, None]).view(E, len(x), D)
        y = self.join([self.down[e](F.silu(self.up[e](given[e]))) for e in range(E)])
        return torch.zeros_like(x).index_add_(0, self.rows(torch.arange(len(x))), y.reshape(-1, D))


ALL = {
    "stack": (torch.stack, lambda tokens: tokens.repeat(E)),
    "stored": (stored, lambda tokens: tokens.repeat(E)),
    "expanded": (torch.stack, lambda tokens: tokens.view(1, -1).expand(E, -1).reshape(-1)),
    "joined": (lambda outputs: torch.cat([y[None] for y in outputs]), lambda tokens: tokens.repeat(E)),
}


@pytest.mark.parametrize("name", ALL)
def test_rows_of_all_experts(name):
    assert len(check_against_eager(Layer(*ALL[name]), torch.randn(T, D)).rewritten) == 1


def test_rows_of_however_many_tokens():
    backend = check_against_eager(Layer(*ALL["stored"]), torch.randn(T, D), dynamic=True)
    assert len(backend.rewritten) == 1


TWINS = {
    "token_by_token": (torch.stack, lambda tokens: tokens.repeat_interleave(E)),
    "of_other_tokens": (torch.stack, lambda tokens: torch.cat((tokens.flip(0), *[tokens] * (E - 1)))),
    "stacked_inside": (lambda outputs: torch.stack(outputs, dim=1), lambda tokens: tokens.repeat(E)),
}


@pytest.mark.parametrize("name", TWINS)
def test_rows_of_other_tokens_are_equal_or_left_alone(name):
    x, twin = torch.randn(T, D), Layer(*TWINS[name])
    assert not torch.allclose(twin(x), Layer(*ALL["stack"])(x), rtol=1e-3)
    check_against_eager(twin, x)


class Places(Layer):
    """Places [E, C] of experts, whose rows tokens sum by a product over all E C of them."""

    def __init__(self, add):
        super().__init__(torch.stack, add)

    def share(self, scores, mask):
        return scores * mask

    def forward(self, x):
        scores, capacity = self.router(x).softmax(dim=-1), 7
        mask = F.one_hot(scores.argmax(dim=-1, keepdim=True), E)[:, 0]
        place = mask.cumsum(0) - 1
        mask = mask * (place < capacity)
        places = F.one_hot((place * mask).sum(1), capacity).to(x.dtype)
        combine = self.share(scores, mask)[:, :, None] * places[:, None]
        rows = torch.einsum("tec,td->ecd", combine.bool().to(x.dtype), x)
        y = self.join([self.down[e](F.silu(self.up[e](rows[e]))) for e in range(E)])
        return self.rows(combine, y)


PRODUCTS = {
    "mm": (lambda w, y: w.flatten(1).mm(y.flatten(0, 1)), True),
    "matmul": (lambda w, y: torch.matmul(w.view(len(w), -1), y.view(-1, D)), True),
    "of_other_experts": (lambda w, y: w.mT.flatten(1).mm(y.flatten(0, 1)), False),  # place c E + e for e C + c
    "of_fewer_places": (lambda w, y: w.flatten(1)[:, :-2].mm(y.flatten(0, 1)[:-2]), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_over_places_of_all_experts(name):
    add, rewritten = PRODUCTS[name]
    assert len(check_against_eager(Places(add), torch.randn(T, D)).rewritten) == rewritten


@pytest.mark.parametrize("name", ["mm", "of_other_experts"])
def test_slots_that_are_kept_by_their_ids_and_by_the_numbers_of_experts(name):
    """Both say it: of expert 0, too, whose number is an index of other tensors."""

    class Shared(Places):
        def share(self, scores, mask):
            of_token = (scores * mask).sum(dim=1)
            return (of_token / of_token.clamp(min=0.1))[:, None] * mask

    add, rewritten = PRODUCTS[name]
    assert len(check_against_eager(Shared(add), torch.randn(T, D)).rewritten) == rewritten
