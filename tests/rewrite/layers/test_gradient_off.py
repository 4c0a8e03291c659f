"""Layers that are computed in blocks without gradients, where gradients are on around them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, compiled

T = 10


class Beside(nn.Module):
    """``combine`` tells how a layer is called; a linear layer beside it has gradients."""

    def __init__(self, combine, spelling=zoo.masked_sum):
        super().__init__()
        self.layer, self.combine = zoo.ModuleListMoE(spelling), combine
        self.beside = nn.Linear(zoo.D, zoo.D)

    def forward(self, x):
        return self.combine(self, x)


def whole_layer(self, x):
    with torch.no_grad():
        y = self.layer(x)
    return self.beside(x) + y.tanh()


def without_router(self, x):
    weights, ids = self.layer.router(x)
    with torch.no_grad():
        y = self.layer.combine(self.layer, x, weights, ids)
    return self.beside(x) * y + weights.sum()


def of_detached_tokens(self, x):
    with torch.no_grad():
        y = self.layer(x.detach() * 2)
    return self.beside(x) * y


def with_and_without(self, x):
    """A teacher and a student with the same weights."""
    with torch.no_grad():
        y = self.layer(x)
    return F.mse_loss(self.layer(x), y + 1) + self.beside(x)


@pytest.mark.parametrize(("combine", "spelling"), [
    (whole_layer, zoo.dense_then_gather), (without_router, zoo.masked_sum), (of_detached_tokens, zoo.loop_mixtral),
    (with_and_without, zoo.loop_mixtral),
], ids=lambda f: f.__name__)  # fmt: skip
def test_layers_without_gradients(fp64, combine, spelling):
    backend = check_against_eager(Beside(combine, spelling), torch.randn(T, zoo.D))
    assert_replaced(backend)
    assert len(backend.rewritten) == (2 if combine is with_and_without else 1)


def test_what_is_detached_in_place_had_a_gradient(fp64):
    def combine(self, x, weights, ids):
        scale = weights.sum()
        rest = scale * 0.0
        scale.detach_()
        return zoo.masked_sum(self, x, weights.detach(), ids) + rest

    assert_replaced(check_against_eager(zoo.ModuleListMoE(combine), torch.randn(T, zoo.D)))


def inference_mode_off(self, x):
    """As if it were not there."""
    with torch.inference_mode(False):
        y = self.layer(x)
    return self.beside(x) + y


def inference_mode_ends(self, x):
    with torch.inference_mode():
        shape = (x * 2).shape
    return self.layer(x).view(shape)


@pytest.mark.parametrize("combine", [inference_mode_off, inference_mode_ends], ids=lambda f: f.__name__)
def test_layers_with_gradients(fp64, combine):
    assert_replaced(check_against_eager(Beside(combine), torch.randn(T, zoo.D)))


def test_layers_in_inference_mode(fp64):
    layer, x = zoo.ModuleListMoE(zoo.masked_sum), torch.randn(T, zoo.D)
    run, backend = compiled(torch.inference_mode()(layer.forward))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(run(x), layer(x))
    assert_replaced(backend)


@pytest.mark.parametrize("name", ["gathered_einsum", "packed_loop"])
def test_views_of_weights_for_a_layer_in_inference_mode(fp64, name):
    """AOTAutograd does not trace views, made in such a block, of what was made outside."""
    layer, x = zoo.stacked(name), torch.randn(zoo.D, T).T

    @torch.inference_mode()
    def forward(x):
        x.mul_(2)
        for parameter in layer.parameters():
            parameter.mul_(0.9)
        return layer(x)

    run, backend = compiled(forward, aot=True)
    state = copy.deepcopy(layer.state_dict())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = run(x.clone())
    layer.load_state_dict(state)
    torch.testing.assert_close(got, forward(x.clone()))
    assert_replaced(backend)


# Near misses.


def gradients_inside_of_inference_mode(self, x):
    with torch.inference_mode():
        weights, ids = self.layer.router(x.detach())
        with torch.inference_mode(False):
            y = self.layer(x)
    return self.beside(x) + y


def added_to_what_has_gradients(self, x):
    """The sum keeps the gradient of what it starts from."""
    out = self.beside(x)
    with torch.no_grad():
        weights, ids = self.layer.router(x)
        for e, expert in enumerate(self.layer.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def tokens_without_gradients(self, x):
    with torch.no_grad():
        tokens = x * 1
        weights, ids = self.layer.router(x)
    return self.layer.combine(self.layer, tokens, weights, ids) + self.beside(x)


def some_experts_without_gradients(self, x):
    weights, ids = self.layer.router(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.layer.experts):
        with torch.set_grad_enabled(e > 1):
            y = expert(x)
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def sum_ends_with_gradients(self, x):
    weights, ids = self.layer.router(x)
    with torch.no_grad():
        rows = [expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.layer.experts)]
    return torch.stack(rows).sum(0) + self.beside(x)


@pytest.mark.parametrize(
    "combine",
    [
        added_to_what_has_gradients, tokens_without_gradients, some_experts_without_gradients, sum_ends_with_gradients,
        gradients_inside_of_inference_mode,
    ],  # fmt: skip
    ids=lambda f: f.__name__,
)
def test_gradients_are_what_they_were(fp64, combine):
    backend = check_against_eager(Beside(combine), torch.randn(T, zoo.D))
    assert len(backend.rewritten) == (combine is tokens_without_gradients)


# Ids that are chosen without gradients, for scores that have some.


def mask_of_ones(scores, ids):
    return torch.zeros_like(scores).scatter_(1, ids, 1.0)


def mask_of_truths(scores, ids):
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)


def mask_by_one_hot(scores, ids):
    return F.one_hot(ids, scores.shape[1]).sum(1)


def chosen_rows(experts, x, gate, mask):
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token = mask[:, e].nonzero().squeeze(-1)
        out.index_add_(0, token, expert(x[token]) * gate[token, e, None])
    return out


def all_rows(experts, x, gate, mask):
    return sum(gate[:, e, None] * expert(x) for e, expert in enumerate(experts))


class Masked(nn.Module):
    """Scores times a mask of the ids that were chosen; ``change`` does something to the scores without gradients."""

    def __init__(self, mask, combine, change=None):
        super().__init__()
        self.router = nn.Linear(zoo.D, zoo.E, bias=False)
        self.experts = nn.ModuleList(zoo.PlainMLP() for _ in range(zoo.E))
        self.mask, self.combine, self.change = mask, combine, change

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        with torch.no_grad():
            ids = scores.topk(2, dim=-1).indices
            mask = self.mask(scores, ids)
            if self.change is not None:
                mask = self.change(mask, scores)
        return self.combine(self.experts, x, scores * mask, mask)


@pytest.mark.parametrize(("mask", "combine", "num_tokens"), [
    (mask_of_ones, all_rows, T), (mask_of_ones, chosen_rows, 1), (mask_of_truths, chosen_rows, T), (mask_by_one_hot, all_rows, T),
    (mask_by_one_hot, chosen_rows, 1),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_masks_of_ids_without_gradients(fp64, mask, combine, num_tokens):
    backend = check_against_eager(Masked(mask, combine), torch.randn(num_tokens, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


def test_the_other_half_of_a_mask(fp64):
    backend = check_against_eager(Masked(mask_of_ones, all_rows, lambda mask, scores: 1 - mask), torch.randn(T, zoo.D))
    assert len(backend.rewritten) == 1


def test_scores_without_gradients_are_no_mask(fp64):
    """A gradient of scores that are computed without is none, whatever is multiplied with it."""
    backend = check_against_eager(Masked(mask_of_ones, all_rows, lambda mask, scores: scores), torch.randn(T, zoo.D))
    assert not backend.rewritten


def filled(weights):
    weights.fill_(1.0)


def copied(weights):
    weights.copy_(torch.ones_like(weights))


def doubled(weights):
    weights.mul_(2.0)


@pytest.mark.parametrize("write", [filled, copied, doubled], ids=lambda f: f.__name__)
def test_weights_that_are_written_without_gradients_keep_theirs(fp64, write):
    def combine(self, x):
        weights, ids = self.layer.router(x)
        weights = weights * 1.0
        with torch.no_grad():
            write(weights)
        return self.layer.combine(self.layer, x, weights, ids) + self.beside(x)

    check_against_eager(Beside(combine), torch.randn(T, zoo.D))
