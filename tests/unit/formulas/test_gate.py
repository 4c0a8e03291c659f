"""Gates that are recognised by tracing them on halves, and their near-miss twins."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.arguments.activations import ACTIVATIONS, activation_of
from moeblaze_ops.arguments.packed_gates import formula_of_gate

NUMBERS = {"alpha": 1.702, "limit": 7.0, "swiglu_limit": 10.0, "calls": 0}


def formula_of(gate, numbers=NUMBERS, act_fn=F.silu):
    return formula_of_gate(gate, tuple(numbers.items()), act_fn)


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


def along_the_features(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.softmax(-1) * up


def as_they_are(self, gate_up):
    return gate_up.relu()


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
def test_named(gate, expected):
    assert formula_of(gate) == expected


@pytest.mark.parametrize(
    "gate, change",
    [
        (clamped_silu, {}),
        (halves_swapped, {}),
        (one_half_twice, {}),
        (scaled, {}),
        (clamped, {"limit": 0.5}),
        (clamped, {"alpha": 1.7}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_formulas(gate, change):
    """What has no name is a formula, which computes the same of rows that are packed as the gate takes them."""
    numbers = {**NUMBERS, **change}
    formula, is_interleaved = formula_of(gate, numbers)
    assert formula not in ACTIVATIONS
    halves = torch.randn(2, 5, 3, dtype=torch.float64)
    packed = torch.stack(tuple(halves), -1).flatten(1) if is_interleaved else torch.cat(tuple(halves), -1)
    expected = gate(SimpleNamespace(**numbers), packed)
    torch.testing.assert_close(activation_of(formula).value(*halves), expected)


LEFT_ALONE = {
    mixed_packing: "two ways",
    branching: "",
    counting: "sets calls",
    dropping: "calls aten",
    along_the_features: "calls aten",
    as_they_are: "",
    in_place: "",
}


@pytest.mark.parametrize("gate", LEFT_ALONE, ids=lambda gate: gate.__name__)
def test_left_alone(gate):
    reason = formula_of(gate)
    assert isinstance(reason, str)
    assert LEFT_ALONE[gate] in reason


@pytest.mark.parametrize("limit", ["7", None])
def test_other_attributes_are_left_alone(limit):
    assert isinstance(formula_of(clamped_silu, {"limit": limit} if limit else {}), str)


def test_limits_without_effect():
    assert formula_of(clamped_silu, {"limit": math.inf}) == ("swiglu", False)


def test_missing_attributes_are_left_alone():
    assert "limit" in formula_of(clamped, {"alpha": 1.702}, None)
    assert "act_fn" in formula_of(by_act_fn, {}, None)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_functions_of_the_module(name):
    formula, is_interleaved = formula_of(by_act_fn, {}, ACTIVATIONS[name].value)
    assert not is_interleaved
    gate, up = torch.randn(2, 100)
    torch.testing.assert_close(activation_of(formula).value(gate, up), ACTIVATIONS[name].value(gate) * up)
