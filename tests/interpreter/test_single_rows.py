"""One expert a token: rows of a projection are written at their tokens."""

import pytest
import torch

from moeblaze_ops.kernels.experts import expert_down, expert_up_backward
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward, launch_expert_up_backward_part
from moeblaze_ops.kernels.routing.range_routing import launch_range_routing
from tests.corpus.layers import ROUTINGS, make_layer
from tests.tools.kernel_helpers import assert_near, oracle, poison_unused

CASES = [(case, torch.float32) for case in ROUTINGS if case != "repeated_expert"] + [("unused_slots", torch.bfloat16)]


@pytest.fixture(autouse=True)
def setup(monkeypatch):
    for module in (expert_down, expert_up_backward):
        monkeypatch.setattr(module, "row_chunks", None)  # there are no rows


def layer_for(case, dtype=torch.float32, **options):
    return make_layer(case, dtype=dtype, sizes=(5, 1, 40, 36), requires_grad=False, **options)


def hidden(layer, halves):
    values = torch.randn(layer.routing[0].shape[0], halves, 36).to(layer.x_TD.dtype)
    poison_unused(layer.routing, values)
    return values


@pytest.mark.parametrize(
    ("case", "dtype", "weighted", "bias"),
    [(*case, weighted, weighted ^ number % 2 == 1) for number, case in enumerate(CASES) for weighted in (False, True)],
    ids=str,
)
def test_down(case, dtype, weighted, bias):
    layer = layer_for(case, dtype, bias=bias)
    # Every second weight of a wider tensor.
    weights = layer.weights_TK.repeat(1, 2)[:, 1:] if weighted else None
    arguments = (hidden(layer, 2), hidden(layer, 1)[:, 0], layer.w_down, layer.b_down, weights, *layer.routing, layer.activation)
    got = launch_expert_down(*arguments)
    assert got.is_contiguous() and got.dtype == dtype
    assert_near(got, oracle("expert_down", *arguments), roundings=8)


@pytest.mark.parametrize(
    ("case", "dtype", "channels"),
    [*((*case, 0) for case in CASES), *((*case, (1, 8)[number % 2]) for number, case in enumerate(CASES))],
    ids=str,
)
def test_gradient_of_tokens(case, dtype, channels):
    layer = layer_for(case, dtype)
    product = (torch.randn(2 * channels, layer.x_TD.shape[0]).to(dtype).t()[:, ::2], torch.randn(40, channels).to(dtype).t())
    arguments = (hidden(layer, 2), None, layer.w_up, None, *layer.routing, *(product if channels else (None, None)))
    got = launch_expert_up_backward(*arguments)[0]
    assert got.is_contiguous() and got.dtype == dtype
    assert_near(got, oracle("expert_up_backward", *arguments)[0], roundings=16)


def test_gradient_of_tokens_in_ranges():
    layer = layer_for("ragged_tail")
    slots, offsets, positions, _ = layer.routing
    dh, dx = hidden(layer, 2), torch.full_like(layer.x_TD, float("nan"))
    ranges = [range(128), range(128, slots.shape[0])]
    for rows in ranges:
        offsets_E1, blocks_B2, *_ = launch_range_routing(offsets, rows, rows is ranges[-1])
        part = slice(rows.start, rows.stop)
        routing = (slots[part], offsets_E1, positions, blocks_B2)
        launch_expert_up_backward_part(dh[part], None, layer.w_up, None, *routing, dx, None, rows)
    assert_near(dx, oracle("expert_up_backward", dh, None, layer.w_up, None, *layer.routing)[0], roundings=8)


def test_infinity_stays_with_its_token():
    layer = layer_for("ragged_tail")
    dh = hidden(layer, 2)
    dh[70] = float("inf")
    dx = launch_expert_up_backward(dh, None, layer.w_up, None, *layer.routing)[0]
    assert (~dx.isfinite()).any(1).nonzero().tolist() == [[int(layer.routing[0][70])]]
