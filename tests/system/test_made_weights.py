"""Weights that functions give: the numbers, how often the functions are called, and that nothing of their results is kept."""

import gc
import weakref

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops import config
from tests.corpus.codecs import NF4, Int8
from tests.corpus.layers import routing

E, K, D, F, R = 5, 2, 24, 16, 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def given(dtype=torch.float64):
    experts = routing("ragged_tail", E, K)
    x = torch.randn(len(experts), D, dtype=dtype, requires_grad=True)
    weights = torch.rand(len(experts), K, dtype=dtype, requires_grad=True)
    stored = torch.randn(E, 2 * F, D, dtype=dtype) / D**0.5, torch.randn(E, D, F, dtype=dtype) / F**0.5
    return x, weights, experts, stored


class Counted(nn.Module):
    """A codec whose results are counted and looked after."""

    def __init__(self, codec):
        super().__init__()
        self.codec, self.alive = codec, []

    def forward(self):
        made = self.codec()
        self.alive.append(weakref.ref(made))
        return made


@pytest.mark.parametrize("codec", [Int8, NF4])
@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_made_weights_match_stored_ones(codec, keep):
    x, weights, experts, stored = given()
    makers = [codec(w) for w in stored]
    out = moeblaze_ops.moe(x, weights, experts, *makers, keep=keep)
    expected = moeblaze_ops.moe(x, weights, experts, *(make() for make in makers), keep=keep)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, weights), dout) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_what_is_made_is_not_kept(keep):
    """Once in forward, once in backward; in between nobody holds it."""
    x, weights, experts, stored = given()
    makers = [Counted(Int8(w)) for w in stored]
    out = moeblaze_ops.moe(x, weights, experts, *makers, keep=keep)
    gc.collect()
    assert [[ref() is None for ref in make.alive] for make in makers] == [[True], [True]]
    out.sum().backward()
    assert [len(make.alive) for make in makers] == [2, 2]


def test_stored_weights_beside_made_ones_are_kept():
    x, weights, experts, (w_up, w_down) = given()
    maker, w_down = Int8(w_up), w_down.requires_grad_()
    moeblaze_ops.moe(x, weights, experts, maker, w_down).sum().backward()
    expected = w_down.detach().clone().requires_grad_()
    moeblaze_ops.moe(x, weights, experts, maker(), expected).sum().backward()
    torch.testing.assert_close(w_down.grad, expected.grad, rtol=0, atol=0)


def test_gradients_reach_what_a_function_reads():
    x, weights, experts, stored = given()
    scales = [nn.Parameter(torch.rand(E, 1, 1, dtype=x.dtype)) for _ in stored]
    calls = []

    def made(w, s):
        calls.append(None)
        return w * s

    out = moeblaze_ops.moe(x, weights, experts, *(lambda w=w, s=s: made(w, s) for w, s in zip(stored, scales, strict=True)))
    expected = moeblaze_ops.moe(x, weights, experts, *(w * s for w, s in zip(stored, scales, strict=True)))
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, *scales), dout) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_factors_on_made_weights(apart):
    """QLoRA."""
    x, weights, experts, (w_up, w_down) = given()
    outputs = F if apart else 2 * F
    lora = {
        "lora_up": (torch.randn(E, R, D, dtype=x.dtype), torch.randn(E, outputs, R, dtype=x.dtype), 0.5),
        "lora_down": (torch.randn(E, R, F, dtype=x.dtype), torch.randn(E, D, R, dtype=x.dtype), 0.5),
    }
    factors = [tensor.requires_grad_() for a, b, _ in lora.values() for tensor in (a, b)]
    names = {"w_gate": w_up[:, :F].clone(), "w_up": w_up[:, F:].clone()} if apart else {"w_up": w_up}
    makers = {name: NF4(w) for name, w in {**names, "w_down": w_down}.items()}
    out = moeblaze_ops.moe(x, weights, experts, **makers, **lora)
    expected = moeblaze_ops.moe(x, weights, experts, **{name: make() for name, make in makers.items()}, **lora)
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, *factors), dout) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_autocast_casts_what_is_made():
    x, weights, experts, stored = given(torch.float32)
    makers = [Counted(Int8(w)) for w in stored]
    with torch.autocast("cpu", torch.bfloat16):
        out = moeblaze_ops.moe(x, weights, experts, *makers)
        expected = moeblaze_ops.moe(x, weights, experts, *(make.codec() for make in makers))
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert [len(make.alive) for make in makers] == [2, 2]


def test_without_gradients_and_under_checkpointing():
    x, weights, experts, stored = given()
    makers = [Int8(w) for w in stored]
    expected = moeblaze_ops.moe(x, weights, experts, *(make() for make in makers))
    with torch.no_grad():
        torch.testing.assert_close(moeblaze_ops.moe(x, weights, experts, *makers), expected)
    out = torch.utils.checkpoint.checkpoint(
        lambda x: moeblaze_ops.moe(x, weights, experts, *makers), x, use_reentrant=False, preserve_rng_state=False
    )
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), (x, weights)) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_compiled():
    x, weights, experts, stored = given(torch.float32)
    makers = [NF4(w) for w in stored]
    out = torch.compile(lambda x: moeblaze_ops.moe(x, weights, experts, *makers), fullgraph=True)(x)
    expected = moeblaze_ops.moe(x, weights, experts, *makers)
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), x) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_no_tensor_is_refused():
    x, weights, experts, (w_up, w_down) = given()
    with pytest.raises(TypeError, match="moe: w_up must give a tensor where it is a function, got"):
        moeblaze_ops.moe(x, weights, experts, lambda: None, w_down)
    with pytest.raises(ValueError, match="moe: w_down"):
        moeblaze_ops.moe(x, weights, experts, w_up, lambda: w_down[:, :-1])


def test_chunks_of_tokens(monkeypatch):
    x, weights, experts, stored = given()
    makers = [Int8(w) for w in stored]
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)
    out = moeblaze_ops.moe(x, weights, experts, *makers, keep="input")
    expected = moeblaze_ops.moe(x, weights, experts, *(make() for make in makers), keep="input")
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), (x, weights)) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
