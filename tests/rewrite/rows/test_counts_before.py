"""Places that are counts of the slots before each one, in floating point, and in each sequence from zero.

Second slots stand behind the first ones that are kept.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.match.matcher import view_of
from tests.tools.rewrite_harness import check_against_eager, compiled, rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("fp64")

D, H, E = 6, 10, 4

GATE = """
one, first = probs.max(-1)
ones = F.one_hot(first, E).to(counted)
two, second = (probs * (1 - ones)).max(-1)
twos = F.one_hot(second, E).to(counted)
place = before(ones) * ones
kept = ones * (place < C).to(counted)
behind = kept.sum(-2, keepdim=True)
other = (before(twos) + behind) * twos
also = twos * (other < C).to(counted)
combine = placed(one * kept.sum(-1), first, place) + placed(two * also.sum(-1), second, other)
"""
PADDED = "F.pad(mask, (0, 0, 1, 0)).cumsum(-2)[..., :-1, :]"
EQUAL = "(place[..., None] == torch.arange(C))"
CUT = "F.one_hot(place, max(place.max() + 1, C))[..., :C]"
BEHIND, FIRST = "behind = kept.sum(-2, keepdim=True)", "place < C"

BEFORE = {
    "padded": PADDED,
    "padded behind": "F.pad(mask.cumsum(-2), (0, 0, 1, 0))[..., :-1, :]",
    "behind a row": "torch.cat([torch.zeros_like(mask[..., :1, :]), mask], -2).cumsum(-2)[..., :-1, :]",
    "less itself": "mask.cumsum(-2) - mask",
    "less one": "mask.cumsum(-2) - 1",
    "whole": "(mask.long().cumsum(-2) - mask.long()).to(mask.dtype)",
}
BEFORE_TWINS = {
    "up to it": "mask.cumsum(-2)",
    "of experts": "F.pad(mask, (1, 0)).cumsum(-1)[..., :-1]",
    "behind two": "F.pad(mask, (0, 0, 2, 0)).cumsum(-2)[..., :-2, :]",
    "behind a token": "F.pad(mask, (0, 0, 1, 0), value=1.0).cumsum(-2)[..., :-1, :]",
    "sums of experts": "F.pad(mask.cumsum(-1), (0, 0, 1, 0))[..., :-1, :]",
    "sums behind two": "F.pad(mask.cumsum(-2), (0, 0, 2, 0))[..., :-2, :]",
    "sums behind one": "F.pad(mask.cumsum(-2), (0, 0, 1, 0), value=1.0)[..., :-1, :]",
    "sums before none": "F.pad(mask.cumsum(-2), (0, 0, 0, 1))[..., 1:, :]",
    "halves": "(mask.cumsum(-2) - mask) / 2",
    "of sequences": "mask.cumsum(0) - mask",
    "of the first": "(mask[:1].cumsum(-2) - mask[:1]).expand_as(mask)",
}
GATES = {
    "kept": (),
    "all": (BEHIND, "behind = ones.sum(-2, keepdim=True)"),
    "kept ones": (BEHIND, "behind = (kept != 0).sum(-2, keepdim=True).to(counted)"),
    "padding": ("place = b", "ones = ones * (torch.arange(S) % 3 > 0)[:, None]\nplace = b"),
    "the same expert twice": ("(probs * (1 - ones)).max", "probs.max"),
}
GATE_TWINS = {
    "behind fewer": (BEHIND, "behind = (ones * (place < C - 1)).sum(-2, keepdim=True)"),
    "behind one less": (BEHIND, "behind = kept.sum(-2, keepdim=True) - 1"),
    "behind others": (BEHIND, "behind = kept.sum(-2, keepdim=True).flip(-1)"),
    "behind another sequence": (BEHIND, "behind = kept.sum(-2, keepdim=True).flip(0)"),
    "behind those before": (BEHIND, "behind = kept.cumsum(-2)"),
    "behind nothing": (BEHIND, "behind = 0"),
    "kept by others": (FIRST, "place.flip(1) < C"),
    "more than places": (FIRST, "place < C + 1"),
}


class Layer(nn.Module):
    def __init__(self, gate, C, before=PADDED, hits=EQUAL, counted=torch.float32):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, H) * 0.4), nn.Parameter(torch.randn(E, H, D) * 0.4)
        assert not gate or GATE.count(gate[0]) == 1, gate
        names = {"torch": torch, "F": F, "E": E, "C": C, "counted": counted}
        lines = "".join(f"    {line}\n" for line in (GATE.replace(*gate) if gate else GATE).strip().splitlines())
        place = f"place = place.sum(-1).long()\n        hits = {hits}.to(probs.dtype)\n"
        product = "return torch.einsum('bs,bse,bsc->bsec', share.to(probs.dtype), F.one_hot(ids, E).to(probs.dtype), hits)"
        placed = f"    def placed(share, ids, place):\n        {place}        {product}\n"
        source = f"def gated(probs, S):\n    def before(mask):\n        return {before}\n{placed}{lines}    return combine"
        exec(source, names)
        self.gated = names["gated"]

    def forward(self, x):
        combine = self.gated(self.router(x).softmax(-1), x.shape[1])
        rows = torch.einsum("bsd,bsec->ebcd", x, (combine != 0).to(x.dtype))
        y = torch.bmm(F.relu(torch.bmm(rows.reshape(E, -1, D), self.up)), self.down)
        return torch.einsum("ebcd,bsec->bsd", y.reshape(rows.shape), combine)


def check(layer, shape=(2, 9), **options):
    return len(check_against_eager(layer, torch.randn(*shape, D), **options).rewritten)


@pytest.mark.parametrize("name", BEFORE)
def test_counts_of_slots_before(name):
    assert check(Layer((), 3, BEFORE[name])) == 1


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("C", [2, 18])
def test_second_slots_behind_first_ones(name, C):
    assert check(Layer(GATES[name], C), (3, 9)) == 1


@pytest.mark.parametrize("shape", [(1, 9), (9, 9), (9, 2)])
def test_numbers_of_sequences(shape):
    assert check(Layer((), 3), shape) == 1


@pytest.mark.parametrize(("shape", "C"), [((2, 0), 3), ((2, 1), 3), ((0, 4), 3), ((2, 5), 1)])
def test_few_tokens_and_places(shape, C):
    check(Layer((), C), shape)


@pytest.mark.parametrize("C", [2, 7, 18])
def test_all_to_one_expert(C):
    layer = Layer((), C)
    with torch.no_grad():
        layer.router.bias[2] = 50
    assert check(layer) == 1


@pytest.mark.parametrize("name", BEFORE_TWINS)
def test_twins_of_counts(name):
    assert check(Layer((), 4, BEFORE_TWINS[name])) == 0


@pytest.mark.parametrize("name", GATE_TWINS)
@pytest.mark.parametrize("C", [2, 18])
def test_twins_of_gates(name, C):
    assert check(Layer(GATE_TWINS[name], C), (2, 9)) == 0


@pytest.mark.parametrize(("counted", "S", "rewritten"), [
    (torch.bfloat16, 120, 1), (torch.bfloat16, 300, 0), (torch.bfloat16, 200, 0), (torch.float16, 300, 1), (torch.float32, 300, 1)
])  # fmt: skip
def test_counts_that_a_dtype_holds(counted, S, rewritten):
    """256 and 1 are 256 in bf16: tokens that are counted so are in one place. Those behind others are counted with them."""
    layer = Layer((), 2 * S, counted=counted)
    with torch.no_grad():
        layer.router.bias[1:3] = 50
    assert check(layer, (1, S)) == rewritten


def _cut(layer, shape=(2, 9)):
    """How often a layer is rewritten whose one-hots have as many classes as only the data tell."""
    torch._dynamo.reset()
    x = torch.randn(*shape, D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = torch.compile(layer, backend=backend)(x)
    torch.testing.assert_close(actual, layer(x))
    return len(rewritten_in(records))


@pytest.mark.parametrize("hits", [CUT, CUT.replace("+ 1, C", "+ 2, C + 2")])
def test_one_hots_that_are_cut(hits):
    assert _cut(Layer((), 4, hits=hits)) == 1


@pytest.mark.parametrize(
    "steps",
    ["m[..., :C].mul_(2), m[..., :C]", "hits := m[..., :C], m[..., 1:].mul_(2), hits", "m[..., 1:].mul_(2), m[..., :C]"],
)
def test_one_hots_that_are_written(steps):
    whole = CUT.removesuffix("[..., :C]")
    steps = steps.replace("hits := m[..., :C]", "(hits := m[..., :C])")
    assert _cut(Layer((), 4, hits=f"(m := {whole}, {steps})[-1]")) == 0


def test_one_hots_that_are_cut_by_a_tensor():
    assert _cut(Layer((), 4, hits="F.one_hot(place, (place.max() + 1).clamp(min=torch.tensor(C)))[..., :C]")) == 0


CUT_TWINS = ("[..., :C]", "[..., 1 : C + 1]"), ("[..., :C]", "[..., :C].flip(-1)"), ("+ 1, C)", "+ 1 + C, 1)")


@pytest.mark.parametrize("change", CUT_TWINS)
def test_one_hots_that_are_cut_elsewhere(change):
    assert _cut(Layer((), 4, hits=CUT.replace(*change))) == 0


@pytest.mark.parametrize(("pad", "is_sum"), [((0, 0, 1, 0), True), ((0, 0, 0, 1), False), ((0, 0, 1, 1), False)])
def test_a_sum_before_zeros_is_no_sum(pad, is_sum):
    found = []

    def look(gm):
        found.extend(view_of(gm.graph).result(node) for node in gm.graph.nodes if node.name.startswith("pad"))

    compiled(lambda mask: F.pad(mask.cumsum(0), pad), run=False, before=look)[0](torch.ones(4, 2))
    assert [value.op == "prefix" for value in found] == [is_sum]
