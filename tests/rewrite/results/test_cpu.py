"""Compiled layers on a CPU: products are calls, what is between them is Inductor's, and the numbers are those of the oracle."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import moeblaze_ops.compile  # noqa: F401  registers the backend where the package is not installed
from tests.corpus.layers import make_layer
from tests.tools.op_harness import step

CALLS = re.compile(r"= torch\.ops\.moeblaze_cpu\.(\w+)\.default\.implementation\(.*?(?:'(\w+)'(?:, \w+=None)*)?\)$", re.MULTILINE)
"""Ops that are called, with their activation. ``expert_down`` takes what was activated."""


def compiled_step(layer, dout, weight_on="output"):
    """Results of one compiled step of a layer's ops, which a second step repeats bit for bit, and the code of its two graphs."""
    torch._dynamo.reset()
    run = torch.compile(type(layer).run, backend="moeblaze", fullgraph=True)
    results, codes = run_and_get_code(lambda: step(run(layer, weight_on), layer, dout))
    for first, again in zip(results, step(run(layer, weight_on), layer, dout), strict=True):
        torch.testing.assert_close(first, again, rtol=0, atol=0, equal_nan=True)
    return results, codes


@pytest.mark.parametrize("activation, bias, case", [
    ("gelu", True, "ragged_tail"),
    ("relu2", False, "empty_expert"),
    ("swiglu_clamped", True, "unused_slots"),
])  # fmt: skip
def test_step_equals_the_oracle(activation, bias, case):
    torch.manual_seed(0)
    layer = make_layer(case, activation=activation, bias=bias)
    dout = torch.randn_like(layer.x_TD)
    got, codes = compiled_step(layer, dout)
    for ours, expected in zip(got, step(layer.oracle(), layer, dout), strict=True):
        torch.testing.assert_close(ours, expected)
    forward, backward = (CALLS.findall(code) for code in codes)
    assert forward == [("expert_up", "identity"), ("expert_down", activation)]
    assert ("expert_up", "identity") in backward and "expert_down_backward" not in dict(backward)


@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_step_in_half_precision(weight_on):
    torch.manual_seed(1)
    layer = make_layer("unused_slots", bias=True, dtype=torch.bfloat16)
    dout = torch.randn_like(layer.x_TD)
    got, _ = compiled_step(layer, dout, weight_on)
    for ours, eager in zip(got, step(layer.run(weight_on), layer, dout), strict=True):
        assert ours.dtype == eager.dtype and ours.stride() == eager.stride()
        # Two roundings of 8 bits, of which one may fall to the other side.
        assert (ours.double() - eager.double()).norm() <= 2**-7 * eager.double().norm()


def test_unused_slots_read_no_weight():
    """A weight of a slot without an expert may be anything."""
    torch.manual_seed(2)
    layer = make_layer("unused_slots", bias=True)
    with torch.no_grad():
        layer.weights_TK[layer.experts_TK < 0] = float("nan")
    dout = torch.randn_like(layer.x_TD)
    got, _ = compiled_step(layer, dout)
    assert all(result.isfinite().all() for result in got)
