"""Features of torch inside or around a layer, that change what it computes or its gradients, or only look like it."""

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.autograd import forward_ad

from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import compiled, rewriting_backend, rewritten_in

T = 10
pytestmark = pytest.mark.usefixtures("scratch", "fp64")


class Thrice(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


def masked(self, x, weights, ids, expert=lambda mlp, x: mlp(x)):
    return sum(expert(mlp, x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, mlp in enumerate(self.experts))


def with_hidden(change):
    def combine(self, x, weights, ids):
        return masked(self, x, weights, ids, lambda mlp, x: mlp.w2(change(F.silu(mlp.w1(x)) * mlp.w3(x))))

    return combine


def hooked_output(self, x, weights, ids):
    def expert(mlp, x):
        y = mlp(x)
        if mlp is self.experts[1]:
            y.register_hook(lambda gradient: gradient * 2)
        return y

    return masked(self, x, weights, ids, expert)


def hooked_result(self, x, weights, ids):
    out = masked(self, x, weights, ids)
    out.register_hook(lambda gradient: gradient * 2)
    return out


def repeated_ids_counted_once(self, x, weights, ids):
    """A layer of one slot."""
    ids = ids[:, :1].expand(-1, 2)
    return sum(expert(x) * (ids == e).any(-1, keepdim=True) for e, expert in enumerate(self.experts))


def added_twice_over(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None], alpha=2)
    return out


def capacity_by_weights(self, x, weights, ids):
    """The tokens beyond an expert's capacity get a weight of zero."""
    position = F.one_hot(ids, zoo.E).sum(1).cumsum(0).gather(1, ids)
    return masked(self, x, weights * (position <= 3), ids)


def capacity_by_ids(self, x, weights, ids):
    position = F.one_hot(ids, zoo.E).sum(1).cumsum(0).gather(1, ids)
    return masked(self, x, weights, torch.where(position <= 3, ids, -1))


def masks_as_numbers(self, x, weights, ids):
    """Of a mask plus one, rows 1 and 2 are read."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        chosen = (ids == e).any(-1)
        rows = expert(x[chosen]) * (weights * (ids == e)).sum(-1, keepdim=True)[chosen]
        out[chosen] = out[chosen] + rows
    return out + out[chosen + 1]


def of_experts(numbers):
    """Weights that no tensor holds are looked for among those of all experts."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in numbers:
            chosen = torch.stack([slot == e for slot in ids[:, :1].unbind(1)], 1)
            out = out + self.experts[e](x) * (weights[:, :1] * chosen).sum(-1, keepdim=True) * weights[:, 1:]
        return out

    return combine


def on_some(layer, change) -> None:
    change(layer.experts[1])


def share_experts(layer):
    layer.experts[3] = layer.experts[1]


def tie_projections(layer):
    for expert in layer.experts:
        expert.w3 = expert.w1
        expert.w1.weight = layer.experts[0].w1.weight


def break_graph(expert):
    expert.forward = torch.compiler.disable(expert.forward)


def expand_weights(layer):
    for expert in layer.experts:
        expert.w1.weight = nn.Parameter(torch.randn(1, zoo.D).expand(zoo.FF, zoo.D), requires_grad=False)


# The combine function, what is done to the layer, and how many layers are rewritten.
CASES = {
    "masks as numbers": (masks_as_numbers, None, 0),
    "the last expert alone": (of_experts([3]), None, 0),
    "the last experts": (of_experts([3, 2]), None, 0),
    "forward hook that scales": (masked, lambda m: on_some(m, lambda e: e.register_forward_hook(lambda *a: a[2] * 2)), 0),
    "forward hook that looks": (masked, lambda m: on_some(m, lambda e: e.register_forward_hook(lambda *a: None)), 1),
    "forward hook before": (masked, lambda m: on_some(m, lambda e: e.register_forward_pre_hook(lambda _, a: (a[0] + 1,))), 0),
    "hook of an expert's output": (hooked_output, None, 0),
    "hook of the result": (hooked_result, None, 1),
    "autograd function on the hidden rows": (with_hidden(Thrice.apply), None, 0),
    "autograd function on the tokens": (lambda self, x, *routed: masked(self, Thrice.apply(x), *routed), None, 1),
    "autograd function on the weights": (lambda self, x, w, ids: masked(self, x, Thrice.apply(w), ids), None, 1),
    "hidden rows without gradient": (with_hidden(torch.no_grad()(lambda a: a * 1)), None, 0),
    "hidden rows in chunks of tokens": (with_hidden(lambda a: a - a.mean(0, keepdim=True)), None, 0),
    "batch norm": (masked, lambda m: on_some(m, lambda e: e.register_forward_hook(lambda *a: F.batch_norm(a[2], None, None,
                                                                                                     training=True))), 0),
    "parametrized weights": (masked, lambda m: on_some(m, lambda e: parametrize.register_parametrization(e.w2, "weight",
                                                                                                        Double())), 0),
    "an expert that breaks the graph": (masked, lambda m: on_some(m, break_graph), 0),
    "some experts frozen": (masked, lambda m: on_some(m, lambda e: e.requires_grad_(False)), 1),
    "router frozen": (masked, lambda m: m.router.requires_grad_(False), 1),
    "one expert at two numbers": (masked, share_experts, 1),
    "tied projections": (masked, tie_projections, 1),
    "expanded weights": (masked, expand_weights, 1),
    "repeated ids counted once": (repeated_ids_counted_once, None, 1),
    "added twice over": (added_twice_over, None, 1),
    "capacity by weights": (capacity_by_weights, None, 1),
    "capacity by ids": (capacity_by_ids, None, 1),
    "hard tanh between its default bounds": (with_hidden(F.hardtanh), None, 1),
}  # fmt: skip


def run(call, layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None and p.grad.any()}
    return {"out": out.detach(), "x": x.grad, **gradients}


def rewritten_layers(layer: nn.Module) -> int:
    """How many layers are rewritten, once output and gradients agree with eager."""
    x = torch.randn(T, zoo.D)
    with rewriting_backend() as backend, switch.recording() as records:
        actual = run(torch.compile(layer, backend=backend), layer, x)
    torch.testing.assert_close(actual, run(layer, layer, x))
    return len(rewritten_in(records))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name):
    combine, change, expected = CASES[name]
    layer = zoo.ModuleListMoE(combine, zoo.GluMLP)
    if change is not None:
        change(layer)
    assert rewritten_layers(layer) == expected


