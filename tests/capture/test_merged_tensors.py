"""Which tensor one is after a branch on data, and how it was made, depends on the branch: a program that asks is left alone.

Layers are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D]. They count what they are told.
"""

import operator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moeblaze_ops import compile as moeblaze_compile
from tests.capture import test_capture as guarded
from tests.capture.test_capture import make_layer
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")


def _rounds(self, x, weights, ids, start):
    """Each expert's number, and what the sum was before its tokens were added, and is afterwards."""
    out = start
    for e in range(len(self.experts)):
        before = out
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        yield e, before, out


def asks_identity(self, x, weights, ids):
    for _, before, out in _rounds(self, x, weights, ids, torch.zeros_like(x)):
        self.calls += out is not before
    return out


def asks_identity_by_a_function(self, x, weights, ids):
    for _, before, out in _rounds(self, x, weights, ids, torch.zeros_like(x)):
        self.calls += any(map(operator.is_, [before], [out]))
    return out


def asks_id(self, x, weights, ids):
    for _, before, out in _rounds(self, x, weights, ids, torch.zeros_like(x)):
        self.calls += id(out) == id(before)
    return out


def key_of_a_dict(self, x, weights, ids):
    seen = {}
    for e, before, out in _rounds(self, x, weights, ids, torch.zeros_like(x)):
        seen[before] = seen[out] = e
    self.calls += len(seen)
    return out


def in_a_set(self, x, weights, ids):
    for _, before, out in _rounds(self, x, weights, ids, torch.zeros_like(x)):
        self.calls += len({before, out})
    return out


def asks_whether_it_is_a_parameter(self, x, weights, ids):
    scale = self.router.gate.weight
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        taken = scale
        if token.numel() > 0:
            taken = scale + 0
            out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        self.calls += isinstance(taken, nn.Parameter)
    return out


def _parts(self, x, weights, ids, start):
    """What each expert gives to all tokens, which does not depend on it where it has none."""
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        part = start()
        if token.numel() > 0:
            part = part.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        yield part


def asks_requires_grad(self, x, weights, ids):
    out = torch.zeros_like(x)
    for part in _parts(self, x, weights, ids, lambda: torch.zeros_like(x)):
        self.calls += part.requires_grad
        out = out + part
    return out


def asks_it_of_what_is_made_of_it(self, x, weights, ids):
    out = torch.zeros_like(x)
    for part in _parts(self, x, weights, ids, lambda: torch.zeros_like(x)):
        part = 2 * part
        self.calls += getattr(part, "requires_grad", False)
        out = out + part / 2
    return out


