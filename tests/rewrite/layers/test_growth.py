"""Graphs whose expressions grow with every step are looked at in an effort that does not, and left alone."""

import sys
from pathlib import Path

import pytest
import torch

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.match import matcher as matcher_module
from moeblaze_ops.lowering.match.matcher import Matcher
from tests.corpus.router_layers import D, K, Layer
from tests.tools.rewrite_harness import compiled, rewrite_of

CALLS = 4_000_000  # of functions of the rewriter; these graphs take 1.2 million at most, and without a bound no end is seen
REWRITER = str(Path(matcher_module.__file__).parents[1])


def doubled(x):
    for _ in range(26):
        x = x + x
    return x


def squared(x):
    for _ in range(40):
        x = x * x * 0.1
    return x


def sums_of_all_before(x):
    outputs = [x]
    for _ in range(30):
        outputs.append(sum(outputs) * 0.5)
    return outputs[-1]


def newton_schulz(x):
    for _ in range(12):
        product = x @ x.mT
        x = 3.4 * x + (product @ product - product) @ x
    return x


@pytest.mark.parametrize("fn", [doubled, squared, sums_of_all_before, newton_schulz])
def test_growing_expressions_take_bounded_effort(fn):
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(REWRITER)
        if calls > CALLS:
            raise RuntimeError("more calls than a bounded search makes")

    run, backend = compiled(fn, run=False, before=lambda gm: sys.setprofile(count))
    try:
        run(torch.rand(5, 4) / 10)
    finally:
        sys.setprofile(None)
    assert backend.reports and not backend.candidates and calls <= CALLS


def test_layers_in_a_long_row_are_all_found():
    class Row(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(lambda logits: logits.softmax(-1).topk(K)) for _ in range(7))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    assert len(rewrite_of(Row(), torch.randn(9, D)).rewritten) == 7


def test_products_of_one_expert_are_not_looked_into_for_layers(monkeypatch):
    """Behind attention that is declined, each would be multiplied out together with all layers before."""
    num_layers, num_experts = 3, 4
    looked_into = []
    experts_of = Matcher._experts_of
    monkeypatch.setattr(Matcher, "_experts_of", lambda matcher, value: looked_into.append(value) or experts_of(matcher, value))
    gates, ups, downs = ([torch.randn(num_experts, *shape) for _ in range(num_layers)] for shape in ((D,), (7, D), (D, 7)))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()

    def model(x):
        for gate, up, down in zip(gates, ups, downs, strict=True):
            scores = torch.where(mask, x @ x.mT, -1e9)
            x = x + scores.masked_fill(~mask, -1e9).softmax(-1) @ x
            weights, ids = (x @ gate.T).softmax(-1).topk(K)
            out = torch.zeros_like(x)
            for e in range(num_experts):
                token, slot = torch.where(ids == e)
                out = out.index_add(0, token, weights[token, slot, None] * ((x[token] @ up[e].T).relu() @ down[e].T))
            x = x + out
        return x

    assert len(rewrite_of(model, torch.randn(9, D)).rewritten) == num_layers
    products = [value for value in looked_into if value.op == "contract"]
    assert products and all(value.shape[0] == 9 for value in products)


def test_rows_added_where_they_were_read_are_looked_at_once(monkeypatch):
    """Not once for each expert that comes after."""
    num_experts, seen = 12, []
    put = Evaluator._element_put
    monkeypatch.setattr(Evaluator, "_element_put", lambda self, value, *rest: seen.append(value) or put(self, value, *rest))
    gate, ups, downs = (torch.randn(num_experts, *shape) for shape in ((D,), (7, D), (D, 7)))

    def layer(x):
        weights, ids = (x @ gate.T).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(num_experts):
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * ((x[token] @ ups[e].T).relu() @ downs[e].T)
        return out

    assert len(rewrite_of(layer, torch.randn(9, D)).rewritten) == 1
    assert len(seen) <= 4 * num_experts
