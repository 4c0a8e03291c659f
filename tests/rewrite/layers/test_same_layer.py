"""Several layers in one graph: sums around a layer, and declined ones that it feeds or is added to, do not hide it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.corpus import lookalikes
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")


def masked() -> nn.Module:
    return zoo.ModuleListMoE(zoo.masked_sum)


def sorted_rows() -> nn.Module:
    return zoo.StackedMoE(zoo.sorted_transformers, "packed_linear")


def dense() -> nn.Module:
    return zoo.StackedMoE(zoo.dense_einsum, "split")


def gathered() -> nn.Module:
    return zoo.StackedMoE(zoo.gathered_einsum, "linear")


class Network(nn.Module):
    """``run(x, layers, w)`` with a matrix ``w`` ``[D, D]``."""

    def __init__(self, run, *layers: nn.Module):
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(layers)
        self.w = nn.Parameter(torch.randn(zoo.D, zoo.D) * 0.2)

    def forward(self, x):
        return self.run(x, self.layers, self.w)


def shared_router(x, layers):
    """Outputs of layers that have one router."""
    weights, ids = layers[0].router(x)
    return [(layer.combine if hasattr(layer, "combine") else layer.experts)(layer, x, weights, ids) for layer in layers]


def shared_router_in_a_row(x, layers, w):
    weights, ids = layers[0].router(x)
    for layer in layers:
        x = x + layer.combine(layer, x @ w, weights, ids)
    return x


def of_another_slot(x, layers, w):
    """The sum over slots is a layer without weights; what multiplies it is no part of it."""
    (layer,) = layers
    weights, ids = layer.router(x)
    gate = F.silu(torch.einsum("td,tkfd->tkf", x, layer.w1[ids]))
    y = torch.einsum("tkf,tkdf->tkd", gate * torch.einsum("td,tkfd->tkf", x, layer.w3[ids]), layer.w2[ids])
    return (y.sum(1, keepdim=True) * weights.unsqueeze(-1)).sum(1)


def in_two_axes(x, layers, w):
    """Shared experts are added where tokens are in one axis, and the residual where they are in two."""
    tokens = x.view(3, 3, -1)
    weights, ids = layers[0].router(tokens)
    (layer,) = layers
    combine = layer.combine if hasattr(layer, "combine") else layer.experts
    out = combine(layer, x, weights.flatten(0, 1), ids.flatten(0, 1)) + F.silu(x @ w)
    return tokens + out.view(3, 3, -1)


def hyper_connections(x, layers, w):
    """Two streams that each layer reads a mixture of and is added to, with gates that ask them what they hold."""
    streams = torch.stack([x, x @ w], 1)
    for layer in layers:
        gates = (streams.flatten(1) @ w.repeat(2, 1)).sigmoid()
        y = layer((gates[:, :2, None] * streams).sum(1))
        streams = gates[:, 2:4, None] * y.unsqueeze(1) + torch.matmul(gates[:, 4:8].view(-1, 2, 2), streams)
    return ((streams.flatten(1) @ w.repeat(2, 1)).sigmoid()[:, :2, None] * streams).sum(1)


def scores_with_a_mask(x, layers, w):
    """Who may attend is told by comparisons, and queries come from a layer."""
    y = layers[0](x)
    place = (w[0, 0] > 0).expand(len(x)).cumsum(0)
    return y @ w @ y.t() + (place[:, None] == place).to(x.dtype) * w[0, 0]


def and_groups_of_experts(x, layers, w):
    """Both slots of a token may have one group."""
    weights, ids = layers[0].router(x)
    out = torch.zeros_like(x)
    for e in range(zoo.E // 2):
        token, slot = torch.where(ids // 2 == e)
        out.index_add_(0, token, layers[1].experts[e](x[token]) * weights[token, slot, None])
    return layers[0].combine(layers[0], x, weights, ids) + out * 0.5


NETWORKS = {
    "sum of two spellings": (lambda x, layers, w: layers[0](x) + layers[1](x), sorted_rows, masked),
    "sum of three and a residual": (lambda x, layers, w: x + sum(f(x) for f in layers), dense, gathered, masked),
    "one layer on two inputs": (lambda x, layers, w: layers[0](x) + layers[0](x.flip(0)), masked),
    "one router, gathered": (lambda x, layers, w: sum(shared_router(x, layers)), gathered, gathered),
    "one router, experts and groups of them": (and_groups_of_experts, masked, masked),
    "one router, one after another": (shared_router_in_a_row, masked, masked),
    "residual and a projection": (lambda x, layers, w: x + (x + layers[0](x)) @ w, masked),
    "attention": (lambda x, layers, w: (layers[0](x) @ x.t()).softmax(-1) @ layers[0](x), masked),
    "attention to itself": (lambda x, layers, w: (y := layers[0](x)) + (y @ y.t()).softmax(-1) @ y, masked),
    "gated by a layer": (lambda x, layers, w: layers[0](x) * (layers[1](x) @ w).sigmoid(), masked, masked),
    "weighted by a token": (
        lambda x, layers, w: sum(f(x) * (x @ w)[:, k, None].sigmoid() for k, f in enumerate(layers)), masked, dense
    ),
    "of another slot": (of_another_slot, gathered),
    "in two axes": (in_two_axes, dense),
    "hyper-connections": (hyper_connections, masked, masked),
    "scores with a mask": (scores_with_a_mask, masked),
}
LAYERS = {"one layer on two inputs": 2, "attention": 2}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_is_found(name):
    run, *layers = NETWORKS[name]
    network = Network(run, *(layer() for layer in layers))
    backend = check_against_eager(network, torch.randn(9, zoo.D))
    assert len(backend.rewritten) == LAYERS.get(name, len(network.layers)) and not backend.reasons


def for_one_slot() -> nn.Module:
    """Products for one row and one slot, whose widths Dynamo has as multiples of what is known to be 1."""
    return zoo.stacked("gathered_einsum", K=1, normalise=False)


def onto_half(x, layers, w):
    """What is done with half of the rows is the same for one row as for several."""
    y = x + layers[0](x)
    y = y[: len(y) // 2]
    return y + lookalikes_of(y, w)


def lookalikes_of(x, w):
    """A sum over experts that is no layer: each is for those before it as well."""
    weights, ids = (x @ w[:, :2]).softmax(-1).topk(2)
    experts = enumerate((w, w.t()))
    return torch.stack([x @ up @ up.t() * (weights * (ids <= e)).sum(-1, keepdim=True) for e, up in experts]).sum(0)


FEW_ROWS = {
    "single rows, joined": lambda x, layers, w: (y := torch.cat(x.split(1))) + layers[0](y),
    "single rows, stacked": lambda x, layers, w: (y := torch.stack(list(x))) + layers[0](y),
    "half of the rows": lambda x, layers, w: (y := x[: len(x) // 2]) + layers[0](y),
    "half of the result": onto_half,
    "behind a look-alike": lambda x, layers, w: (y := lookalikes_of(x, w)) + layers[0](y),
    "half of the rows, checkpointed": lambda x, layers, w: checkpoint(layers[0], x[: len(x) // 2], use_reentrant=False),
}


@pytest.mark.parametrize(("name", "rows", "dynamic"), [
    (name, *((2, False), (3, True))[number % 2]) for number, name in enumerate(FEW_ROWS)
])  # fmt: skip
def test_one_layer_is_found_once_however_few_rows_there_are(name, rows, dynamic):
    """Ranks that have other numbers of tokens do the same."""
    layer = {"half of the rows": gathered, "half of the rows, checkpointed": for_one_slot}.get(name, masked)
    network = Network(FEW_ROWS[name], layer())
    assert len(check_against_eager(network, torch.randn(rows, zoo.D), dynamic=dynamic).rewritten) == 1


OTHER_ROWS = {
    "without the first": lambda y, w: y[1:],
    "every other": lambda y, w: y[1::2],
    "none of one": lambda y, w: (y[:1] + lookalikes_of(y[:1], w))[:0],
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_both_layers_are_found_whatever_rows_the_second_takes(name):
    def run(x, layers, w):
        y = OTHER_ROWS[name](x + layers[0](x), w)
        return y + layers[1](y)

    assert len(check_against_eager(Network(run, masked(), masked()), torch.randn(5, zoo.D)).rewritten) == 2


TOGETHER = {"before": lambda a, b, x: a(b(x)), "after": lambda a, b, x: b(a(x)), "beside": lambda a, b, x: a(x) + b(x)}


LEFT_ALONE = [("rows_of_slots_in_another_order", "before"), ("not_unsorted", "after"), ("soft_moe", "beside")]


@pytest.mark.parametrize(("name", "where"), LEFT_ALONE)
def test_lookalike_does_not_hide_a_layer(name, where):
    """The look-alike is left alone all the same: no sum of some of its experts becomes a layer."""

    def run(x, layers, w):
        layer, lookalike = layers
        return TOGETHER[where](lambda x: out[0] if isinstance(out := lookalike(x), tuple) else out, layer, x)

    backend = rewrite_of(Network(run, masked(), lookalikes.build(name)), torch.randn(9, zoo.D))
    (found,) = backend.rewritten
    assert "masked.py" in found.source
    reason = lookalikes.LOOKALIKES[name][1]
    assert bool(reason) == bool(backend.reasons)
