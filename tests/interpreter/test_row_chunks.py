"""Rows computed for ranges of columns in turns, against rows computed whole: equal bit for bit."""

import numpy as np
import pytest
import torch

from moeblaze_ops import config
from moeblaze_ops.kernels import configs
from moeblaze_ops.kernels.experts import expert_down, expert_up_backward
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_mlp import launch_expert_mlp
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward
from moeblaze_ops.kernels.rows.combine import combine_into
from tests.corpus.layers import STORAGES, make_layer
from tests.tools.kernel_helpers import poison_unused

UNIT = 16
SIZES = (5, 2, 5 * UNIT + 8, 36)


@pytest.fixture(autouse=True)
def setup(monkeypatch):
    monkeypatch.setattr(configs, "COLUMN_UNIT", UNIT)
    products_in_order(monkeypatch)


def products_in_order(monkeypatch):
    """Let the interpreter add products one after the other: the last bit of NumPy's depends on where a column stands."""
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def matmul(a, b, dtype):
        return sum((a[:, k, None] * b[None, k] for k in range(a.shape[1])), np.zeros((a.shape[0], b.shape[1]), dtype))

    class InOrder:
        def __getattr__(self, name):
            return matmul if name == "matmul" else getattr(np, name)

    def in_order(*args):
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "np", InOrder())
            return create_dot(*args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)


@pytest.fixture
def in_ranges(monkeypatch):
    """Runs with as many bytes as ``units`` of columns take, after NaN went over all that is uninitialised."""

    def run(launch, layer, units):
        num_rows, bytes_each = layer.routing[0].shape[0], layer.x_TD.element_size()
        limit = None if units is None else max(1, units * UNIT * num_rows * bytes_each)
        monkeypatch.setattr(config, "max_transient_bytes", limit)
        counts = {}
        for module in (expert_down, expert_up_backward):
            monkeypatch.setattr(module, "combine_into", counted(counts, module.__name__.rpartition(".")[2]))
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return launch(), counts
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def counted(counts, name):
    def run(*args):
        counts[name] = counts.get(name, 0) + 1
        combine_into(*args)

    return run


def layer_for(case="unused_slots", **keywords):
    return make_layer(case, **{"dtype": torch.float32, "sizes": SIZES, "requires_grad": False, "bias": True} | keywords)


def hidden(layer, halves=2):
    num_rows, F = layer.routing[0].shape[0], layer.w_down[0].shape[1]
    h_NGF = torch.randn(num_rows, halves, F).to(layer.x_TD.dtype)
    a_NF = torch.randn(num_rows, F).to(layer.x_TD.dtype)
    poison_unused(layer.routing, h_NGF, a_NF)
    return h_NGF, a_NF


RANGES = {2: 3, 3: 2, 6: 1}
"""Units of columns, and how many ranges of them 88 columns take: 32 + 32 + 24, 48 + 40 and all at once."""


def check(layer, in_ranges, weight_on="output", all_units=tuple(RANGES)):
    """Both launchers, whole and in ranges."""
    h, a = hidden(layer)
    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    down = (h, a, layer.w_down, layer.b_down, on_output, *layer.routing, layer.activation)
    up_backward = (h, layer.x_TD if weight_on == "input" else None, layer.w_up, on_input, *layer.routing)

    def launch():
        return launch_expert_down(*down), *launch_expert_up_backward(*up_backward)

    whole, counts = in_ranges(launch, layer, None)
    assert counts == {"expert_down": 1, "expert_up_backward": 1}
    assert all(result.isfinite().all() for result in whole)
    for units in all_units:
        parts, counts = in_ranges(launch, layer, units)
        assert counts == {"expert_down": RANGES[units], "expert_up_backward": RANGES[units]}
        for part, result in zip(parts, whole, strict=True):
            assert part.stride() == result.stride() and torch.equal(part, result)


@pytest.mark.parametrize("case", ["one_token", "empty_expert", "unused_slots", "repeated_expert"])
def test_ranges_change_no_bit(case, in_ranges):
    check(layer_for(case), in_ranges)


@pytest.mark.parametrize("stored_as", STORAGES)
def test_any_storage(stored_as, in_ranges):
    check(layer_for(stored_as=stored_as), in_ranges, all_units=(2,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, in_ranges):
    check(layer_for(dtype=dtype), in_ranges, all_units=(2,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_on_the_input(dtype, in_ranges):
    check(layer_for(dtype=dtype), in_ranges, "input")


def test_whole_tiles_of_columns(in_ranges):
    layer = layer_for(sizes=(3, 2, 4 * UNIT, 32))
    h, a = hidden(layer)
    arguments = (h, a, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation)
    whole, _ = in_ranges(lambda: launch_expert_down(*arguments), layer, None)
    parts, counts = in_ranges(lambda: launch_expert_down(*arguments), layer, 1)
    assert counts == {"expert_down": 4} and torch.equal(parts, whole)


def test_no_tokens(in_ranges):
    layer = layer_for("zero_tokens")
    h, a = hidden(layer)
    arguments = (h, a, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation)
    out, counts = in_ranges(lambda: launch_expert_down(*arguments), layer, 1)
    assert out.shape == (0, SIZES[2]) and counts == {"expert_down": 1}


def test_both_projections_in_one(in_ranges):
    layer = layer_for()
    arguments = (
        layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation,
        False,
    )  # fmt: skip
    whole, _ = in_ranges(lambda: launch_expert_mlp(*arguments), layer, None)
    parts, counts = in_ranges(lambda: launch_expert_mlp(*arguments), layer, 2)
    assert counts == {"expert_down": 3} and torch.equal(parts, whole)
