"""The dial and the estimate on a GPU."""

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.memory.estimate import memory_estimate

pytestmark = pytest.mark.gpu

# T, D, F, E, K: large enough that no block of the allocator is rounded up by much.
SHAPES = {"fine": (8192, 1024, 384, 64, 8), "coarse": (4096, 1024, 3584, 8, 2), "ragged": (5000, 776, 584, 12, 3)}


def make_module(shape, keep, **options):
    torch.manual_seed(0)
    T, D, F, E, K = SHAPES[shape]
    options = {"device": "cuda", "dtype": torch.bfloat16} | options
    module = moeblaze_ops.MoE(D, F, E, K, keep=keep, **options)
    return module, torch.randn(T, D, device="cuda", dtype=options["dtype"], requires_grad=True)


def train_step(run, module, x):
    out = run(x)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "relu2"}], ids=["gated", "ungated_bias"])
@pytest.mark.parametrize("compiled", [False, True])
def test_keep_changes_no_bit_of_the_ops(shape, options, compiled):
    results = []
    for keep in ("preactivation", "input"):
        module, x = make_module(shape, keep, **options)
        torch._dynamo.reset()
        run = torch.compile(module, fullgraph=True) if compiled else module
        results.append(train_step(run, module, x))
        with torch.no_grad():
            assert torch.equal(run(x), results[-1][0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("hopper", ["auto", "off"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "relu2"}], ids=["gated", "ungated_bias"])
def test_eight_bits_change_no_bit_of_the_output(options, compiled, hopper, monkeypatch):
    """And gradients by less than three times what bf16 has of them."""
    monkeypatch.setattr(config, "hopper", hopper)
    results = []
    for keep in ("preactivation", "h8", "h8"):
        module, x = make_module("ragged", keep, **options)
        torch._dynamo.reset()
        results.append(train_step(torch.compile(module, fullgraph=True) if compiled else module, module, x))
    kept, eight_bits, again = results
    assert torch.equal(kept[0], eight_bits[0])
    assert all(torch.equal(a, b) for a, b in zip(eight_bits, again, strict=True))
    for got, expected in zip(eight_bits[1:], kept[1:], strict=True):
        assert (got - expected).float().norm() <= 0.02 * expected.float().norm()


def requested(when):
    """Bytes that were asked for: what is allocated for them may be a block of 1 MiB more, as other tests left it."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", ["preactivation", "h8", "input"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_estimate_matches_what_is_allocated(shape, keep, activation):
    module, x = make_module(shape, keep, activation=activation)
    dout = torch.randn_like(x)
    module(x).backward(dout)
    estimate = memory_estimate(*SHAPES[shape], keep=keep, gated=activation == "swiglu", router=True)
    module.zero_grad(set_to_none=True)
    x.grad = None
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    out = module(x)
    kept = requested("current") - before - out.numel() * out.element_size()
    out.backward(dout)
    peak = requested("peak") - before
    assert kept == pytest.approx(estimate.kept, rel=0.05)
    assert peak == pytest.approx(estimate.peak, rel=0.05)


def test_inference_allocates_no_preactivation():
    module, x = make_module("coarse", "preactivation")
    T, D, F, _, K = SHAPES["coarse"]
    with torch.no_grad():
        module(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        module(x)
    a, h = 2 * T * K * F, 4 * T * K * F
    assert a < torch.cuda.max_memory_allocated() - before < a + h
