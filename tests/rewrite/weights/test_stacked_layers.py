"""Weights of all layers in one parameter: each layer reads the experts of its part, and its gradient is that of the part."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as switch
from tests.corpus.zoo.sorted import mm_of_groups
from tests.tools.rewrite_harness import check_against_eager, compiled, rewriting_backend, rewritten_in

L, E, K, T, D, H = 3, 4, 2, 9, 8, 6

pytestmark = pytest.mark.usefixtures("fp64")


# One layer, of the tokens, their routing and what holds its experts. Up weights are [gate; up], [2H, D], down weights [D, H].


def expert(x, up, down):
    gate, value = F.linear(x, up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, down)


def masks(x, weights, ids, up, down):
    return sum((weights * (ids == e)).sum(-1, keepdim=True) * expert(x, up[e], down[e]) for e in range(E))


def where_loop(x, weights, ids, up, down):
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, weights[token, slot, None] * expert(x[token], up[e], down[e]))
    return out


def module_list(x, weights, ids, up, down):
    """As lists of one tensor for each expert, which is a view of the parameter."""
    out = torch.zeros_like(x)
    for e, (w_up, w_down) in enumerate(zip(list(up), list(down), strict=True)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        out[token] += weights[token, slot, None] * expert(x[token], w_up, w_down)
    return out


def dense_einsum(x, weights, ids, up, down):
    scores = x.new_zeros(x.shape[0], E).scatter(1, ids, weights)
    gate, value = torch.einsum("td,efd->tef", x, up).chunk(2, -1)
    return torch.einsum("tef,edf,te->td", F.silu(gate) * value, down, scores)


def dense_bmm(x, weights, ids, up, down):
    scores = x.new_zeros(x.shape[0], E).scatter(1, ids, weights)
    gate, value = torch.bmm(x.expand(E, *x.shape), up.transpose(1, 2)).chunk(2, -1)
    return (torch.bmm(F.silu(gate) * value, down.mT) * scores.t().unsqueeze(-1)).sum(0)


def gathered(x, weights, ids, up, down):
    gate, value = torch.einsum("td,tkfd->tkf", x, up[ids]).chunk(2, -1)
    return (torch.einsum("tkf,tkdf->tkd", F.silu(gate) * value, down[ids]) * weights.unsqueeze(-1)).sum(1)


def grouped_mm(x, weights, ids, up, down):
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.bincount(chosen, minlength=E).cumsum(0).to(torch.int32)
    gate, value = mm_of_groups(x[order // K], up.transpose(1, 2), ends).chunk(2, -1)
    y = mm_of_groups(F.silu(gate) * value, down.transpose(1, 2), ends) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // K, y)


LAYERS = [masks, where_loop, module_list, dense_einsum, dense_bmm, gathered, grouped_mm]

# The part of layer i of a parameter, and the leading axes that it has.

TAKEN = {
    "select": (lambda w, i: w[i], (L, E)),
    "last_layer_by_minus_one": (lambda w, i: w[i - L], (L, E)),
    "slice": (lambda w, i: w[i * E : (i + 1) * E], (L * E,)),
    "narrow": (lambda w, i: w.narrow(0, i * E, E), (L * E,)),
    "chunk": (lambda w, i: w.chunk(L)[i], (L * E,)),
    "unflattened": (lambda w, i: w.view(L, E, *w.shape[1:])[i], (L * E,)),
    "flattened": (lambda w, i: w.flatten(0, 1)[i * E : (i + 1) * E], (L, E)),
    "unbind": (lambda w, i: w.unbind(0)[i], (L, E)),
    "experts_first": (lambda w, i: w[:, i], (E, L)),
    "every_third": (lambda w, i: w[i::L], (E * L,)),
    "of_two_stacks": (lambda w, i: w[1, i], (2, L, E)),
}


class Layers(nn.Module):
    """A residual around each layer; the number of the layer that each reads its up and its down weights of."""

    def __init__(self, layer, take, axes, up_of=tuple(range(L)), down_of=tuple(range(L)), shapes=((2 * H, D), (D, H))):
        super().__init__()
        self.layer, self.take, self.parts = layer, take, tuple(zip(up_of, down_of, strict=True))
        self.router = nn.Parameter(torch.randn(L, E, D))
        self.up, self.down = (nn.Parameter(torch.randn(*axes, *shape).mul_(0.4)) for shape in shapes)

    def forward(self, x):
        for router, (up, down) in zip(self.router, self.parts, strict=False):
            weights, ids = (x @ router.T).softmax(-1).topk(K)
            x = x + self.layer(x, weights, ids, self.take(self.up, up), self.take(self.down, down))
        return x


def rewritten(module) -> list[int]:
    """How many experts the layers have that were rewritten, after a comparison of all gradients with eager."""
    return [candidate.E for candidate in check_against_eager(module, torch.randn(T, D)).rewritten]


# Each spelling of a layer and each way to take a part of a parameter, once: how a layer is written does not decide how the view
# of its weights is found. Masks and gathers, which index experts one by one and all at once, meet most of them.
SPELLED = [
    (masks, "select"), (where_loop, "slice"), (module_list, "select"), (dense_einsum, "narrow"), (dense_bmm, "chunk"),
    (gathered, "last_layer_by_minus_one"), (grouped_mm, "unflattened"), (gathered, "flattened"), (masks, "unbind"),
    (gathered, "experts_first"), (masks, "every_third"), (gathered, "of_two_stacks"),
]  # fmt: skip


def test_all_are_spelled():
    assert {layer for layer, _ in SPELLED} == set(LAYERS) and {name for _, name in SPELLED} == set(TAKEN)


@pytest.mark.parametrize(("layer", "name"), SPELLED, ids=lambda value: getattr(value, "__name__", value))
def test_every_spelling_and_every_part(layer, name):
    assert rewritten(Layers(layer, *TAKEN[name])) == [E] * L


@pytest.mark.parametrize(("layer", "i"), [(where_loop, 1), (gathered, L - 1)], ids=["where_loop", "gathered"])
def test_layers_that_are_not_read_have_a_gradient_of_zero(layer, i):
    module = Layers(layer, *TAKEN["select"], (i,), (i,))
    assert rewritten(module) == [E]
    others = [j for j in range(L) if j != i]
    assert module.up.grad[i].any() and not module.up.grad[others].any() and not module.down.grad[others].any()


def test_up_and_down_of_different_layers_are_a_layer():
    assert rewritten(Layers(dense_bmm, *TAKEN["slice"], (0, 1, 1), (2, 2, 0))) == [E] * L


def test_loop_over_the_experts_that_were_hit():
    def hits(x, weights, ids, up, down):
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for e in (mask.sum((-1, -2)) > 0).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, weights[token, slot, None] * expert(x[token], up[e[0]], down[e[0]]))
        return out

    module, x = Layers(hits, *TAKEN["select"]), torch.randn(T, D)
    with rewriting_backend() as backend, switch.recording() as records:
        actual = torch.compile(module, backend=backend)(x)
    torch.testing.assert_close(actual, module(x))
    assert [candidate.E for candidate in rewritten_in(records)] == [E] * L


def test_biases_of_one_layer():
    class Biased(Layers):
        def __init__(self):
            super().__init__(self.loop, *TAKEN["select"], (1,), (1,))
            self.b_up, self.b_down = nn.Parameter(torch.randn(L, E, 2 * H)), nn.Parameter(torch.randn(L * E, D))

        def loop(self, x, weights, ids, up, down):
            out = torch.zeros_like(x)
            for e in range(E):
                token, slot = torch.where(ids == e)
                gate, value = F.linear(x[token], up[e], self.b_up[1, e]).chunk(2, -1)
                y = F.linear(F.silu(gate) * value, down[e], self.b_down[E : 2 * E][e])
                out = out.index_add(0, token, weights[token, slot, None] * y)
            return out

    assert rewritten(Biased()) == [E]


def test_one_tensor_for_each_expert_has_all_layers():
    module = Layers(masks, lambda experts, i: [w[i] for w in experts], ())
    del module.up, module.down
    module.up = nn.ParameterList(torch.randn(L, 2 * H, D) for _ in range(E))
    module.down = nn.ParameterList(torch.randn(L, D, H) for _ in range(E))
    assert rewritten(module) == [E] * L


def test_weights_under_autocast_are_cast_for_the_part_only():
    class Autocast(Layers):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    torch.set_default_dtype(torch.float32)
    run, backend = compiled(Autocast(masks, *TAKEN["select"], (1,), (1,)))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(torch.randn(T, D))
    assert len(backend.rewritten) == 1
    casts = [node.meta["example_value"].numel() for node in backend.modules[0].graph.nodes if node.target == "to"]
    assert max(casts) == E * 2 * H * D


def test_a_part_of_a_tensor_that_is_not_contiguous_is_left_alone():
    module = Layers(masks, lambda w, i: w[i].mT, (L, E), shapes=((D, 2 * H), (H, D)))
    assert rewritten(module) == [E] * L
    module = Layers(masks, *TAKEN["select"])
    module.up = nn.Parameter(torch.randn(L, E, D, 2 * H).mT)
    run = check_against_eager(module, torch.randn(T, D))
    assert run.reasons == ["WEIGHT_LAYOUT"] * L and "contiguous" in run.candidates[0].detail


class Stacks(nn.Module):
    """Experts in several parameters, of which ``order`` says how many each has; gate and up lie in one of them."""

    def __init__(self, layer, take, counts):
        super().__init__()
        self.layer, self.take, self.router = layer, take, nn.Parameter(torch.randn(D, E))
        self.up = nn.ParameterList(torch.randn(n, 2 * H, D) for n in counts)
        self.down = nn.ParameterList(torch.randn(n, D, H) for n in counts)

    def forward(self, x):
        weights, ids = (x @ self.router).softmax(-1).topk(K, dim=-1)
        return self.layer(x, weights, ids, self.take(self.up), self.take(self.down))


def rows_of(stacks):
    return [stack[i] for stack in stacks for i in range(stack.shape[0])]


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (2, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("layer", "take"),
    [(masks, rows_of), (where_loop, rows_of), (masks, lambda stacks: torch.cat(list(stacks)))],
    ids=["masks", "where_loop", "joined"],
)
def test_experts_in_several_stacks(layer, take, counts):
    module = Stacks(layer, take, counts)
    run = check_against_eager(module, torch.randn(T, D))
    assert len(run.rewritten) == 1
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_several_stacks_of_the_weights_of_other_experts():
    """Up and down of one number are of several experts, or one is there twice: so the layer computes it."""
    for order in ((3, 0, 2, 1), (0, 0, 2, 1)):
        module = Stacks(masks, lambda stacks, order=order: [rows_of(stacks)[e] for e in order], (2, 2))
        assert len(check_against_eager(module, torch.randn(T, D)).rewritten) == 1
    module = Stacks(masks, rows_of, (2, 2))
    module.take = lambda stacks: rows_of(stacks) if stacks is module.up else rows_of(stacks)[::-1]
    assert len(check_against_eager(module, torch.randn(T, D)).rewritten) == 1


def test_stacks_whose_gates_lie_elsewhere():
    """Up begins further behind gate in one of them: as two views, and no view of both."""
    module = Stacks(masks, rows_of, (2, 2))
    module.up[1] = nn.Parameter(torch.randn(2, 3 * H, D))
    module.take = lambda stacks: [torch.cat((w[:H], w[-H:])) if len(w) > 2 * H else w for w in rows_of(stacks)]
    assert len(check_against_eager(module, torch.randn(T, D)).rewritten) == 1


# Near misses.


@pytest.mark.parametrize(
    ("layer", "order"), [(masks, (3, 2, 1, 0)), (where_loop, (0, 2, 1, 3)), (masks, (1, 2, 3, 0))],
    ids=["reversed", "swapped", "rotated"],
)  # fmt: skip
def test_experts_in_another_order(layer, order):
    """Each number has the weights of another expert: the parameter is read in its own order, and ids become places there."""
    assert rewritten(Layers(layer, lambda w, i: [w[i][e] for e in order], (L, E))) == [E] * L


@pytest.mark.parametrize(
    ("layer", "order"), [(where_loop, (0, 0, 1, 2)), (masks, (0, 1, 2, 2))], ids=["first_twice", "last_twice"]
)
def test_experts_of_which_one_is_there_twice(layer, order):
    """No view of the parameter has them all, and each has views of its own."""
    assert rewritten(Layers(layer, lambda w, i: [w[i][e] for e in order], (L, E))) == [E] * L


def test_experts_that_overlap():
    """Gates and ups are a view each where the gate of an expert is the up of the one before, but not in between."""

    def rows(distance):
        module = Layers(masks, None, (L, E))
        module.up = nn.Parameter(torch.randn(L, 2 * H + (E - 1) * distance, D))
        module.take = lambda w, i: w[i] if w is module.down else [w[i, e * distance :][: 2 * H] for e in range(E)]
        return module

    assert rewritten(rows(H)) == [E] * L
    run = check_against_eager(rows(H // 2), torch.randn(T, D))
    assert not run.rewritten and set(run.reasons) == {"WEIGHT_LAYOUT"}


def test_each_expert_of_another_layer():
    """Experts in a row across layers are a layer of other experts; those of no common distance are views of their own."""
    take = lambda w, i: [w[(i + e) % L, e] for e in range(E)]  # noqa: E731
    assert rewritten(Layers(masks, take, (L, E))) == [E] * L
    across = lambda w, i: w[E // 2 + i : E // 2 + i + E]  # noqa: E731
    assert rewritten(Layers(masks, across, (L * E,))) == [E] * L


def test_experts_of_several_widths_in_one_tensor():
    def loop(x, weights, ids, up, down):
        total = 0
        for e in range(E):
            width = H - e
            hidden = F.silu(F.linear(x, up[e][:width])) * F.linear(x, up[e][H : H + width])
            total = total + (weights * (ids == e)).sum(-1, keepdim=True) * F.linear(hidden, down[e][:, :width])
        return total

    run = check_against_eager(Layers(loop, *TAKEN["select"]), torch.randn(T, D))
    assert not run.rewritten and run.reasons == ["WEIGHT_LAYOUT"] * L


def test_loop_over_some_of_the_experts():
    """Nothing is added for ids of the others, as for ids of no expert."""
    count = E - 2

    def first(x, weights, ids, up, down):
        return sum((weights * (ids == e)).sum(-1, keepdim=True) * expert(x, up[e], down[e]) for e in range(count))

    def last(x, weights, ids, up, down):
        return sum((weights * (ids == e)).sum(-1, keepdim=True) * expert(x, up[e], down[e]) for e in range(E - count, E))

    for some in (first, last):
        assert rewritten(Layers(some, *TAKEN["select"])) == [count] * L
