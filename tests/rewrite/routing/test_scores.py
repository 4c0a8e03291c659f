"""Ids whose range tells that no mask applies, weights that exist for all experts only, and products outside autocast."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, compiled

T, INFINITY = 14, float("inf")


class Layer(nn.Module):
    """Experts given as a function of the layer, the tokens and the router's logits."""

    def __init__(self, experts, K: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.run, self.K = experts, K
        self.gate = nn.Linear(zoo.D, zoo.E, bias=False)
        self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, 2 * zoo.FF) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x, self.gate(x))


def glu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def choose(layer: Layer, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), layer.K, dim=-1)


def choose_on_the_second_of_two_ranks(layer: Layer, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' "all_reduce" does: slots of the other rank's experts have the id E and the weight 0."""
    weights, ids = choose(layer, torch.cat([logits, logits.flip(-1)], -1))
    elsewhere = (ids // zoo.E) != 1
    return weights.masked_fill(elsewhere, 0.0), torch.where(elsewhere, zoo.E, ids % zoo.E)


def choose_with_ids_of_nobody(layer: Layer, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = choose(layer, logits)
    return weights, ids + (ids > 2) * 5


def sorted_with_sentinels(layer, x, logits, absent=zoo.E, largest=zoo.E - 1, choose=choose):
    """Rows whose id is no expert's are zeroed before and after the products."""
    weights, ids = choose(layer, logits)
    sorted_ids, order = torch.sort(ids.reshape(-1))
    rows = x[order // layer.K]
    counts = torch.histc(sorted_ids.float(), bins=zoo.E, min=0, max=zoo.E - 1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    nobodys = (sorted_ids >= absent).unsqueeze(-1)
    sorted_ids.clamp_(max=largest)
    rows.masked_fill_(nobodys, 0.0)
    h = zoo.grouped_mm_fallback(rows, layer.up, offs).masked_fill(nobodys, 0.0)
    y = zoo.grouped_mm_fallback(glu(h), layer.down, offs).masked_fill(nobodys, 0.0)
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return y[inverse].view(T, layer.K, zoo.D).sum(1)


def gathered_with_clamped_ids(layer, x, logits, least=0, largest=zoo.E - 1):
    weights, ids = choose(layer, logits)
    ids = ids.reshape(-1).clamp(least, largest)
    h = torch.bmm(x.repeat_interleave(layer.K, 0).unsqueeze(1), layer.up[ids])
    y = torch.bmm(glu(h), layer.down[ids]).squeeze(1)
    return (y * weights.reshape(-1, 1)).view(T, layer.K, zoo.D).sum(1)


def scored(logits, layer, fill=-INFINITY, score=F.sigmoid) -> Tensor:
    """Scores of all experts, made of the chosen logits among ``fill``."""
    values, ids = torch.topk(logits, layer.K, dim=-1)
    return score(torch.full_like(logits, fill).scatter_(1, ids, values).float()).to(logits.dtype)


def on_input(layer, x, logits, **how):
    rows = x.repeat(zoo.E, 1) * scored(logits, layer, **how).transpose(0, 1).reshape(-1, 1)
    h = torch.bmm(rows.view(zoo.E, -1, zoo.D), layer.up)
    return torch.bmm(glu(h), layer.down).sum(0)


def on_output(layer, x, logits, **how):
    scores = scored(logits, layer, **how)
    out = torch.zeros_like(x)
    for e in range(zoo.E):
        out = out + scores[:, e, None] * (glu(x @ layer.up[e]) @ layer.down[e])
    return out


def filled(layer, x, logits, mask=lambda chosen: ~chosen, fill=-INFINITY):
    """A softmax of the logits that a mask leaves."""
    ids = torch.topk(logits, layer.K, dim=-1).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    scores = softmax(logits.masked_fill(mask(chosen), fill))
    return sum(scores[:, e, None] * (glu(x @ layer.up[e]) @ layer.down[e]) for e in range(zoo.E))


def kept_by_where(layer, x, logits):
    ids = torch.topk(logits, layer.K, dim=-1).indices
    others = torch.ones_like(logits).scatter(1, ids, 0.0)
    scores = softmax(torch.where(others == 0, logits, torch.full_like(logits, -INFINITY)))
    return sum(scores[:, e, None] * (glu(x @ layer.up[e]) @ layer.down[e]) for e in range(zoo.E))


class Autocast(nn.Module):
    """A layer under autocast, which is on inside the graph or, in the tests, around it."""

    def __init__(self, layer: nn.Module, in_graph: bool):
        super().__init__()
        self.layer, self.in_graph = layer, in_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.in_graph else nullcontext():
            return self.layer(x)


def softmax(scores):
    return F.softmax(scores, dim=-1)


def beside_a_shared_expert(layer, x, logits):
    out = x * 0.5
    out.add_(on_input(layer, x, logits))
    return out


def by_masks(layer, x, logits, column=lambda e: e, factor=lambda e: 2.0, chosen=lambda hits: hits.any(-1, keepdim=True)):
    """Probabilities of all experts, of which masks of the chosen ids leave some."""
    probabilities = softmax(logits)
    ids = torch.topk(probabilities, layer.K, dim=-1).indices
    out = torch.zeros_like(x)
    for e in range(zoo.E):
        share = probabilities[:, column(e), None] * factor(e)
        out = out + torch.where(chosen(ids == e), share * (glu(x @ layer.up[e]) @ layer.down[e]), 0.0)
    return out


def by_one_mask(layer, x, logits, spread=lambda mask: mask):
    """The same for all experts at once."""
    probabilities = softmax(logits)
    ids = torch.topk(probabilities, layer.K, dim=-1).indices
    mask = spread(torch.zeros_like(logits).scatter(1, ids, 1.0))
    h = glu(torch.einsum("td,edf->tef", x, layer.up))
    return torch.einsum("tef,efd,te,te->td", h, layer.down, probabilities, mask)


REWRITTEN = {
    "sentinels": (sorted_with_sentinels, {}),
    "sentinels_for_other_ranks": (sorted_with_sentinels, {"choose": choose_on_the_second_of_two_ranks}),
    "clamped_ids": (gathered_with_clamped_ids, {}),
    "clamped_to_fewer_experts": (gathered_with_clamped_ids, {"largest": zoo.E - 2}),
    "clamped_from_below": (gathered_with_clamped_ids, {"least": 1}),
    "sigmoid_on_input": (on_input, {}),
    "sigmoid_on_output": (on_output, {}),
    "softmax_on_input": (on_input, {"score": softmax}),
    "softmax_on_output": (on_output, {"score": softmax}),
    "shared_expert": (beside_a_shared_expert, {}),
    "masked_logits": (filled, {}),
    "masked_logits_by_where": (kept_by_where, {}),
    "masked_probabilities": (by_masks, {}),
    "counted_probabilities": (by_masks, {"chosen": lambda hits: hits.sum(-1, keepdim=True) > 0}),
    "probabilities_of_the_others": (by_masks, {"chosen": lambda hits: ~hits.any(-1, keepdim=True)}),
    "batched_probabilities": (by_one_mask, {}),
}
LEFT_ALONE = {
    "a_sentinel_is_an_expert": (sorted_with_sentinels, {"absent": zoo.E - 1}),
    "clamped_sentinels": (sorted_with_sentinels, {"absent": zoo.E - 1, "largest": zoo.E - 2}),
    "ids_that_may_be_nobodys": (sorted_with_sentinels, {"choose": choose_with_ids_of_nobody}),
    "unselected_at_a_half": (on_input, {"fill": 0.0}),
    "unselected_at_minus_one": (on_output, {"fill": -1.0}),
    "another_axis": (on_output, {"score": lambda scores: F.softmax(scores, dim=0)}),
    "unselected_at_one": (on_output, {"score": lambda scores: 1 - F.sigmoid(scores)}),
    "softmax_of_zeros": (on_output, {"fill": 0.0, "score": softmax}),
    "chosen_logits_masked": (filled, {"mask": lambda chosen: chosen}),
    "logits_masked_by_the_next_token": (filled, {"mask": lambda chosen: ~chosen.roll(1, 0)}),
    "logits_masked_by_zeros": (filled, {"fill": 0.0}),
    "probability_of_another": (by_masks, {"column": lambda e: max(e, 1)}),
    "one_probability_scaled_otherwise": (by_masks, {"factor": lambda e: 2.0 + (e == 1)}),
    "mask_of_the_next_token": (by_one_mask, {"spread": lambda mask: mask.roll(1, 0)}),
    "mask_of_the_next_expert": (by_one_mask, {"spread": lambda mask: mask.roll(1, 1)}),
}


@pytest.mark.parametrize(("name", "K"), [(name, 1 + number % 2) for number, name in enumerate(REWRITTEN)])
def test_rewritten(name, K):
    experts, how = REWRITTEN[name]
    layer = Layer(lambda layer, x, logits: experts(layer, x, logits, **how), K)
    rewriting = check_against_eager(layer, torch.randn(T, zoo.D))
    assert [c.became for c in rewriting.candidates] == ["expert_up(swiglu) -> expert_down"]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    experts, how = LEFT_ALONE[name]
    layer = Layer(lambda layer, x, logits: experts(layer, x, logits, **how))
    assert not check_against_eager(layer, torch.randn(T, zoo.D)).rewritten


def test_experts_that_may_be_named_twice_stay():
    def twice(layer, x, logits):
        ids = torch.cat([torch.topk(scores, 1, dim=-1).indices for scores in (logits, logits.roll(1, -1))], -1)
        scores = torch.full_like(logits, -INFINITY).scatter_(1, ids, logits.gather(1, ids)).sigmoid()
        h = torch.bmm(x.repeat(zoo.E, 1).view(zoo.E, -1, zoo.D), layer.up)
        return (torch.bmm(glu(h), layer.down) * scores.t().unsqueeze(-1)).sum(0)

    rewriting = check_against_eager(Layer(twice), torch.randn(T, zoo.D))
    assert not rewriting.rewritten and set(rewriting.reasons) <= {"DISTINCT_EXPERTS", "SLOT_WEIGHTS"}


@pytest.mark.parametrize("in_graph", [False, True])
def test_products_in_the_dtype_of_autocast(in_graph):
    with torch.autocast("cpu", torch.bfloat16, enabled=not in_graph):
        # bf16 holds 8 bits; eager and the ops round at different places, a few times each.
        rewriting = check_against_eager(Autocast(Layer(on_input), in_graph), torch.randn(T, zoo.D), tolerance=2**-4)
    assert [c.dtype for c in rewriting.rewritten] == [torch.bfloat16]


@pytest.mark.parametrize("in_graph", [False, True])
def test_products_that_autocast_does_not_reach(in_graph):
    """They are computed in fp32, while the router's logits are not."""
    layer, x = Layer(sorted_with_sentinels), torch.randn(T, zoo.D)
    run, rewriting = compiled(Autocast(layer, in_graph))
    with torch.autocast("cpu", torch.bfloat16, enabled=not in_graph):
        actual = run(x)
    assert [c.dtype for c in rewriting.rewritten] == [torch.float32]
    actual.sum().backward()
    gradient = layer.up.grad.clone()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer.gate(x)
    expected = sorted_with_sentinels(layer, x, logits)
    expected.sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradient, layer.up.grad)
