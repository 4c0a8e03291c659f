"""Routing weights that are multiplied by a number of each expert, or of each token, beside the expert; masks of padding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager

T = 11


class Layer(zoo.ModuleListMoE):
    """With numbers of experts, and with tokens that are padding."""

    def __init__(self, combine, **kwargs):
        super().__init__(combine, **kwargs)
        self.scale = nn.Parameter(torch.randn(zoo.E))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(zoo.E))
        self.gain = nn.Parameter(torch.randn(zoo.E, zoo.D))
        self.register_buffer("is_token", torch.arange(T) % 3 != 0)
        self.register_buffer("attention_mask", self.is_token.long())
        self.register_buffer("kept", torch.arange(T * zoo.K).view(T, zoo.K) % 4 != 0)


def dense_scale(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out += (weights * (ids == e)).sum(-1, keepdim=True) * self.scale[e] * expert(x)
    return out


def dense_scale_apart(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * (self.scales[e].sigmoid() * expert(x))
    return out


def stacked_scale(self, x, weights, ids):
    y = torch.stack([expert(x) for expert in self.experts], dim=1) * self.scale[:, None]
    return (y * torch.zeros(x.shape[0], zoo.E).scatter(1, ids, weights)[..., None]).sum(1)


def loop_scale(self, x, weights, ids, of=lambda e: e):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * self.scale[of(e)])
    return out


def loop_scale_of_others(self, x, weights, ids):
    """The numbers are in another order than the experts."""
    return loop_scale(self, x, weights, ids, lambda e: (e + 1) % zoo.E)


def loop_scale_without_weights(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token = torch.where(ids == e)[0]
        out.index_add_(0, token, expert(x[token]) * self.scales[e])
    return out


def loop_scale_by_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        y = expert(x[token]) * self.scale[ids[token, slot]][:, None]
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def loop_scale_and_number_of_token(self, x, weights, ids):
    out, share = torch.zeros_like(x), x.mean(dim=-1, keepdim=True).exp()
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * self.scale[e] * share[token])
    return out


def loop_number_of_token_without_weights(self, x, weights, ids):
    out, share = torch.zeros_like(x), x.mean(dim=-1, keepdim=True).exp()
    for e, expert in enumerate(self.experts):
        token = torch.where(ids == e)[0]
        out.index_add_(0, token, expert(x[token]) * share[token])
    return out


def scores_of_scaled_slots(self, x, weights, ids):
    """The scale is inside the sum that is the score."""
    scores = (F.one_hot(ids, zoo.E) * (weights * self.scale[ids])[..., None]).sum(1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * scores[:, e, None]
    return out


def scores_scaled_twice(self, x, weights, ids):
    scores = (F.one_hot(ids, zoo.E) * (weights * self.scale[ids])[..., None]).sum(1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * scores[:, e, None] * self.scale[e]
    return out


def loop_multiples(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None], alpha=2.5)
    return out


def dense_multiples(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = torch.add(out, (weights * (ids == e)).sum(-1, keepdim=True) * expert(x), alpha=-2)
    return out


def dense_multiples_of_products(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out.addcmul_((weights * (ids == e)).sum(-1, keepdim=True), expert(x), value=0.5)
    return out


def hits_of_tokens(self, x, weights, ids, is_token=None):
    out = torch.zeros_like(x)
    is_token = self.is_token if is_token is None else is_token
    mask = (F.one_hot(ids, zoo.E) * is_token[:, None, None]).permute(2, 1, 0)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def hits_of_attention_mask(self, x, weights, ids):
    return hits_of_tokens(self, x, weights, ids, self.attention_mask)


def dense_attention_mask(self, x, weights, ids, numbers=None):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, zoo.E) * (self.attention_mask if numbers is None else numbers)[:, None, None]
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * mask[..., e]).sum(-1, keepdim=True)
    return out


def dense_multiples_of_tokens(self, x, weights, ids):
    """A mask that holds other numbers than 0 and 1 is a factor."""
    return dense_attention_mask(self, x, weights, ids, torch.arange(x.shape[0]) - 2)


def sums_of_attention_mask(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, zoo.E) * self.attention_mask[:, None, None]
    for e, expert in enumerate(self.experts):
        token = mask[..., e].sum(-1).nonzero().flatten()
        out.index_add_(0, token, expert(x[token]) * (weights * mask[..., e]).sum(-1)[token, None])
    return out


def both_conditions(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where((ids == e) & self.is_token[:, None])
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def kept_slots(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where((ids == e) & self.kept)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


SCALED = (
    dense_scale, dense_scale_apart, stacked_scale, loop_scale, loop_scale_of_others, loop_scale_without_weights,
    loop_scale_by_ids, loop_scale_and_number_of_token, loop_number_of_token_without_weights, scores_of_scaled_slots,
    loop_multiples, dense_multiples, dense_multiples_of_products, dense_attention_mask, dense_multiples_of_tokens,
)  # fmt: skip
MASKED = (hits_of_tokens, hits_of_attention_mask, sums_of_attention_mask, both_conditions, kept_slots)


@pytest.mark.parametrize("combine", (*SCALED, *MASKED), ids=lambda f: f.__name__)
def test_scaled_layers_are_replaced(fp64, combine):
    assert_replaced(check_against_eager(Layer(combine), torch.randn(T, zoo.D)))


@pytest.mark.parametrize("combine", (loop_scale, dense_attention_mask, hits_of_tokens), ids=lambda f: f.__name__)
def test_in_half_precision(combine):
    torch.manual_seed(0)
    layer = Layer(combine).to(torch.bfloat16)
    # bf16 holds 8 bits; eager and the ops round at different places, a few times each.
    assert_replaced(check_against_eager(layer, torch.randn(T, zoo.D).bfloat16(), tolerance=2**-4))


class Stacked(zoo.StackedMoE):
    def __init__(self, experts):
        super().__init__(experts, "linear")
        self.scale = nn.Parameter(torch.randn(zoo.E))


def gathered_scale(self, x, weights, ids):
    gate, up = (torch.einsum("td,tkfd->tkf", x, w[ids]) for w in (self.w1, self.w3))
    y = torch.einsum("tkf,tkdf->tkd", F.silu(gate) * up, self.w2[ids])
    return (y * weights.unsqueeze(-1) * self.scale[ids].unsqueeze(-1)).sum(dim=1)


def batched_scale(self, x, weights, ids):
    gate, up = (torch.einsum("td,efd->etf", x, w) for w in (self.w1, self.w3))
    y = torch.einsum("etf,edf->etd", F.silu(gate) * up, self.w2) * self.scale[:, None, None]
    return torch.einsum("etd,te->td", y, torch.zeros(x.shape[0], zoo.E).scatter(1, ids, weights))


@pytest.mark.parametrize("experts", [gathered_scale, batched_scale], ids=lambda f: f.__name__)
def test_stacked_experts(fp64, experts):
    assert_replaced(check_against_eager(Stacked(experts), torch.randn(T, zoo.D)))


class Chosen(nn.Module):
    """The same weights and ids for any tokens, in tensors that are made of these, as a router makes them."""

    def __init__(self, weights, ids):
        super().__init__()
        self.register_buffer("weights", weights)
        self.register_buffer("ids", ids)

    def forward(self, x):
        return self.weights + x.new_zeros(()), self.ids


@pytest.mark.parametrize("combine", MASKED[:-1], ids=lambda f: f.__name__)
def test_padding_may_hold_anything(fp64, combine):
    """No expert gets what is masked: not even the gradients of its weights tell."""
    layer, x = Layer(combine), torch.randn(T, zoo.D)
    layer.router = Chosen(*(t.detach() for t in layer.router(x)))
    x[~layer.is_token] = torch.inf
    assert_replaced(check_against_eager(layer, x))
    assert layer(x).isfinite().all()


def gathered_mask_of_input(self, x, weights, ids):
    """Experts make something of zeros."""
    x = (x * self.is_token[:, None])[:, None, :] * weights[..., None]
    h = torch.einsum("tkd,tkfd->tkf", x, self.gate_up[ids]) + self.gate_up_bias[ids]
    y = torch.einsum("tkf,tkdf->tkd", F.silu(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1], self.down[ids])
    return (y + self.down_bias[ids]).sum(dim=1)


def test_mask_of_input(fp64):
    layer = zoo.StackedMoE(gathered_mask_of_input, "packed_linear", bias=True)
    layer.register_buffer("is_token", torch.arange(T) % 3 != 0)
    check_against_eager(layer, torch.randn(T, zoo.D))


def test_scale_that_scores_have_already(fp64):
    check_against_eager(Layer(scores_scaled_twice), torch.randn(T, zoo.D))


# Near misses.


def scale_of_some_features(self, x, weights, ids):
    """Every expert has numbers of its own for features."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * self.gain[e])
    return out


