"""Ids and weights of sequences, ``[B, K]``, or of positions, ``[S, K]``: tokens along the other axis have the same experts."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as switch
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, rewriting_backend, rewritten_in

B, S, D, H, E, K = 3, 5, 6, 10, 4, 2

ROUTED = "weights, ids = router(x.mean(1)).softmax(-1).topk(K, -1)\n"
MASKED = ROUTED + "for e in range(E): out = out + experts[e](x) * (weights * (ids == e)).sum(-1)[:, None, None]"
SELECTED = ROUTED + """for e in range(E):
    b, k = torch.where(ids == e)
    out.index_add_(0, b, experts[e](x[b]) * weights[b, k, None, None])"""

SPELLINGS = {
    "masked": MASKED,
    "selected": SELECTED,
    "by the first token": MASKED.replace("x.mean(1)", "x[:, 0]"),
    "by the largest": MASKED.replace("x.mean(1)", "x.amax(1)"),
    "of positions": MASKED.replace("x.mean(1)", "x.mean(0)").replace("[:, None, None]", "[:, None]"),
    "gathered": ROUTED + "y = torch.stack([expert(x) for expert in experts], 1)\n"
    "out = (weights[..., None, None] * y[torch.arange(B)[:, None], ids]).sum(1)",
    "weights of tokens": MASKED.replace("(weights *", "(router(x).sigmoid()[..., :1] * weights[:, None] *").replace(
        "(ids == e)).sum(-1)[:, None, None]", "(ids == e)[:, None]).sum(-1, keepdim=True)"
    ),
    "without weights": MASKED.replace("(weights * (ids == e))", "(ids == e)"),
    "scores of all experts": "p = router(x.mean(1)).softmax(-1)\nids = p.topk(K, -1).indices\n"
    "for e in range(E): out = out + experts[e](x) * (p[:, e] * (ids == e).any(-1))[:, None, None]",
}  # fmt: skip

TWINS = {
    "other sequences": MASKED.replace("experts[e](x)", "experts[e](x.flip(0))"),
    "ids of some and weights of others": MASKED.replace("(ids == e)", "(ids.flip(0) == e)"),
    "experts of the next": SELECTED.replace("out.index_add_(0, b,", "out.index_add_(0, b.flip(0),"),
    "sequences of the batch as positions": MASKED.replace("[:, None, None]", "[torch.arange(S) % B, None]"),
}


class Layer(nn.Module):
    def __init__(self, lines):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)) for _ in range(E))
        namespace = {"torch": torch, "B": B, "S": S, "D": D, "E": E, "K": K}
        body = "".join(f"    {line}\n" for line in lines.splitlines())
        exec(f"def combined(router, experts, x, out):\n{body}    return out", namespace)
        self.combined = namespace["combined"]

    def forward(self, x):
        return self.combined(self.router, self.experts, x, torch.zeros_like(x))


def check(lines):
    torch.manual_seed(0)
    return check_against_eager(Layer(lines).double(), torch.randn(B, S, D, dtype=torch.float64), aot=True)


@pytest.mark.parametrize("name", SPELLINGS)
def test_experts_of_sequences(name):
    assert_replaced(check(SPELLINGS[name]))


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone_or_right(name):
    check(TWINS[name])


def test_branches_and_graphs_with_other_sizes():
    lines = SELECTED.replace("    out.index", "    if b.numel() == 0: continue\n    out.index")
    layer = Layer(lines).double()
    for sizes in ((B, S), (2, 7)):
        x = torch.randn(*sizes, D, dtype=torch.float64)
        torch._dynamo.reset()
        with rewriting_backend() as backend, switch.recording() as records:
            torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
        assert len(rewritten_in(records)) == 1
