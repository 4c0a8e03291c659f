"""What a layer with low-rank factors allocates on a CPU, within operators and without: nothing of the size of a weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from moeblaze_ops import config
from tests.corpus.codecs import NF4, Int8
from tests.tools.rewrite_harness import compiled

E, K, D, H, R, T = 4, 2, 128, 512, 3, 6
SMALLER_WEIGHT = E * D * H * 4
"""Bytes of ``w_down``; all rows and factors together have less."""


def allocations(run):
    """Bytes of each allocation of ``run`` in order, negative where memory is given back, and the most that was there at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    total = peak = 0
    for size in sizes:
        total += size
        peak = max(peak, total)
    return sizes, peak


def large(sizes):
    return [size for size in sizes if size >= SMALLER_WEIGHT]


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


class Layer(nn.Module):
    """Frozen experts, stored or unpacked by a codec, with factors or without."""

    def __init__(self, codec=None, adapted=True):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E, bias=False)
        stored = torch.randn(E, 2 * H, D) / D**0.5, torch.randn(E, D, H) / H**0.5
        self.codecs = nn.ModuleList(map(codec, stored)) if codec else None
        self.stored = None if codec else nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in stored)
        self.up, self.down = (
            nn.ParameterList([parameter(E, R, inputs), parameter(E, outputs, R)]) if adapted else None
            for inputs, outputs in ((D, 2 * H), (H, D))
        )

    def routed(self, x):
        return self.router(x).softmax(-1).topk(K, dim=-1)

    def through_moe(self, x):
        # Dynamo 2.11 does not unpack a list of parameters into a tuple.
        lora = {"lora_up": (self.up[0], self.up[1], 0.5), "lora_down": (self.down[0], self.down[1], 0.5)} if self.up else {}
        w_up, w_down = self.codecs or self.stored
        return moeblaze_ops.moe(x, *self.routed(x), w_up, w_down, **lora)

    def forward(self, x):
        weights, chosen = self.routed(x)
        w_up, w_down = (codec() for codec in self.codecs) if self.codecs else self.stored
        if self.up:
            w_up, w_down = (torch.baddbmm(w, b, a, alpha=0.5) for w, (a, b) in ((w_up, self.up), (w_down, self.down)))
        out = torch.zeros_like(x)
        for e in range(E):
            gate, up = F.linear(x, w_up[e]).chunk(2, dim=-1)
            out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * F.linear(F.silu(gate) * up, w_down[e])
        return out


def step_of(layer, how):
    """Forward and backward of a layer, run once before, so that nothing is compiled when it is measured."""
    run = {"moe": layer.through_moe, "as_written": layer}.get(how)
    if run is None:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            run, _ = compiled(layer, aot=True)

    def step():
        x = torch.randn(T, D, requires_grad=True)
        run(x).square().sum().backward()
        assert x.grad is not None

    step()
    return step


@pytest.mark.parametrize("how", ["moe", "rewritten", "as_written"])
def test_factors_on_a_frozen_base_allocate_nothing_of_the_size_of_a_weight(how):
    """As written there are the sums and their gradients: the measure sees them."""
    sizes, _ = allocations(step_of(Layer(), how))
    assert (len(large(sizes)) == 0) == (how != "as_written")


@pytest.mark.parametrize("codec", [Int8, NF4])
@pytest.mark.parametrize("how", ["moe", "rewritten", "as_written"])
def test_factors_on_unpacked_weights_allocate_what_unpacking_does(how, codec):
    """As often, and as much at once but for rows and factors."""
    sizes, peak = allocations(step_of(Layer(codec), how))
    bare_sizes, bare_peak = allocations(step_of(Layer(codec, adapted=False), how))
    more, more_at_once = len(large(sizes)) - len(large(bare_sizes)), peak - bare_peak
    if how == "as_written":
        assert more > 0 and more_at_once >= SMALLER_WEIGHT
    else:
        assert more == 0 and more_at_once < SMALLER_WEIGHT


@pytest.mark.parametrize("codec", [None, Int8])
def test_a_checkpoint_around_the_layer_keeps_its_input_alone(codec):
    """The hooks that hold what is unpacked pass the rest on to those of the checkpoint."""
    layer = Layer(codec)
    x = torch.randn(T, D, requires_grad=True)
    kept = []
    layer.through_moe(x)  # what is allocated once for all
    kept_in_h = T * K * 2 * H * x.element_size()
    for run in (layer.through_moe, lambda x: checkpoint(layer.through_moe, x, use_reentrant=False)):
        sizes, _ = allocations(lambda run=run: kept.append(run(x)))
        assert (sum(sizes) < kept_in_h) == (run != layer.through_moe)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    for ours, theirs in zip(*(torch.autograd.grad(out.sum(), leaves) for out in kept), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["moe", "compiled moe", "rewritten"])
def test_with_the_input_alone_kept_there_is_no_pre_activation(how, monkeypatch):
    """Gradients are the same, bit for bit."""
    kept, gradients = [], []
    for keep in ("preactivation", "input"):
        monkeypatch.setattr(config, "keep", keep)
        torch._dynamo.reset()
        layer = Layer()
        run = layer.through_moe
        if how == "compiled moe":
            run = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
        if how == "rewritten":
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                run, _ = compiled(layer, aot=True)
        x, outs = torch.randn(T, D, requires_grad=True), []
        run(x)
        sizes, _ = allocations(lambda run=run, x=x, outs=outs: outs.append(run(x)))
        kept.append(sum(sizes))
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        gradients.append(torch.autograd.grad(outs[0].square().sum(), leaves))
    assert kept[0] - kept[1] == T * K * 2 * H * 4
    assert all(map(torch.equal, *gradients))