def scale_of_some_experts(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        y = (weights * (ids == e)).sum(-1, keepdim=True) * expert(x)
        out = out + (y * self.scale[e] if e else y)
    return out


def scale_of_unselected(self, x, weights, ids):
    """Of the experts that a token did not choose, too."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + ((weights * (ids == e)).sum(-1, keepdim=True) + self.scale[e]) * expert(x)
    return out


def scale_of_rows(self, x, weights, ids):
    """Of the row's place among the expert's."""
    out, numbers = torch.zeros_like(x), x.sum(-1)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        y = expert(x[token]) * weights[token, slot, None] * numbers[: token.shape[0], None]
        out.index_add_(0, token, y)
    return out


def multiples_of_the_sum(self, x, weights, ids):
    """What was added before is multiplied again and again."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = torch.add((weights * (ids == e)).sum(-1, keepdim=True) * expert(x), out, alpha=2)
    return out


def positive_marks_only(self, x, weights, ids):
    """A token whose number is negative is no hit."""
    out = torch.zeros_like(x)
    mask = (F.one_hot(ids, zoo.E) * (torch.arange(x.shape[0]) - 2)[:, None, None]).permute(2, 1, 0)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(mask[e] > 0)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def marks_beside_hits(self, x, weights, ids):
    """Every expert has all tokens that are no padding."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where((ids == e) | self.is_token[:, None])
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


NEAR_MISSES = (
    scale_of_some_features, scale_of_unselected, scale_of_rows, multiples_of_the_sum, positive_marks_only, marks_beside_hits,
)  # fmt: skip


@pytest.mark.parametrize("combine", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_left_alone(fp64, combine):
    backend = check_against_eager(Layer(combine), torch.randn(T, zoo.D))
    assert not backend.rewritten


def test_scale_of_some_experts(fp64):
    """One number is held by no tensor."""
    assert not check_against_eager(Layer(scale_of_some_experts), torch.randn(T, zoo.D)).rewritten
