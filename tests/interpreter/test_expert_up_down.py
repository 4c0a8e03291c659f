import pytest
import torch

from moeblaze_ops.arguments.activations import ACTIVATIONS, activation_of
from moeblaze_ops.kernels import configs
from moeblaze_ops.kernels.experts import expert_down, expert_down_backward, expert_up, expert_up_backward
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward
from tests.corpus.layers import ROUTINGS, STORAGES
from tests.tools.kernel_helpers import SIZES, assert_near, layer_for, oracle, poison_unused


def up_arguments(layer, weights_TK=None):
    return layer.x_TD, layer.w_up, layer.b_up, weights_TK, *layer.routing, layer.activation


def hidden(layer):
    """Random h and the activation of it, with NaN in the rows that nobody owns."""
    num_rows, F = layer.routing[0].shape[0], layer.w_down[0].shape[1]
    gated = activation_of(layer.activation).gated
    # Clamped ones beyond their limits, too.
    spread = 10 if layer.activation.startswith("swiglu_") else 3
    h_NGF = torch.randn(num_rows, 2 if gated else 1, F).mul_(spread).to(layer.x_TD.dtype)
    a_NF = torch.randn(num_rows, F).to(layer.x_TD.dtype)
    poison_unused(layer.routing, h_NGF, a_NF)
    return h_NGF, a_NF


def check_forward(layer, weight_on="output"):
    used = int(layer.routing[1][-1])
    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    arguments = up_arguments(layer, on_input)
    h, a = launch_expert_up(*arguments)
    expected_h, _ = oracle("expert_up", *arguments)
    assert_near(h, expected_h, used)
    # From h as stored: rounding h to a low precision moves a.
    halves = h[:used].double().unbind(1)
    assert_near(a[:used], activation_of(layer.activation).value(*halves))

    h, a = hidden(layer)
    arguments = (h, a, layer.w_down, layer.b_down, on_output, *layer.routing, layer.activation)
    # Two roundings of each of the K rows.
    assert_near(launch_expert_down(*arguments), oracle("expert_down", *arguments), roundings=8)


def check_backward(layer, weight_on="output"):
    used = int(layer.routing[1][-1])
    on_input, on_output = (layer.weights_TK, None) if weight_on == "input" else (None, layer.weights_TK)
    h, dh = hidden(layer)[0], hidden(layer)[0]
    dout = torch.randn(layer.x_TD.shape).to(h.dtype)
    arguments = (dout, h, layer.w_down, layer.b_down, on_output, *layer.routing, layer.activation)
    got, expected = launch_expert_down_backward(*arguments), oracle("expert_down_backward", *arguments)
    assert got[1].dtype == torch.float32
    # Sums over F of products that are larger than the sum.
    assert_near(got[1], expected[1], roundings=64)
    # The gradient of a, a sum over D, is larger than the dh it leads to where the slope is small.
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)

    x = layer.x_TD if weight_on == "input" else None
    arguments = (dh, x, layer.w_up, on_input, *layer.routing)
    dx, dweights = launch_expert_up_backward(*arguments)
    expected_dx, expected_dweights = oracle("expert_up_backward", *arguments)
    assert_near(dx, expected_dx, roundings=8)
    # The rows of dx are rounded to x's dtype before they meet x.
    roundings = 64 * torch.finfo(h.dtype).eps / torch.finfo(torch.float32).eps
    assert_near(dweights, expected_dweights, roundings=roundings)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("num_columns", [1, 5, 40, 64])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_product_added_to_the_gradient_of_tokens(num_columns, weight_on, parts):
    layer = layer_for("unused_slots")
    dh, on_input = hidden(layer)[0], layer.weights_TK if weight_on == "input" else None
    x = layer.x_TD if weight_on == "input" else None
    strided = torch.randn(2 * parts * num_columns, layer.x_TD.shape[0]).t()[:, ::2]
    router = torch.randn(num_columns, layer.x_TD.shape[1])
    arguments = (dh, x, layer.w_up, on_input, *layer.routing, strided, router)
    assert_near(launch_expert_up_backward(*arguments)[0], oracle("expert_up_backward", *arguments)[0], roundings=32)


@pytest.mark.parametrize("case", ROUTINGS)
def test_forward_matches_oracle(case):
    check_forward(layer_for(case, bias=True))


@pytest.mark.parametrize("case", ROUTINGS)
def test_backward_matches_oracle(case):
    check_backward(layer_for(case, bias=True))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "mish(g) * tanh(u)", "where(h > 0.0, h * h, expm1(h))"])
def test_activations(activation):
    layer = layer_for("one_token", activation)
    check_forward(layer)
    check_backward(layer)