def asks_is_leaf_of_what_is_written(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        part = torch.zeros_like(x)
        if token.numel() > 0:
            part.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        self.calls += part.is_leaf
        out = out + part
    return out


def skips_by_a_flag_that_is(self, x, weights, ids):
    """The flag is compared where an expert has no tokens."""
    first = (ids == 0).any().item()
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            out = out * (2 if first is True else 1)
            continue
        out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def skips_by_a_flag_that_equals(self, x, weights, ids):
    first = (ids == 0).any().item()
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            if first == 1:
                out = out * 2
            continue
        out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def asks_for_an_attribute(self, x, weights, ids):
    start = torch.zeros_like(x)
    start.is_start = True
    for _, _, out in _rounds(self, x, weights, ids, start):
        self.calls += hasattr(out, "is_start")
    return out


def asks_for_a_name(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            y = self.experts[e](x[token])
            out = out.index_add(0, token, y * weights[token, slot, None])
        self.calls += "y" in locals()
        y = None
        del y
    return out


def asks_of_tensors_beside(self, x, weights, ids):
    """Of tensors that no branch makes; in the work of an expert, of what it made."""
    start = torch.zeros_like(x)
    loss = weights.mean()
    out = start
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            rows = x[token]
            y = self.experts[e](rows)
            y = y if y.requires_grad and y is not rows else rows
            out = out.index_add(0, token, y * weights[token, slot, None])
    self.calls = loss.requires_grad + (loss is start) + len({loss, start, x}) + x.is_leaf + (out is None)
    return out


def skips_by_a_known_flag(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            out = out * (2 if self.training is None else 1)
            continue
        out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


LAYERS = (asks_of_tensors_beside, skips_by_a_known_flag)
NEAR_MISSES = (
    asks_identity, asks_identity_by_a_function, asks_id, key_of_a_dict, in_a_set, asks_whether_it_is_a_parameter,
    asks_requires_grad, asks_it_of_what_is_made_of_it, asks_is_leaf_of_what_is_written, skips_by_a_flag_that_is,
    skips_by_a_flag_that_equals, asks_for_an_attribute, asks_for_a_name,
)  # fmt: skip


@pytest.mark.parametrize("combine", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_depends_on_a_branch_is_left_alone(combine):
    guarded.assert_left_alone(guarded.check_twins(lambda: make_layer(combine)))


@pytest.mark.parametrize("combine", LAYERS, ids=lambda f: f.__name__)
def test_what_no_branch_makes_may_be_asked(combine):
    layer = make_layer(combine)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        guarded.check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert len(rewritten_in(records)) == 1


class Beside(nn.Module):
    """A layer of which another parameter is read where an expert has tokens only."""

    def __init__(self, layer, add, start=lambda scale: torch.zeros_like(scale[0])):
        super().__init__()
        self.layer, self.router, self.add, self.start = layer, layer.router, add, start
        self.scale = nn.Parameter(torch.ones(4, zoo.D))

    def forward(self, x):
        weights, ids = self.router(x)
        out, bonus = torch.zeros_like(x), self.start(self.scale)
        for e in range(4):
            mask = (ids == e).any(-1)
            if mask.any():
                bonus = self.add(bonus, (x.detach() * mask[:, None]).sum(0) * self.scale[e])
                out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.layer.experts[e](x)
        return out, bonus


def _adds_in_place(bonus, more):
    return bonus.add_(more)


@pytest.mark.parametrize("start", [lambda scale: torch.zeros_like(scale[0]), lambda scale: scale.sum(0)], ids=["zeros", "itself"])
@pytest.mark.parametrize("add", [torch.add, _adds_in_place], ids=["another", "written"])
def test_gradients_beside_a_layer_are_zeros_where_a_branch_is_not_taken(add, start):
    """As those of experts are: rows of ``scale`` whose experts have no tokens. What is written stays as it is."""
    layer = Beside(make_layer(asks_identity), add, start)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend)
        for penalty in (torch.tensor([0.0, 0, 0, 0]), torch.tensor([0.0, -1000, 0, -1000])):
            layer.router.penalty[:4] = penalty
            x = torch.randn(12, zoo.D)
            expected, actual = layer(x), run(x)
            torch.testing.assert_close(actual, expected)
            gradients = (torch.autograd.grad(bonus.square().sum(), layer.scale)[0] for _, bonus in (actual, expected))
            torch.testing.assert_close(*gradients)
    assert len(rewritten_in(records)) == (add is torch.add)


# A graph that breaks behind the loop: what follows is traced on its own, and may ask or write to what the loop left.


def _routed(layer, x):
    """Of tokens whose first feature is not above 0, no id is an expert's."""
    weights, ids = layer.router(x)
    return x, weights, torch.where(x[:, :1] > 0, ids, 4)


def _sum(layer, x):
    for _, _, now in _rounds(layer, *_routed(layer, x), torch.zeros_like(x)):
        out = now
    return out


def hands_on_what_is_made_of_it(layer, x):
    y = x + _sum(layer, x)
    torch._dynamo.graph_break()
    return y * 2


def hands_on_the_sum(layer, x):
    out = _sum(layer, x)
    torch._dynamo.graph_break()
    out += 1
    return out


def checkpointed(layer, x):
    y = x + checkpoint(_sum, layer, x, use_reentrant=False)
    torch._dynamo.graph_break()
    return y * 2


def asks_later_which_it_is(layer, x):
    start = torch.zeros_like(x)
    for _, _, now in _rounds(layer, *_routed(layer, x), start):
        out = now
    torch._dynamo.graph_break()
    return out + (out is start)


def writes_later_to_its_start(layer, x):
    start = torch.zeros_like(x)
    for _, _, now in _rounds(layer, *_routed(layer, x), start.view(x.shape)):
        out = now
    torch._dynamo.graph_break()
    start += 1
    return out


def writes_later_to_an_input(layer, x):
    for _, _, now in _rounds(layer, *_routed(layer, x), x):
        out = now
    torch._dynamo.graph_break()
    out += 1
    return x


def writes_later_to_one_of_two(layer, x):
    start = torch.zeros_like(x)
    for _, _, now in _rounds(layer, *_routed(layer, x), start):
        one = now
    for _, _, now in _rounds(layer, *_routed(layer, 2 * x), start):
        other = now
    torch._dynamo.graph_break()
    one += 1
    return other


def asks_later_how_many_experts(layer, x):
    x, weights, ids = _routed(layer, x)
    out, used = torch.zeros_like(x), []
    for e in range(len(layer.experts)):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out = out.index_add(0, token, layer.experts[e](x[token]) * weights[token, slot, None])
            used.append((weights,))
    y = x + out
    torch._dynamo.graph_break()
    return y + len(used)


def _run_broken(function) -> list:
    """What became of the layer, with tokens of which some, or all, choose no expert."""
    layer = make_layer(function)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records, torch.no_grad():
        run = torch.compile(function, backend=backend)
        for most in (9, 0):
            x = torch.randn(12, layer.router.gate.in_features).clamp(max=most)
            torch.testing.assert_close(run(layer, x.clone()), function(layer, x.clone()))
    return rewritten_in(records)


@pytest.mark.parametrize("function", [hands_on_what_is_made_of_it, hands_on_the_sum, checkpointed], ids=lambda f: f.__name__)
def test_a_break_behind_a_layer_keeps_it(function):
    """Of checkpointed code, nothing would be compiled if its frame were given up."""
    assert len(_run_broken(function)) == 1


@pytest.mark.parametrize(
    "function",
    [
        asks_later_which_it_is,
        writes_later_to_its_start,
        writes_later_to_an_input,
        writes_later_to_one_of_two,
        asks_later_how_many_experts,
    ],  # fmt: skip
    ids=lambda f: f.__name__,
)
def test_what_a_break_hands_on_is_what_eager_has(function):
    _run_broken(function)
