"""Stacked weights of which a loop over experts reads another part than the one of the expert's number."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

T, D, FF, E, K = 9, 6, 7, 5, 2

ORDERS = {
    "the next one": lambda e: (e + 1) % E,
    "the former one": lambda e: e - 1,
    "from the end": lambda e: -1 - e,
    "every second one": lambda e: 2 * e % E,
}


class Layer(nn.Module):
    def __init__(self, up_of, down_of, bias=True, scaled=False, num_ids=E, beta_of=None):
        super().__init__()
        self.up_of, self.down_of = up_of, down_of
        self.router = nn.Linear(D, num_ids)
        self.w_up, self.w_down = nn.Parameter(torch.randn(E, 2 * FF, D)), nn.Parameter(torch.randn(E, D, FF))
        self.b_up = nn.Parameter(torch.randn(E, 2 * FF)) if bias else [None] * E
        self.b_down = nn.Parameter(torch.randn(E, D)) if bias else [None] * E
        self.beta, self.beta_of = nn.Parameter(torch.rand(E) + 0.5), beta_of
        self.scales = nn.Parameter(torch.randn(E)) if scaled else None

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            up, down = self.up_of(e), self.down_of(e)
            token, slot = torch.where(ids == e)
            gate, value = F.linear(x[token], self.w_up[up], self.b_up[up]).chunk(2, dim=-1)
            gate = F.silu(gate) if self.beta_of is None else gate * torch.sigmoid(self.beta[self.beta_of(e)] * gate)
            y = F.linear(gate * value, self.w_down[down], self.b_down[down])
            y = y if self.scales is None else y * self.scales[e]
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


@pytest.mark.parametrize(("name", "bias", "num_ids"), [
    *((name, number % 2 == 0, (E, E + 2)[number // 2]) for number, name in enumerate(ORDERS)), ("the next one", False, E + 2),
])  # fmt: skip
def test_every_part_is_read_once(name, bias, num_ids):
    layer = Layer(ORDERS[name], ORDERS[name], bias=bias, num_ids=num_ids)
    backend = check_against_eager(layer, torch.randn(T, D))
    assert len(backend.rewritten) == 1 and "index_add_" not in backend.operators()


@pytest.mark.parametrize(("name", "beta_of"), [
    ("the next one", lambda e: e), ("the former one", ORDERS["the next one"]), ("from the end", ORDERS["from the end"]),
    ("every second one", ORDERS["from the end"]),
])  # fmt: skip
def test_parameters_of_activations_are_those_of_the_expert(name, beta_of):
    layer = Layer(ORDERS[name], ORDERS[name], beta_of=beta_of)
    assert len(check_against_eager(layer, torch.randn(T, D)).rewritten) == 1


APART = {
    "up and down of different orders": Layer(ORDERS["the next one"], ORDERS["from the end"]),
    "down in order": Layer(ORDERS["the next one"], lambda e: e),
    "a part twice": Layer(lambda e: e // 2, lambda e: e // 2),
    "scales by number": Layer(ORDERS["from the end"], ORDERS["from the end"], scaled=True),
}
"""No parameter is read in its own order: each expert has views of its own."""


@pytest.mark.parametrize("name", APART)
def test_parts_in_any_order(name):
    assert len(check_against_eager(APART[name].double(), torch.randn(T, D)).rewritten) == 1
