"""Gates that are recognised by running them on symbols, and their near-miss twins."""

import math

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.lowering.match.terms.gate import pointwise, recognise_gate

NUMBERS = {"alpha": 1.702, "limit": 7.0, "swiglu_limit": 10.0, "calls": 0}


def by_act_fn(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def interleaved(self, gate_up):
    return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


def in_fp32(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def by_hand(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return up * (gate * torch.sigmoid(gate))


def relu(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.relu(gate) * up


def clamped(self, gate_up):
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def clamped_concatenated(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=self.limit)
    up = up.clamp(-self.limit, self.limit)
    return (up + 1.0) * gate * torch.sigmoid(gate * self.alpha)


def clamped_silu(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


def limited(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.swiglu_limit)) * up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)


def halves_swapped(self, gate_up):
    up, gate = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def mixed_packing(self, gate_up):
    return F.silu(gate_up[..., ::2]) * gate_up.chunk(2, dim=-1)[1]


def one_half_twice(self, gate_up):
    return F.silu(gate_up[..., ::2]) * gate_up[..., ::2]


def scaled(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up * 2


def rounded_lower(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).to(torch.float16) * up


def branching(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up if gate else up


def counting(self, gate_up):
    self.calls += 1
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def dropping(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.dropout(F.silu(gate) * up, 0.1, True)


def in_place(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True) * up


@pytest.mark.parametrize(
    "gate, expected",
    [
        (by_act_fn, ("swiglu", False)),
        (interleaved, ("swiglu", True)),
        (in_fp32, ("swiglu", False)),
        (by_hand, ("swiglu", False)),
        (relu, ("reglu", False)),
        (clamped, ("swiglu_clamped", True)),
        (clamped_concatenated, ("swiglu_clamped", False)),
        (limited, ("swiglu_limited", False)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_recognised(gate, expected):
    assert recognise_gate(gate, NUMBERS, pointwise("silu")) == expected


@pytest.mark.parametrize(
    "gate",
    [clamped_silu, halves_swapped, mixed_packing, one_half_twice, scaled, rounded_lower, branching, counting, dropping, in_place],
    ids=lambda gate: gate.__name__,
)
def test_left_alone(gate):
    assert recognise_gate(gate, NUMBERS, pointwise("silu")) is None


@pytest.mark.parametrize("change", [{"limit": 6.0}, {"alpha": 1.7}, {"limit": "7"}], ids=str)
def test_other_constants_are_left_alone(change):
    assert recognise_gate(clamped, {**NUMBERS, **change}, None) is None


def test_limits_without_effect():
    assert recognise_gate(clamped_silu, {"limit": math.inf}, None) == ("swiglu", False)


def test_missing_attributes_are_left_alone():
    assert recognise_gate(clamped, {"alpha": 1.702}, None) is None
    assert recognise_gate(by_act_fn, {}, None) is None


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_pointwise_names(name):
    activation, packed_interleaved = recognise_gate(by_act_fn, {}, pointwise(name))
    assert not packed_interleaved
    gate, up = torch.randn(2, 100)
    torch.testing.assert_close(ACTIVATIONS[activation].value(gate, up), ACTIVATIONS[name].value(gate) * up)


def test_squared_relu_gate_is_left_alone():
    """There is no gated activation of that name."""
    assert recognise_gate(by_act_fn, {}, pointwise("relu2")) is None
