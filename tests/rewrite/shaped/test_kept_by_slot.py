"""Expert capacity that each slot of a token meets on its own, as nanoMoE's router and ColossalAI's (OpenMoE's) have it.

No tensor ``[T, E]`` says which tokens an expert keeps: one ``[K, T, E]`` does, or one ``[T, E]`` of each slot.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.statement.rules import LayerForm
from tests.tools.rewrite_harness import check_against_eager

D, H, E = 6, 10, 4

NANO = """
top, ids = logits.topk(K, dim=-1)
probs = torch.full_like(logits, float("-inf")).scatter(-1, ids, top).softmax(-1)
mask = F.one_hot(ids, E).view(T, K, E).permute(1, 0, 2)
rank = (mask.reshape(K * T, E).cumsum(0) - 1).reshape(K, T, E)
mask = mask * (rank < C)
place = F.one_hot((mask * rank).sum(-1), C)
combine = ((mask * probs.view(T, E)[None]).unsqueeze(3) * place.unsqueeze(2)).sum(0)
dispatch = combine.bool()
"""

COLOSSAL = """
probs = logits.view(T, E).softmax(-1)
first = probs.argmax(-1)
one = F.one_hot(first, E)
second = probs.masked_fill(one.bool(), float("-inf")).argmax(-1)
two = F.one_hot(second, E)
rank1, rank2 = one.cumsum(0) - 1, two.cumsum(0) - 1
rank2 = rank2 + one.sum(0, keepdim=True)
one = one * (rank1 < C)
two = two * (rank2 < C)
place1, place2 = F.one_hot((one * rank1).sum(-1), C), F.one_hot((two * rank2).sum(-1), C)
combine = (one * probs).unsqueeze(2) * place1.unsqueeze(1) + (two * probs).unsqueeze(2) * place2.unsqueeze(1)
dispatch = combine.bool()
"""

OF_IDS = "mask = F.one_hot(ids, E).view(T, K, E).permute(1, 0, 2)"
SCATTERED = 'torch.full_like(logits, float("-inf")).scatter(-1, ids, top).softmax(-1)'
PLACED = "place = F.one_hot((mask * rank).sum(-1), C)"
OF_ALL = "dispatch = combine.bool()"
CHOICE = "top, ids = logits.topk(K, dim=-1)"
ONE_CHOICE = """top, ids = logits.topk(1, dim=-1)
top, ids = top.expand(*top.shape[:-1], K), ids.expand(*ids.shape[:-1], K)"""
BEHIND = "rank2 = rank2 + one.sum(0, keepdim=True)"

SPELLINGS = {
    "nano": (NANO,),
    "nano of tokens first": (NANO, OF_IDS, "mask = F.one_hot(ids.view(T, K).t(), E)"),
    "nano of few": (NANO, "rank < C", "rank <= C - 1"),
    "nano of a softmax": (NANO, SCATTERED, "logits.softmax(-1)"),
    "nano of a mask": (NANO, OF_ALL, "dispatch = combine != 0"),
    "nano without padding": (NANO, "(rank < C)", "(rank < C) * (torch.arange(T) % 3 > 0).view(1, T, 1)"),
    "colossal": (COLOSSAL,),
    "colossal scaled": (COLOSSAL, "combine = ", "probs = probs * 2\ncombine = "),
}

TWINS = {
    "another order of ranks": (NANO, "mask.reshape(K * T, E)", "mask.flip(0).reshape(K * T, E)"),
    "ranks of the other slot": (NANO, "rank < C", "rank.flip(0) < C"),
    "places of the other slot": (NANO, PLACED, f"{PLACED}.flip(0)"),
    "one too many": (NANO, "rank < C", "rank < C - 1"),
    "weights of another expert": (NANO, "probs.view(T, E)[None]", "probs.view(T, E)[None].flip(2)"),
    "the same expert twice": (NANO, CHOICE, ONE_CHOICE),
    "ranks from one": (NANO, "cumsum(0) - 1", "cumsum(0)"),
    "of one row more": (NANO, "rank < C", "rank < C + 1"),
    "dispatched to all": (NANO, OF_ALL, "dispatch = torch.ones_like(combine)"),
    "dispatched by weight": (NANO, OF_ALL, "dispatch = combine"),
    "first where the second is kept": (COLOSSAL, "one = one * (rank1 < C)", "one = one * (rank2 < C)"),
    "second behind no first": (COLOSSAL, BEHIND, "rank2 = rank2 + 0"),
    "second from the front": (COLOSSAL, BEHIND, "rank2 = rank2 + 1"),
    "the first alone": (COLOSSAL, "two = two * (rank2 < C)", "two = two * (rank2 < C) * (rank1 < 2)"),
    "another second": (COLOSSAL, "(two * probs)", "(two * probs.flip(1))"),
    "a second that is the first": (COLOSSAL, 'probs.masked_fill(one.bool(), float("-inf")).argmax(-1)', "probs.argmax(-1)"),
}


class Layer(nn.Module):
    def __init__(self, gate, C, K=2, bias=False):
        super().__init__()
        self.C, self.K = C, K
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H) * 0.4), nn.Parameter(torch.randn(E, H, D) * 0.4)
        self.bias = nn.Parameter(torch.randn(E, 1, D)) if bias else None
        namespace = {"torch": torch, "F": F, "E": E}
        lines = "".join(f"    {line}\n" for line in gate.strip().splitlines())
        exec(f"def gated(logits, T, K, C):\n{lines}    return combine, dispatch", namespace)
        self.gated = namespace["gated"]

    def forward(self, x):
        rows = x.reshape(-1, D)
        combine, dispatch = self.gated(self.router(x), rows.shape[0], self.K, self.C)
        placed = dispatch.permute(1, 2, 0).to(x.dtype) @ rows
        y = torch.bmm(F.gelu(torch.bmm(placed, self.up)), self.down)
        y = y if self.bias is None else y + self.bias
        return (combine.reshape(rows.shape[0], -1).to(x.dtype) @ y.reshape(-1, D)).view(x.shape)


def changed(gate, old="", new=""):
    assert not old or gate.count(old) == 1, old
    return gate.replace(old, new) if old else gate


def check(gate, C, shape=(2, 7), K=2, bias=False, seed=0):
    torch.manual_seed(seed)
    layer, x = Layer(gate, C, K, bias).double(), torch.randn(*shape, D, dtype=torch.float64)
    return len(check_against_eager(layer, x).rewritten)


# Each gate's own spelling with every capacity, and others with one.
CAPACITIES = (3, 7, 28)
OF_EACH = [(name, C) for n, name in enumerate(SPELLINGS) for C in ((CAPACITIES[n % 3],) if " " in name else CAPACITIES)]


@pytest.mark.parametrize(("name", "C"), OF_EACH)
def test_each_slot_is_kept_or_dropped(name, C):
    assert check(changed(*SPELLINGS[name]), C, bias=C == 7, seed=C) == 1


@pytest.mark.parametrize(("shape", "K"), [((11,), 3), ((1, 5), 1), ((3, 1, 4), 3)])
def test_other_numbers_of_slots_and_axes(shape, K):
    assert check(NANO, 4, shape, K, seed=K) == 1


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_left_alone_or_right(name):
    for C in (4, 14) if "rank < C" in TWINS[name] else (4,):
        try:
            check(changed(*TWINS[name]), C, seed=C)
        except RuntimeError as error:
            assert "Class values must be" in str(error)  # eager mode does not run it either


@pytest.mark.parametrize(("old", "new"), [
    (SCATTERED, "logits"),  # a weight of zero has a gradient
    (SCATTERED, "logits * logits.softmax(-1)"),
    (OF_ALL, "dispatch = combine.bool() & logits.flip(-1).relu().bool().view(T, -1, 1)"),
    (OF_ALL, "dispatch = (combine * logits.relu().view(T, -1, 1)).bool()"),
])  # fmt: skip
def test_weights_that_are_zero(old, new):
    torch.manual_seed(0)
    layer = Layer(changed(NANO, old, new), 4).double()
    layer.router.weight.data[0] = 0
    check_against_eager(layer, torch.randn(2, 7, D, dtype=torch.float64))


def test_equal_scores_and_experts_without_tokens():
    torch.manual_seed(0)
    for gate in (NANO, COLOSSAL):
        layer, x = Layer(gate, 3).double(), torch.randn(12, D, dtype=torch.float64)
        layer.router.weight.data[2:] = -5 * x.abs().max()
        x = x.abs()
        layer.router.weight.data[0] = layer.router.weight.data[1]  # two experts are as good
        assert len(check_against_eager(layer, x).rewritten) == 1


def test_sums_over_slots_are_one_where_ids_differ_alone():
    """Of equal ids, a product of sums has terms of two slots."""
    evaluator = Evaluator()
    algebra = evaluator.algebra
    slot, number = algebra.var(3, 2, "r"), algebra.var(1, E, "r")
    hit = algebra.eq(algebra.call("ids", (slot,)), number)
    weight, kept = (algebra.call(name, (slot,)) for name in ("weight", "kept"))
    apart = algebra.mul(*(algebra.sum(slot, algebra.mul(hit, own)) for own in (weight, kept)))
    assert LayerForm(evaluator).of(apart) is not algebra.sum(slot, algebra.mul(hit, weight, kept))


def test_only_sums_of_the_same_comparisons_are_one(monkeypatch):
    monkeypatch.setattr(Algebra, "tells", lambda *_: True)
    evaluator = Evaluator()
    algebra, (slot, number) = evaluator.algebra, (evaluator.algebra.var(level, size, "r") for level, size in ((3, 2), (1, E)))
    hit, other = (algebra.eq(algebra.call(name, (slot,)), number) for name in ("ids", "others"))
    weight, kept = (algebra.call(name, (slot,)) for name in ("weight", "kept"))

    def of_apart(*marks):
        sums = (algebra.sum(slot, algebra.mul(*mark, own)) for mark, own in zip(marks, (weight, kept), strict=True))
        return LayerForm(evaluator).of(algebra.mul(*sums))

    together = algebra.sum(slot, algebra.mul(hit, weight, kept))
    assert of_apart([hit], [hit]) is together
    assert of_apart([hit], []) is not together
    assert of_apart([hit], [other]) is not algebra.sum(slot, algebra.mul(hit, other, weight, kept))
