"""Rows in the order of a map of who chose whom that a sort of the flat map gives: its first ones are the true elements.

As Megatron permutes tokens without drops, of which it knows how many rows there are.
"""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as switch
from tests.corpus.zoo.catalogue import BareMLP, D
from tests.tools.rewrite_harness import check_against_eager, rewriting_backend, rewritten_in

E, K = 4, 2

MEGATRON = """
scores, ids = logits.topk(K, dim=1)
probs = torch.zeros_like(logits).scatter(1, ids, scores.softmax(-1))
chosen = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
by_expert = chosen.T.contiguous()
order = by_expert.reshape(-1).argsort(descending=True, stable=True)[: T * K]
token = order % T
share = probs.T.contiguous().reshape(-1)[order]
counts = chosen.sum(dim=0)
"""

PLACES = ".argsort(descending=True, stable=True)"
FIRST = f"{PLACES}[: T * K]"
ONE_HOT = "torch.zeros_like(logits).int().scatter(1, ids, 1).bool()"
SHARE = "share = probs.T.contiguous().reshape(-1)[order]"
CHOICE = "scores, ids = logits.topk(K, dim=1)"

SPELLINGS = {
    "Megatron": (),
    "by a subscript for each axis": (SHARE, "share = probs[token, order // T]"),
    "of a mask": (ONE_HOT, "torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)"),
    "narrowed": (FIRST, f"{PLACES}.narrow(0, 0, T * K)"),
    "as many as are chosen": (FIRST, f"{PLACES}[: chosen.sum()]"),
    "as many as experts have": (FIRST, f"{PLACES}[: chosen.sum(0).long().cpu().sum().item()]"),
    "as many as the flat map has": (FIRST, f"{PLACES}[: by_expert.reshape(-1).sum().item()]"),
    "of expanded weights": ("scores.softmax(-1)", "(scores.softmax(-1) * 2)"),
}

TWINS = {
    "one row less": (FIRST, f"{PLACES}[: T * K - 1]"),
    "one row less, later": (FIRST, f"{FIRST}[: T * K - 1]"),
    "another first row": (FIRST, f"{PLACES}[1 : T * K + 1]"),
    "the last rows": (FIRST, f"{PLACES}[-T * K :]"),
    "one row more": (FIRST, f"{PLACES}[: T * K + 1]"),
    "as many as are chosen, less one": (FIRST, f"{PLACES}[: chosen.sum().item() - 1]"),
    "as many as are chosen, later": (FIRST, f"{PLACES}[1 : chosen.sum().item() + 1]"),
    "from the second one on": (FIRST, f"{PLACES}[1 : chosen.sum().item()]"),
    "from the second expert on": (FIRST, f"{PLACES}[chosen.sum(0)[0].item() : chosen.sum().item()]"),
    "as many as are chosen twice": (FIRST, f"{PLACES}[: 2 * chosen.sum().item()]"),
    "as many as are chosen, and again": (FIRST, f"{PLACES}[: chosen.sum().item() + chosen.T.sum().item()]"),
    "as many as two experts have": (FIRST, f"{PLACES}[: chosen.sum(0)[:2].sum().item()]"),
    "as many as are not chosen": (FIRST, f"{PLACES}[: (~chosen).sum().item()]"),
    "the false ones": (FIRST, ".argsort(stable=True)[: T * K]"),
    "those that are not chosen": ("by_expert.reshape(-1)", "(~by_expert).reshape(-1)"),
    "by token": ("by_expert = chosen.T.contiguous()", "by_expert = chosen"),
    "from the end": (FIRST, f"{FIRST}.flip(0)"),
    "in any order": (FIRST, ".argsort(descending=True)[: T * K]"),
    "of the next expert": ("by_expert = chosen.T.contiguous()", "by_expert = chosen.T.roll(1, 0).contiguous()"),
    "tokens of another number": ("order % T", "order % (T - 1)"),
    "shares of others": (SHARE, f"{SHARE}.flip(0)"),
    "counts of others": ("counts = chosen.sum(dim=0)", "counts = chosen.sum(dim=0).flip(0)"),
    "some ids twice": (CHOICE, f"{CHOICE}\nids = ids // 2 * 2"),
    "some dropped": (ONE_HOT, f"{ONE_HOT} & (logits > 0)"),
    "those that scores say": (ONE_HOT, "logits > logits.median(1, keepdim=True).values"),
    "every second row": (FIRST, f"{PLACES}[: 2 * T * K : 2]"),
}


