"""Rows of a projection to the model width, computed for ranges of columns on a GPU: the same bits, and the peak of a step."""

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.kernels.configs import choose_column_ranges
from moeblaze_ops.memory.estimate import memory_estimate
from tests.corpus.layers import STORAGES, make_layer

pytestmark = pytest.mark.gpu

MIB = 2**20
# T, D, F, E, K, and the most that a step may take with keep="input", and with "preactivation" compiled, in MiB.
SHAPES = {
    "fine": ((32768, 2048, 768, 128, 8), 2400, 2400),
    "finest": ((24576, 1536, 256, 128, 8), 800, 800),
    "mid": ((32768, 2048, 1024, 64, 8), 2250, 2250),
    "wide": ((32768, 4096, 1024, 128, 8), 4630, 4630),
    "coarse": ((16384, 4096, 14336, 8, 2), 4750, 4750),
}


@pytest.fixture(params=["hopper", "portable"])
def path(request, monkeypatch):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setattr(config, "hopper", "auto" if request.param == "hopper" else "off")
    return request.param


@pytest.fixture
def poisoned_buffers():
    """Fill every uninitialised buffer with NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def step(layer, dout, weight_on):
    out = layer.run(weight_on)
    return [out.detach(), *torch.autograd.grad(out, layer.leaves, dout)]


def assert_ranges_change_no_bit(monkeypatch, widths, dtype=torch.bfloat16, weight_on="output", case="ragged_tail", **options):
    torch.manual_seed(0)
    sizes = (6, 2, sum(widths), 136)
    layer = make_layer(case, sizes=sizes, bias=True, **options).to(dtype, "cuda")
    num_rows = layer.experts_TK.numel()
    limit = widths[0] * num_rows * layer.x_TD.element_size()
    assert [len(c) for c in choose_column_ranges(num_rows, sizes[2], layer.x_TD.element_size(), limit)] == widths
    dout = torch.randn_like(layer.x_TD)
    monkeypatch.setattr(config, "max_transient_bytes", None)
    whole = step(layer, dout, weight_on)
    assert all(result.isfinite().all() for result in whole)
    monkeypatch.setattr(config, "max_transient_bytes", limit)
    for result, expected in zip(step(layer, dout, weight_on), whole, strict=True):
        if weight_on == "input" and result.shape == layer.weights_TK.shape:
            # These inner products span the ranges.
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        else:
            assert torch.equal(result, expected)


@pytest.mark.parametrize("widths", [[512, 512], [768, 512, 512], [256, 256, 256, 256, 8], [256, 200]], ids=str)
@pytest.mark.parametrize("case", ["ragged_tail", "unused_slots"])
def test_ranges_change_no_bit(widths, case, path, poisoned_buffers, monkeypatch):
    assert_ranges_change_no_bit(monkeypatch, widths, case=case)


@pytest.mark.parametrize("stored_as", STORAGES)
def test_any_storage(stored_as, path, poisoned_buffers, monkeypatch):
    assert_ranges_change_no_bit(monkeypatch, [512, 256], stored_as=stored_as)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype, path, poisoned_buffers, monkeypatch):
    assert_ranges_change_no_bit(monkeypatch, [256, 256, 8], dtype)


def test_weights_on_the_input(path, poisoned_buffers, monkeypatch):
    assert_ranges_change_no_bit(monkeypatch, [256, 256, 8], weight_on="input", case="unused_slots")


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_compiled_layer_gives_the_same_bits_for_every_number_of_tokens(keep, path, monkeypatch):
    torch.manual_seed(0)
    layer = moeblaze_ops.MoE(776, 256, 8, 2, keep=keep, device="cuda", dtype=torch.bfloat16)
    leaves = list(layer.parameters())
    xs = [torch.randn(T, 776, device="cuda", dtype=torch.bfloat16, requires_grad=True) for T in (300, 1000, 41)]

    def results(run):
        for x in xs:
            torch._dynamo.mark_dynamic(x, 0)
            out = run(x)
            yield [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *leaves])]

    def compiled():
        torch._dynamo.reset()
        return list(results(torch.compile(layer, fullgraph=True)))

    monkeypatch.setattr(config, "max_transient_bytes", None)
    whole = compiled()
    monkeypatch.setattr(config, "max_transient_bytes", 300 * 2 * 256 * 2)
    for parts, expected in zip(compiled(), whole, strict=True):
        assert all(torch.equal(part, result) for part, result in zip(parts, expected, strict=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("keep", "compiled"), [("preactivation", True), ("input", True), ("input", False)])
def test_peak_of_a_step(name, keep, compiled):
    shape, most_input, most_preactivation = SHAPES[name]
    peak = peak_of_a_step(shape, keep, compiled)
    assert peak <= (most_input if keep == "input" else most_preactivation) * MIB
    estimate = memory_estimate(*shape, keep=keep, router=True).peak
    assert peak <= 1.05 * estimate
    if not compiled:
        assert peak >= 0.95 * estimate


@pytest.mark.parametrize("name", SHAPES)
def test_estimate_of_an_eager_step_that_keeps_the_preactivation(name):
    shape, *_ = SHAPES[name]
    estimate = memory_estimate(*shape, keep="preactivation", router=True)
    assert peak_of_a_step(shape, "preactivation", False) == pytest.approx(estimate.peak, rel=0.05)


def peak_of_a_step(shape, keep, compiled):
    """Bytes allocated at most in forward and backward, beyond x, the parameters and the output's gradient."""
    T, D, F, E, K = shape
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = moeblaze_ops.MoE(D, F, E, K, keep=keep, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    run(x).backward(dout)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(x).backward(dout)
    return torch.cuda.max_memory_allocated() - before