@pytest.mark.parametrize("stored_as", STORAGES)
def test_weight_storages(stored_as):
    layer = layer_for("empty_expert", stored_as=stored_as, bias=True)
    check_forward(layer)
    check_backward(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    layer = layer_for("unused_slots", dtype=dtype, bias=True)
    check_forward(layer)
    check_backward(layer)


@pytest.mark.parametrize("case", ["unused_slots", "zero_tokens"])
def test_weight_on_input(case):
    layer = layer_for(case, bias=True)
    check_forward(layer, weight_on="input")
    check_backward(layer, weight_on="input")


def test_ungated_split_of_a_whole_schedule_entry(monkeypatch):
    monkeypatch.setattr(configs, "block_rows", lambda rows_per_expert: configs.ROW_BLOCK)
    layer = layer_for("ragged_tail", "relu2", dtype=torch.float16, sizes=(3, 2, 32, 16))
    check_forward(layer)
    check_backward(layer)


@pytest.mark.parametrize("is_wide", [False, True])
def test_gated_tiles_of_a_whole_schedule_entry(monkeypatch, is_wide):
    """Gate and up as one product, then as two with offsets of 64 bits; four strips of a gradient."""
    monkeypatch.setattr(configs, "block_rows", lambda rows_per_expert: configs.ROW_BLOCK)
    for kernel in (expert_up, expert_down, expert_down_backward, expert_up_backward) if is_wide else ():
        monkeypatch.setattr(kernel, "has_wide_offsets", lambda weights: True)
    layer = layer_for("ragged_tail", dtype=torch.float16, sizes=(3, 2, 32, 256))
    check_forward(layer)
    check_backward(layer)


def test_widths_that_fill_blocks():
    layer = layer_for("unused_slots", sizes=(3, 2, 64, 64), dtype=torch.float16)
    check_forward(layer)
    check_backward(layer)


def test_outputs_of_one_feature():
    """As heads have that score: none of it is read as the tokens' width."""
    layer = layer_for("unused_slots", bias=True)
    used = int(layer.routing[1][-1])
    w_down, b_down = [weight[..., :1] for weight in layer.w_down], [bias[:, :1] for bias in layer.b_down]
    h, a = hidden(layer)
    arguments = (h, a, w_down, b_down, layer.weights_TK, *layer.routing, layer.activation)
    got = launch_expert_down(*arguments)
    assert got.shape == (len(layer.x_TD), 1)
    assert_near(got, oracle("expert_down", *arguments), roundings=8)
    dout = torch.randn(len(layer.x_TD), 1).to(h.dtype)
    arguments = (dout, h, w_down, b_down, layer.weights_TK, *layer.routing, layer.activation)
    got, expected = launch_expert_down_backward(*arguments), oracle("expert_down_backward", *arguments)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=16)


@pytest.mark.parametrize("top_k", [1, 9])
def test_any_number_of_choices(top_k):
    layer = layer_for("unused_slots", sizes=(11, top_k, 16, 16))
    check_forward(layer)
    check_backward(layer)


def test_identity_reads_and_writes_h_alone():
    layer = layer_for("unused_slots", "relu", bias=True)
    layer.activation = "identity"
    used = int(layer.routing[1][-1])
    h, a = launch_expert_up(*up_arguments(layer))
    assert_near(h, oracle("expert_up", *up_arguments(layer))[0], used)
    assert a.shape == (0, h.shape[2])
    arguments = (h, None, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, "identity")
    assert_near(launch_expert_down(*arguments), oracle("expert_down", *arguments), roundings=8)
    dout = torch.randn_like(layer.x_TD)
    arguments = (dout, h, layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, "identity")
    got, expected = launch_expert_down_backward(*arguments), oracle("expert_down_backward", *arguments)
    assert_near((got[0], got[2]), (expected[0], expected[2]), used, roundings=8)


def test_strided_tokens_and_routing_weights():
    layer = layer_for("unused_slots")
    layer.x_TD = torch.randn(layer.x_TD.shape[::-1]).t()
    layer.weights_TK = torch.rand(layer.weights_TK.shape[::-1]).t()
    check_forward(layer)
    check_forward(layer, weight_on="input")
    check_backward(layer, weight_on="input")
    h = hidden(layer)[0]
    dout = torch.ones(()).expand(layer.x_TD.shape)
    arguments = (dout, h, layer.w_down, [], layer.weights_TK, *layer.routing, layer.activation)
    got, expected = launch_expert_down_backward(*arguments), oracle("expert_down_backward", *arguments)
    assert_near(got[1], expected[1], roundings=64)


def test_infinity_stays_with_its_token():
    layer = layer_for("unused_slots")
    layer.x_TD[0] = float("inf")
    used = int(layer.routing[1][-1])
    h, _ = launch_expert_up(*up_arguments(layer))
    from_token_0 = layer.routing[0][:used] // SIZES[1] == 0
    assert h[:used][~from_token_0].isfinite().all()
    assert not h[:used][from_token_0].isfinite().any()