class Layer(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(BareMLP() for _ in range(E))
        namespace = {"torch": torch, "E": E, "K": K}
        lines = "".join(f"    {line}\n" for line in gate.strip().splitlines())
        exec(f"def routed(logits, T):\n{lines}    return token, share, counts", namespace)
        self.routed = namespace["routed"]

    def forward(self, x, z):
        token, share, counts = self.routed(self.router(z), x.shape[0])
        parts = x.index_select(0, token).split(counts.tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]) * share.unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(0, token.unsqueeze(1).expand(-1, D), rows)


class Dense(Layer):
    """Each expert gets all rows, however many there are."""

    def forward(self, x, z):
        token, share, order = self.routed(self.router(z), x.shape[0])
        rows, number = x[token], order // x.shape[0]
        y = sum(expert(rows) * (number == e)[:, None] for e, expert in enumerate(self.experts))
        return torch.zeros_like(x).index_add(0, token, y * share[:, None])


def _trained(layer, run, x, z):
    layer.zero_grad()
    x, z = x.clone().requires_grad_(), z.clone().requires_grad_()
    out = run(x, z)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), x.grad, z.grad, *(p.grad for p in layer.parameters())]


def check(change=(), T=13, ties=(False,), spoilt=None):
    """How many layers are rewritten, whose results are those of eager mode; where experts are tied, two get all tokens."""
    gate = MEGATRON
    if change:
        assert gate.count(change[0]) == 1, change
        gate = gate.replace(*change)
    torch.manual_seed(T)
    layer, x, z = Layer(gate).double(), *torch.randn(2, T, D, dtype=torch.float64)
    torch._dynamo.reset()
    with rewriting_backend() as backend, switch.recording() as records:
        run = torch.compile(layer, backend=backend)
        for tied in ties:
            if tied:
                layer.router.weight.data[2:] = -5 * layer.router.weight.data[:2].abs()
                z = z.abs()
            if spoilt is not None:
                x[3], layer.experts[-1].up.data[0] = spoilt, spoilt
            try:
                actual = _trained(layer, run, x, z)
            except (RuntimeError, IndexError):
                with pytest.raises((RuntimeError, IndexError)):
                    _trained(layer, layer, x, z)
                continue
            torch.testing.assert_close(actual, _trained(layer, layer, x, z), equal_nan=True)
    return len(rewritten_in(records))


@pytest.mark.parametrize("name", SPELLINGS)
def test_first_places_are_those_of_true_elements(name):
    assert check(SPELLINGS[name]) == 1


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone_or_right(name):
    check(TWINS[name], ties=(False, True))


def test_counts_that_eight_bits_do_not_hold():
    check((FIRST, f"{PLACES}[: chosen.sum(0).to(torch.uint8).sum().item()]"), T=600)


def test_equal_keys_in_any_order_are_no_map():
    """A sort that is not stable may turn true elements around, on another device."""
    assert check(TWINS["in any order"]) == 0


def test_few_tokens_and_experts_without():
    assert check(ties=(True,)) == 1
    assert check(T=2) == 1
    assert check(T=4) == 1


@pytest.mark.parametrize("order", (
    f"{PLACES}[: T * K - 1]", f"{PLACES}[: T * K + 1]", f"{FIRST}[: T * K - 1]", f"{FIRST}[2:]", f"{FIRST}.clone()[:7]",
    f"{FIRST}[torch.arange(7)]", f"{FIRST}.roll(1)", f"{FIRST}[torch.arange(T)]",
    ".nonzero().squeeze(1)[:7]", ".nonzero().squeeze(1)[torch.arange(7)]", ".nonzero().squeeze(1)[torch.arange(7)][:7]",
    ".nonzero().squeeze(1)[torch.arange(1)]", ".nonzero().squeeze(1)[torch.zeros(1, dtype=torch.int64)]",
    f"{FIRST}[torch.arange(1)]",
))  # fmt: skip
def test_some_of_the_places_are_not_all(order):
    torch.manual_seed(0)
    gate = MEGATRON.replace(FIRST, order).replace("counts = chosen.sum(dim=0)", "counts = order")
    check_against_eager(Dense(gate).double(), *torch.randn(2, 13, D, dtype=torch.float64))


@pytest.mark.parametrize("number", (float("nan"), float("inf")))
def test_what_an_expert_does_not_read(number):
    assert check(ties=(True,), spoilt=number) == 1
