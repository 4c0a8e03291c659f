"""Layers under activation checkpointing, several of them in one compiled function: rewritten, with the gradients of eager."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moeblaze_ops import compile as moeblaze_compile
from tests.corpus.loops import guarded
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

kept = functools.partial(checkpoint, use_reentrant=False)


def _policy(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
_on_cpu = functools.partial(torch.autocast, "cpu", torch.bfloat16)


def each(a, b, c, x):
    return kept(b, kept(a, x))


def three(a, b, c, x):
    return kept(c, kept(b, kept(a, x)))


def one_outside(a, b, c, x):
    return b(kept(a, x))


def both_in_one(a, b, c, x):
    return kept(lambda y: b(a(y)), x)


def nested(a, b, c, x):
    return kept(lambda y: b(kept(a, y)), x)


def selective(a, b, c, x):
    return kept(b, kept(a, x, context_fn=_contexts), context_fn=_contexts)


def dropped_out(a, b, c, x):
    return kept(lambda y: nn.functional.dropout(b(y), 0.0), kept(lambda y: nn.functional.dropout(a(y), 0.0), x))


def mixed_precision(a, b, c, x):
    with _on_cpu():
        return kept(b, kept(a, x)).to(x.dtype)


def same_layer_twice(a, b, c, x):
    return kept(a, kept(a, x))


def reentrant(a, b, c, x):
    return checkpoint(b, checkpoint(a, x, use_reentrant=True), use_reentrant=True)


LAYERS = {
    "dense": lambda: zoo.ModuleListMoE(zoo.masked_sum),
    "in_place": lambda: zoo.ModuleListMoE(zoo.masked_add_method),
    "sorted": lambda: zoo.stacked("sorted_torchtitan"),
    "skipping": lambda: zoo.ModuleListMoE(guarded.shape_continue),
}
LEARNING = {"all": (True, True), "no_input": (False, True), "no_router": (True, False), "experts_alone": (False, False)}


def _step(run, layers, x):
    x = x.detach().clone().requires_grad_(x.requires_grad)
    layers.zero_grad()
    out = run(*layers, x)
    out.square().sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in layers.named_parameters()}


@pytest.mark.parametrize(
    ("place", "layer", "learning"),
    [
        (each, "dense", "all"), (three, "skipping", "no_router"), (one_outside, "sorted", "no_input"),
        (both_in_one, "in_place", "all"), (nested, "dense", "experts_alone"), (selective, "skipping", "all"),
        (dropped_out, "sorted", "all"), (dropped_out, "skipping", "no_input"), (mixed_precision, "sorted", "no_input"),
        (same_layer_twice, "in_place", "no_router"), (reentrant, "skipping", "all"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_steps_are_those_of_eager_mode(fp64, place, layer, learning):
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = nn.ModuleList(LAYERS[layer]() for _ in range(3))
    of_input, of_router = LEARNING[learning]
    if place is reentrant:
        of_input = True  # without, eager mode has no gradients at all
    for each_layer in layers:
        each_layer.router.requires_grad_(of_router)
    x = torch.randn(10, zoo.D, requires_grad=of_input)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        actual = _step(torch.compile(place, backend=backend), layers, x)
    torch.testing.assert_close(actual, _step(place, layers, x))
    assert len(rewritten_in(records)) >= (3 if place is three else 1 if place is same_layer_twice else 2)
