"""Rows of slots, sorted by expert or not, of which a mask keeps some, and from which each expert's are selected again.

As code does that drops what an expert has no room for: the mask is of rows in their order, and is brought back to slots.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as switch
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from tests.corpus.zoo.catalogue import BareMLP, D
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

E, C = 4, 5

SORTED = """
slots = ids.flatten()
order = slots.argsort(stable=True)
chosen = slots[order]
counts = torch.bincount(slots, minlength=E)
place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[chosen]
keep = place < C
order, chosen = order[keep], chosen[keep]
token, share = order // K, weights.flatten()[order]
for e in range(E):
    rows = torch.where(chosen == e)[0]
    out.index_add_(0, token[rows], experts[e](x[token[rows]]) * share[rows, None])
"""
STORED = (
    """for e in range(E):
    rows = torch.where(chosen == e)[0]
    out.index_add_(0, token[rows], experts[e](x[token[rows]]) * share[rows, None])""",
    """xs = x[token]
y = torch.zeros_like(xs)
for e in range(E):
    hit = chosen == e
    y[hit] = experts[e](xs[hit])
out.index_add_(0, token, y * share[:, None])""",
)
UNSORTED = (
    ("order = slots.argsort(stable=True)", "order = torch.arange(len(slots))"),
    ("place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[chosen]",
     "place = (F.one_hot(slots, E).cumsum(0) - 1).gather(1, slots[:, None])[:, 0]"),
)  # fmt: skip

SPELLINGS = {
    "selected": (),
    "stored": (STORED,),
    "sorted with its keys": (("order = slots.argsort(stable=True)\nchosen = slots[order]", "chosen, order = slots.sort()"),),
    "skipped": (("= torch.where(chosen == e)[0]", "= (chosen == e).nonzero(as_tuple=True)[0]\n    if len(rows) == 0: continue"),),
    "by weight": (("keep = place < C", "keep = weights.flatten()[order] > 0.4"),),
    "in the order of slots": UNSORTED,
}

TWINS = {
    "cut twice": (("token, share", "keep = order % 3 > 0\norder, chosen = order[keep], chosen[keep]\ntoken, share"),),
    "tokens of other rows": (("x[token[rows]]", "x[token.flip(0)[rows]]"),),
    "weights of other rows": (("share[rows, None]", "weights.flatten()[rows, None]"),),
    "of another order": (("chosen = slots[order]", "chosen = slots[x[:, 0].repeat(K).argsort()]"),),
    "the next rows": (("torch.where(chosen == e)", "torch.where((chosen == e).roll(1))"),),
    "of the first rows alone": (("torch.where(chosen == e)", "torch.where(slots[:5] == e)"),),
    "of the first rows, whoever they are of": (
        ("torch.where(chosen == e)", "torch.where(torch.ones(5, dtype=torch.bool))"),
        ("share[rows, None]", "(share * (chosen == e))[rows, None]"),
    ),
    "added to other rows": (("index_add_(0, token[rows]", "index_add_(0, token.roll(1)[rows]"),),
    "as large experts": (("chosen == e", "chosen >= e"),),
}


class Layer(nn.Module):
    def __init__(self, changes, K):
        super().__init__()
        self.router, self.K = nn.Linear(D, E, bias=False), K
        self.experts = nn.ModuleList(BareMLP() for _ in range(E))
        lines = SORTED
        for change in changes:
            assert lines.count(change[0]) == 1, change
            lines = lines.replace(*change)
        namespace = {"torch": torch, "F": F, "E": E, "C": C, "K": K}
        body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
        exec(f"def combined(experts, x, weights, ids, out):\n{body}    return out", namespace)
        self.combined = namespace["combined"]

    def forward(self, x):
        rows = x.view(-1, D)
        weights, ids = self.router(rows).softmax(-1).topk(self.K, -1)
        return self.combined(self.experts, rows, weights, ids, torch.zeros_like(rows)).view(x.shape)


def _trained(layer, run, x):
    layer.zero_grad()
    own = x.clone().requires_grad_()
    out = run(own)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return [out.detach(), own.grad, *zeros]


def check(changes, K=2, shape=(13,)):
    torch.manual_seed(0)
    layer, x = Layer(changes, K).double(), torch.randn(*shape, D, dtype=torch.float64)
    torch._dynamo.reset()
    with rewriting_backend() as backend, switch.recording() as records:
        actual = _trained(layer, torch.compile(layer, backend=backend), x)
    torch.testing.assert_close(actual, _trained(layer, layer, x))
    return [candidate.K for candidate in rewritten_in(records)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_rows_that_are_kept(name):
    assert check(SPELLINGS[name]) == [2]


def test_one_expert_a_token_and_sequences():
    assert check((), K=1) == [1]
    assert check((STORED,), K=3, shape=(3, 5)) == [3]


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone(name):
    assert not check(TWINS[name])


def test_rows_are_all_that_were_kept_only_if_they_are_as_many(monkeypatch):
    """Without the question how many the first mask keeps, a part of them would stand for all."""
    class All(dict):
        def __missing__(self, mask):
            return _Any()

    class _Any(set):
        def __contains__(self, rows):
            return True

    init = Evaluator.__init__
    monkeypatch.setattr(Evaluator, "__init__", lambda self, *args: (init(self, *args), setattr(self, "_numbers_true", All()))[0])
    with pytest.raises(AssertionError):
        assert not check(TWINS["of the first rows, whoever they are of"])
