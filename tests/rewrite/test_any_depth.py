"""What says how deep is looked, or only guesses, may say anything: a layer is lost then, or found in another way, and no
rewrite is wrong.

So these files are not among the trusted lines, and `test_layering.py` names them.
"""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops.lowering.evaluate import depth, joined_rows, projections
from moeblaze_ops.lowering.forms import factors
from moeblaze_ops.lowering.graph import computed_weights, model_state
from moeblaze_ops.lowering.index_notation import reshape_index
from tests.corpus import twins
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import Captured

pytestmark = pytest.mark.usefixtures("fp64")

H = zoo.D  # so that sizes do not tell the axes apart


class Everything(frozenset):
    def __contains__(self, item):
        return True


ANSWERS = {
    depth.Depth.ends: (True, False), depth.Depth._is_nested: (True, False), depth.partial_sums: ([],),
    projections.is_weight: (True, False), projections.is_no_projection: (True, False), projections.projects: (True, False),
    projections.is_mask: (True, False), projections.moves_with_token: (True, False),
    projections.letters_of_choices: (set("abcdefghijklmnopqrstuvwxyz"), set()),
    factors.is_given: (True, False), factors.is_low_rank: (True, False), factors.is_scale: (True, False),
    factors.look_into: (None,), computed_weights.is_computed_weight: (True, False),
    model_state.nodes_of_state: (frozenset(), Everything()),
    joined_rows.joined_sizes: ((), (16,), (5, 11), (-1, 17), (3, 3)),
    reshape_index.common_groups: ((), ((range(1), range(1)),), ((range(1), range(1)), (range(1, 2), range(1, 2)))),
}  # fmt: skip


class Adapted(nn.Module):
    """Experts with adapters; the scale of one of them is a number for each feature, and no layer's."""

    def __init__(self, scale):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(zoo.E, *s) / 4) for s in ((H, zoo.D), (zoo.D, H)))
        self.a, self.b = (nn.Parameter(torch.randn(zoo.E, *s)) for s in ((3, zoo.D), (H, 3)))
        self.router, self.scale = nn.Linear(zoo.D, zoo.E), nn.Parameter(scale)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(zoo.E):
            h = F.linear(x, self.up[e]) + self.scale * F.linear(F.linear(x, self.a[e]), self.b[e])
            out = out + (weights * (ids == e)).sum(-1, keepdim=True) * F.linear(F.silu(h), self.down[e])
        return out + F.linear(x.cumsum(0), self.down[0] @ self.up[0])


LAYERS = {
    **{name: lambda name=name: twins.build(name) for name in ("einsum_weighted_tokens", "gathered_einsum", "sorted_index_add")},
    "dense_einsum": lambda: zoo.StackedMoE(*zoo.BY_NAME["dense_einsum"][:2]),
    "einsum_dispatched": lambda: zoo.StackedMoE(*zoo.BY_NAME["einsum_dispatched"][:2]),
    "joined_slots": lambda: zoo.ModuleListMoE(zoo.joined_slots),
    "adapted": lambda: Adapted(torch.rand(1)), "adapted_by_feature": lambda: Adapted(torch.rand(H)),
}  # fmt: skip


@functools.cache
def captured() -> list[Captured]:
    torch.manual_seed(0)
    return [Captured(layer(), torch.randn(8, zoo.D)) for layer in LAYERS.values()]


def say(monkeypatch, function, answer):
    """Let a function give one answer, wherever it is imported."""
    if "." in function.__qualname__:
        monkeypatch.setattr(depth.Depth, function.__name__, lambda *args: answer)
        return
    for module in [m for name, m in sys.modules.items() if name.startswith("moeblaze_ops.lowering.")]:
        if getattr(module, function.__name__, None) is function:
            monkeypatch.setattr(module, function.__name__, lambda *args, **kwargs: answer)


@pytest.mark.parametrize(("function", "answer"), [(f, answer) for f, answers in ANSWERS.items() for answer in answers])
def test_no_answer_is_wrong(function, answer, monkeypatch):
    say(monkeypatch, function, answer)
    for layer in captured():
        layer.check_against_eager()
