"""Between equal scores a rewritten layer chooses the experts that eager chooses."""

import pytest
import torch

from tests.corpus.router_layers import E, K, Layer
from tests.tools.rewrite_harness import check_against_eager


def first_choice(logits):
    return logits.softmax(-1, dtype=torch.float32).topk(K, dim=-1)


def last_softmax(logits):
    values, experts = logits.topk(K, dim=-1)
    return values.softmax(-1, dtype=torch.float32), experts


def saturated(logits):
    return (logits * 1e4).sigmoid().topk(K, dim=-1)


@pytest.mark.parametrize("router", [first_choice, last_softmax, saturated])
def test_ties_on_a_cpu(router):
    layer = Layer(router)
    with torch.no_grad():
        layer.gate.weight.copy_(layer.gate.weight[:1].abs().expand(E, -1))
    rewriting = check_against_eager(layer, torch.rand(19, layer.gate.in_features))
    assert len(rewriting.rewritten) == 1
