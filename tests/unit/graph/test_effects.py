"""Which functions of torch draw random numbers, against what they do to its generator."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from moeblaze_ops.lowering.graph.effects import acts_beside_tensors

DRAW = """
F.dropout(x)    F.dropout(x, 0.2)    F.dropout1d(x[0])    F.dropout2d(x)    F.dropout3d(x)    F.alpha_dropout(x, 0.2, True)
F.feature_alpha_dropout(x, 0.2, training=True)    F.rrelu(-x, training=True)    F.gumbel_softmax(x)
F.fractional_max_pool2d(x, 2, output_size=3)    F.fractional_max_pool3d(x, 2, output_size=(1, 3, 3))
torch.dropout(x, 0.5, True)    torch.bernoulli(x)    x.bernoulli(0.5)    x.clone().bernoulli_()    torch.binomial(x, x)
torch.poisson(x)    torch.normal(x, x)    torch._standard_gamma(x)
torch._sample_dirichlet(x)    torch.multinomial(x[0, 0], 2)    torch.rand_like(x)
torch.randn_like(x)    torch.randint_like(x, 5)
x.clone().random_()    x.clone().uniform_()    x.clone().normal_()    x.clone().exponential_()
x.clone().cauchy_()    x.clone().log_normal_()    x.clone().geometric_(0.5)    torch.svd_lowrank(x[0, 0])
torch.pca_lowrank(x[0, 0])    torch.ops.aten.bernoulli(x)    torch.ops.aten.bernoulli.default(x)
"""
COMPUTE = """
F.dropout(x, training=False)    F.dropout(x, 0.5, False)    F.rrelu(x)    F.max_pool2d(x, 2)
torch.softmax(x, 1)    x * 2 + x[0]
x.clone().fill_(1)    torch.ones_like(x).add_(x)    x.mT    torch.ops.aten.relu(x)
torch.ops.aten.relu.default(x)
"""


def _acts(spelling):
    graph = fx.symbolic_trace(eval(f"lambda x: {spelling}", {"torch": torch, "F": F})).graph
    return any(acts_beside_tensors(node) for node in graph.nodes if node.op.startswith("call"))


@pytest.mark.parametrize("spelling", re.split(r"\n| {4}", DRAW.strip() + COMPUTE.rstrip()))
def test_what_draws_moves_the_generator(spelling):
    x, before = torch.rand(2, 3, 8, 8), torch.get_rng_state()
    eval(spelling, {"torch": torch, "F": F, "x": x})
    assert _acts(spelling) is not torch.equal(before, torch.get_rng_state())
