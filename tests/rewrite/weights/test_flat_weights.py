"""Up and down weights in one parameter, of all experts or of each: kernels read views of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops.lowering.match.operands.weight_layout import Part, stored_order
from moeblaze_ops.lowering.match.reasons import Declined
from tests.tools.rewrite_harness import check_against_eager

E, K, T, D, H = 4, 2, 9, 8, 6
UP, DOWN = 2 * H * D, D * H

pytestmark = pytest.mark.usefixtures("fp64")


def dense(x, weights, ids, gate, up, down):
    """Weights ``[E, H, D]``, ``[E, H, D]`` and ``[E, D, H]``."""
    scores = x.new_zeros(x.shape[0], E).scatter(1, ids, weights)
    hidden = F.silu(torch.einsum("td,ehd->teh", x, gate)) * torch.einsum("td,ehd->teh", x, up)
    return torch.einsum("teh,edh,te->td", hidden, down, scores)


def loop(x, weights, ids, gate, up, down):
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y = F.linear(F.silu(F.linear(x[token], gate[e])) * F.linear(x[token], up[e]), down[e])
        out = out.index_add(0, token, weights[token, slot, None] * y)
    return out


def gathered(x, weights, ids, gate, up, down):
    hidden = F.silu(torch.einsum("td,tkhd->tkh", x, gate[ids])) * torch.einsum("td,tkhd->tkh", x, up[ids])
    return (torch.einsum("tkh,tkdh->tkd", hidden, down[ids]) * weights.unsqueeze(-1)).sum(1)


LAYERS = [dense, loop, gathered]


# The parameter's sizes, and its weights ([2H, D] or (gate, up) per expert, and [D, H]).


def one_after_another(w):
    return w[: E * UP].view(E, 2 * H, D), w[E * UP :].view(E, D, H)


def split_and_viewed(w):
    up, down = w.split([E * UP, E * DOWN])
    return up.view(E, 2 * H, D), down.view(E, D, H)


def behind_others(w):
    return w.narrow(0, 5, E * UP).unflatten(0, (E, 2 * H, D)), w.narrow(0, 7 + E * UP, E * DOWN).unflatten(0, (E, D, H))


def of_each_expert(w):
    up, down = w.split([UP, DOWN], dim=1)
    return up.unflatten(1, (2 * H, D)), down.unflatten(1, (D, H))


def of_each_expert_down_first(w):
    return w[:, DOWN:].reshape(E, 2 * H, D), w[:, :DOWN].reshape(E, D, H)


def down_transposed(w):
    return w[:, : 2 * H], w[:, 2 * H :].transpose(1, 2)


def down_between(w):
    gate, down, up = w.split([H * D, DOWN, H * D], dim=-1)
    return (gate.view(E, H, D), up.view(E, H, D)), down.view(E, D, H)


def up_before_gate(w):
    up, gate, down = w.split([H * D, H * D, DOWN], dim=-1)
    return (gate.view(E, H, D), up.view(E, H, D)), down.view(E, D, H)


def experts_alternate(w):
    """Expert e has every E-th row."""
    rows = w.view(3 * H, E, D)
    return rows[: 2 * H].transpose(0, 1), rows[2 * H :].permute(1, 2, 0)


def up_and_gate_alternate(w):
    up, gate, down = w.view(E, D, H, 3).unbind(-1)
    return (gate.mT, up.mT), down


def wider_than_read(w):
    return w[:, : 2 * H, :D], w[:, 2 * H + 1 :, 1 : D + 1].mT


STORED = [
    ((E * (UP + DOWN),), one_after_another),
    ((E * (UP + DOWN),), split_and_viewed),
    ((E * (UP + DOWN) + 9,), behind_others),
    ((E, UP + DOWN), of_each_expert),
    ((E, UP + DOWN), of_each_expert_down_first),
    ((E, 3 * H, D), down_transposed),
    ((E, UP + DOWN), down_between),
    ((E, UP + DOWN), up_before_gate),
    ((E * (UP + DOWN),), experts_alternate),
    ((E, D, H, 3), up_and_gate_alternate),
    ((E, 3 * H + 1, D + 3), wider_than_read),
]


class Layer(nn.Module):
    def __init__(self, layer, sizes, read):
        super().__init__()
        self.layer, self.read = layer, read
        self.router, self.flat = nn.Parameter(torch.randn(E, D)), nn.Parameter(torch.randn(sizes).mul_(0.4))

    def forward(self, x):
        weights, ids = (x @ self.router.T).softmax(-1).topk(K)
        up, down = self.read(self.flat)
        gate, up = up if isinstance(up, tuple) else up.chunk(2, dim=1)
        return x + self.layer(x, weights, ids, gate, up, down)


def check(*args):
    return check_against_eager(Layer(*args), torch.randn(T, D))


@pytest.mark.parametrize(("layer", "sizes", "read"), [
    (LAYERS[number % len(LAYERS)], *stored) for number, stored in enumerate(STORED)
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_one_parameter(layer, sizes, read):
    run = check(layer, sizes, read)
    assert [candidate.E for candidate in run.rewritten] == [E] and not run.reasons
    left = {"index", "clone", "contiguous", "cat", "stack"} & set(run.operators())
    assert not left, "weights are views"


def test_one_parameter_for_each_expert():
    class Experts(Layer):
        def __init__(self):
            super().__init__(loop, (1,), None)
            self.flat = None
            self.experts = nn.ParameterList(torch.randn(UP + DOWN).mul_(0.4) for _ in range(E))
            self.read = lambda _: tuple(zip(*(self.of_one(self.experts[e]) for e in range(E)), strict=True))

        def of_one(self, w):
            gate, up, down = w.split([H * D, H * D, DOWN])
            return (gate.view(H, D), up.view(H, D)), down.view(D, H)

        def forward(self, x):
            weights, ids = (x @ self.router.T).softmax(-1).topk(K)
            up, down = self.read(None)
            return x + loop(x, weights, ids, *zip(*up, strict=True), down)

    run = check_against_eager(Experts(), torch.randn(T, D))
    assert len(run.rewritten) == 1 and not run.reasons


def test_biases_are_a_part_too():
    def biased(x, weights, ids, gate, up, down):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            hidden = F.silu(F.linear(x[token], *gate[e])) * F.linear(x[token], *up[e])
            out = out.index_add(0, token, weights[token, slot, None] * F.linear(hidden, *down[e]))
        return out

    def read(w):
        w_up, w_down, b_up, b_down = w.split([UP, DOWN, 2 * H, D], dim=1)
        gate, up = w_up.view(E, 2 * H, D).chunk(2, dim=1)
        b_gate, b_up = b_up.chunk(2, dim=1)
        pairs = [list(zip(*both, strict=True)) for both in ((gate, b_gate), (up, b_up), (w_down.view(E, D, H), b_down))]
        return tuple(pairs[:2]), pairs[2]

    run = check(biased, (E, UP + DOWN + 2 * H + D), read)
    assert len(run.rewritten) == 1 and not run.reasons


def down_from_the_end(w):
    return w[:, :UP].view(E, 2 * H, D), [w[E - 1 - e, UP:].view(D, H) for e in range(E)]


def expert_twice(w):
    return w[:, :UP].view(E, 2 * H, D), [w[max(e, 1), UP:].view(D, H) for e in range(E)]


def distance_grows(w):
    return w[: E * UP].view(E, 2 * H, D), [w[e * (e + 1) :][:DOWN].view(D, H) for e in range(E)]


@pytest.mark.parametrize(
    ("sizes", "read"),
    [((E, UP + DOWN), down_from_the_end), ((E, UP + DOWN), expert_twice), ((E * (UP + DOWN),), distance_grows)],
)
def test_parts_of_each_expert(sizes, read):
    """No view has all of them."""
    run = check(loop, sizes, read)
    assert len(run.rewritten) == 1 and not run.reasons


# Near misses.


def gates_overlap(w):
    """Each begins one row behind the one before."""
    gates, ups = [w[e * D :][: H * D].view(H, D) for e in range(E)], w[E * H * D : E * UP].view(E, H, D)
    return (gates, ups), w[E * UP :].view(E, D, H)


def test_what_is_no_view():
    run = check(loop, (E * (UP + DOWN),), gates_overlap)
    assert not run.rewritten and run.reasons == ["WEIGHT_LAYOUT"]


# The arithmetic of parts.


@pytest.mark.parametrize(
    "axes",
    [((12, 2), (4, 3), (1, 4)), ((12, 2), (1, 3), (3, 4)), ((24, 2), (5, 2), (2, 2)), ((0, 1), (6, 3), (0, 1), (1, 5))],
    ids=str,
)
def test_parts_have_the_elements(axes):
    strides, sizes = zip(*axes, strict=True)
    for start in range(0, 60, 7):
        stored = torch.arange(100)
        parts, viewed, order = stored_order(axes, start, stored.numel())
        for part in parts:
            stored = stored.view(part.sizes).narrow(-1, part.start, part.length)
        assert torch.equal(stored.view(viewed).permute(order), torch.arange(100).as_strided(sizes, strides, start)), start


@pytest.mark.parametrize(
    ("axes", "start"),
    [
        (((12, 2), (4, 4), (1, 4)), 0),  # four times four of twelve
        (((12, 2), (-4, 3), (1, 4)), 8),
        (((0, 2), (4, 3)), 0),
        (((4, 3), (0, 2)), 0),
        (((12, 8), (4, 3), (1, 4)), 5),  # one more than the tensor has
        (((12, 9), (4, 3), (1, 4)), 0),
        (((4, 0), (1, 4)), 0),
        (((4, 2), (1, 4)), -1),
        (((3, 1),), 100),
    ],
    ids=str,
)
def test_no_parts_have_the_elements(axes, start):
    with pytest.raises(Declined):
        stored_order(axes, start, 100)


def test_all_of_a_tensor_is_no_part():
    assert stored_order(((12, 2), (4, 3), (1, 4)), 0, 24) == ((), (2, 3, 4), (0, 1, 2))
    assert stored_order(((12, 1), (4, 3), (1, 4)), 12, 24) == ((Part((1, 24), 12, 12),), (1, 3, 4), (0, 1, 2))