def test_derivatives_that_are_computed_forward():
    def along_ones(self, x, weights, ids):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(masked(self, dual, weights, ids)).tangent

    layer, x = zoo.ModuleListMoE(along_ones), torch.randn(T, zoo.D)
    run, backend = compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
    assert backend.reasons == ["CONTEXT"]


off, on = torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16)


def experts_off(self, x, weights, ids):
    return masked(self, x, weights, ids, expert=off(lambda mlp, x: mlp(x)))


AUTOCAST = {
    "off where it was off": (experts_off, False, []),
    "off where it was on": (experts_off, True, ["CONTEXT"]),
    "off inside of on": (on(experts_off), False, ["CONTEXT"]),
    "off inside of on, again": (on(lambda m, x, *routed: experts_off(m, off(lambda x: x * 2)(x), *routed)), False, ["CONTEXT"]),
    "all of it off inside of on": (on(off(masked)), False, []),
    "on inside of off": (off(lambda *a: masked(*a, expert=on(lambda mlp, x: mlp(x)))), False, ["CONTEXT"]),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_switched_off(name):
    combine, around, reasons = AUTOCAST[name]
    layer, x = zoo.ModuleListMoE(combine).float(), torch.randn(T, zoo.D, dtype=torch.float32)
    run, backend = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        torch.testing.assert_close(run(x), layer(x))
    assert backend.reasons == reasons


GATHERED = {entry[0].__name__: entry for entry in zoo.STACKED if entry[0].__name__.startswith("gathered")}


@pytest.mark.parametrize("name", GATHERED)
def test_negative_ids_index_from_the_end(name):
    """Weights at -1 are the last expert's, where a mask has no expert -1."""
    combine, storage, bias = GATHERED[name]

    def dropping(self, x, weights, ids):
        return combine(self, x, weights, torch.where(weights > 0.5, ids, -1))

    layer = zoo.StackedMoE(dropping, storage, bias=bias)
    assert rewritten_layers(layer) == 0


NEVER_NEGATIVE = {
    "joined": lambda ids: torch.cat([ids[:, :1], ids[:, 1:]], -1),
    "masked": lambda ids: ids.masked_fill(ids >= zoo.E, 0),
    "multiplied": lambda ids: ids * (ids != zoo.E),
}


@pytest.mark.parametrize("name", NEVER_NEGATIVE)
def test_ids_that_are_never_negative(name):
    combine, storage, bias = GATHERED["gathered_bmm"]

    def changed(self, x, weights, ids):
        return combine(self, x, weights, NEVER_NEGATIVE[name](ids))

    assert rewritten_layers(zoo.StackedMoE(changed, storage, bias=bias)) == 1
