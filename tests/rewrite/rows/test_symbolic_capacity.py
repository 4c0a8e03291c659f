"""Capacities that grow with the number of tokens, in graphs in which that is a symbol: after a batch of another length."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moeblaze_ops import compile as moeblaze_compile
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

K, E, D, W = 2, 4, 6, 5
LENGTHS = (24, 17, 40)
CAPACITIES = {"whole": lambda T: T * K // E * 5 // 8, "rounded": lambda T: int(0.75 * T * K / E), "of_tokens": lambda T: T // 3}


class Layer(nn.Module):
    """Experts with room for C tokens each; ``place`` counts the slots before of the same expert."""

    def __init__(self, out, capacity):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, W)), nn.Parameter(torch.randn(E, W, D))
        self.out, self.capacity = out, capacity

    def forward(self, x):
        T = x.shape[0]
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        chosen = F.one_hot(ids, E)
        place = (chosen.view(T * K, E).cumsum(0) - 1).view(T, K, E)
        return self.out(self, x, weights, chosen, place, self.capacity(T))


def masks(layer, x, weights, chosen, place, C, below=torch.lt):
    share = weights[..., None] * chosen * below(place, C)
    return sum(share[..., e].sum(-1, keepdim=True) * (F.silu(x @ layer.up[e]) @ layer.down[e]) for e in range(E))


def places(layer, x, weights, chosen, place, C, below=torch.lt, room=0):
    own = (place * chosen).sum(-1)
    there = (own[..., None] == torch.arange(C + room)).to(x.dtype)
    combine = torch.einsum("tk,tke,tkc->tec", weights * below(own, C), chosen.to(x.dtype), there)
    rows = torch.einsum("tec,td->ecd", combine.bool().to(x.dtype), x)
    return torch.einsum("tec,ecd->td", combine, torch.bmm(F.silu(torch.bmm(rows, layer.up)), layer.down))


def masks_of_the_last_too(*args):
    return masks(*args, below=torch.le)


def places_with_the_last_left_out(*args):
    return places(*args, below=torch.le)


def fewer_places(*args):
    return places(*args, room=-1)


def masks_by_a_number_in_the_graph(layer, x, weights, chosen, place, C):
    """The capacity is what ids are compared with, too."""
    return masks(layer, x, weights, chosen * (chosen.argmax(-1, keepdim=True) != C), place, C)


TWINS = (places_with_the_last_left_out, fewer_places, masks_by_a_number_in_the_graph)


def results(layer, run, lengths):
    for T in lengths:
        torch.manual_seed(T)
        layer.zero_grad()
        x = torch.randn(T, D, requires_grad=True)
        out = run(x)
        out.sin().sum().backward()
        yield [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def rewritten(out, capacity):
    layer = Layer(out, CAPACITIES[capacity])
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=True)
        for own, other in zip(results(layer, run, LENGTHS), results(layer, layer, LENGTHS), strict=True):
            torch.testing.assert_close(own, other)
    return len(rewritten_in(records))


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("out", [masks, masks_of_the_last_too, places], ids=lambda f: f.__name__)
def test_layers(out, capacity):
    assert rewritten(out, capacity) == 1


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("out", TWINS, ids=lambda f: f.__name__)
def test_twins_are_left_alone_or_right(out, capacity):
    rewritten(out, capacity)
