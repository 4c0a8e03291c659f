"""What a layer has chosen in forward is what its backward reads, also where activations are computed once more.

The router adds to its logits what is another tensor at every call, as noise does, or a sum in no fixed order: routed anew, most
tokens would go elsewhere.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.compile.switch import install_lowerings
from moeblaze_ops.lowering.torch_internals import graphs
from tests.tools.compiling import graphs_compiled_anew

T, D, H, E, K = 24, 8, 12, 6, 2
_OFFSETS = torch.randn(8, T, E, generator=torch.Generator().manual_seed(1)) * 10


class Calls:
    """How often the router has been run."""

    count = 0


@torch.library.custom_op("moeblaze_tests::wander", mutates_args=())
def wander(logits: torch.Tensor) -> torch.Tensor:
    Calls.count += 1
    return logits + _OFFSETS[Calls.count - 1]


wander.register_fake(torch.empty_like)
wander.register_autograd(lambda ctx, grad: grad)


class Layer(nn.Module):
    """Dense masked experts, behind a router that never chooses the same again."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, H, bias=False) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(H, D, bias=False) for _ in range(E))

    def forward(self, x):
        weights, ids = wander(self.router(x)).softmax(-1).topk(K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(E):
            weight = (weights * (ids == e)).sum(-1, keepdim=True)
            out = out + weight * self.down[e](F.silu(self.up[e](x)))
        return out


class Explicit(nn.Module):
    """Calls the layer, behind such a router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w_up, self.w_down = nn.Parameter(torch.randn(E, 2 * H, D)), nn.Parameter(torch.randn(E, D, H))

    def forward(self, x):
        weights, ids = moeblaze_ops.route(wander(self.router(x)), K, renormalize=True)
        return moeblaze_ops.moe(x, weights, ids, self.w_up, self.w_down)


def policy(context, op, *args, **kwargs):
    """Everything again but matrix products."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def all_again(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def selective(layer, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def whole(layer, x):
    return layer(x)


MECHANISMS = {
    "checkpoint": (all_again, {}, {}),
    "reentrant": (reentrant, {}, {}),
    "selective": (selective, {}, {}),
    "checkpoint keeping the input": (all_again, {"keep": "input"}, {}),
    "input": (whole, {"keep": "input"}, {}),
    "budget": (whole, {}, {"activation_memory_budget": 0.001}),
    "aggressive": (whole, {}, {"aggressive_recomputation": True}),
    "checkpoint in chunks": (all_again, {"keep": "input", "max_layer_transient_bytes": 1}, {}),
}


class Backend:
    """Rewriting, Inductor's passes on the joint graph and its partitioner; the graphs run as they are."""

    def __init__(self):
        self.backward = []

    def __call__(self, gm, inputs):
        assert switch.rewrite(gm).rewritten
        return aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward, partition_fn=partition)(gm, inputs)

    def _forward(self, gm, inputs):
        return make_boxed_func(gm.forward)

    def _backward(self, gm, inputs):
        self.backward += [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        return make_boxed_func(gm.forward)


def partition(gm, joint_inputs, **keywords):
    install_lowerings()
    joint_graph_passes(gm)
    return min_cut_rematerialization_partition(gm, joint_inputs, **keywords)


def step(run, layer, x):
    Calls.count = 0
    layer.zero_grad()
    out = run(layer, x)
    out.square().sum().backward()
    return {"out": out.detach()} | {name: p.grad.clone() for name, p in layer.named_parameters() if "router" not in name}


@pytest.fixture
def layer(fp64):
    return Layer()


@pytest.mark.parametrize("name", MECHANISMS)
def test_backward_reads_what_forward_chose(layer, monkeypatch, name):
    run, knobs, settings = MECHANISMS[name]
    for knob, value in knobs.items():
        monkeypatch.setattr(config, knob, value)
    x = torch.randn(T, D, requires_grad=True)
    expected = step(whole, layer, x)
    torch._dynamo.reset()
    backend = Backend()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with functorch_config.patch(is_non_builtin_to_include=True, **settings):
        torch.testing.assert_close(step(compiled, layer, x), expected)
    choices = [op for op in backend.backward if "topk" in op or "dispatch" in op]
    assert not choices, "backward chooses nothing"
    assert layer.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["checkpoint", "selective", "budget"])
def test_the_test_sees_a_routing_that_is_repeated(layer, monkeypatch, name):
    """Without the marks the same programs route anew."""
    run, _, settings = MECHANISMS[name]
    monkeypatch.setattr(graphs, "keep_for_backward", lambda node: None)
    x = torch.randn(T, D, requires_grad=True)
    torch._dynamo.reset()
    backend = Backend()
    with functorch_config.patch(is_non_builtin_to_include=True, **settings):
        step(torch.compile(run, backend=backend, fullgraph=True), layer, x)
    assert any("topk" in op for op in backend.backward) and any("dispatch" in op for op in backend.backward)
    assert Calls.count == 2


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_eager_layers_keep_their_routing_by_a_policy(fp64, monkeypatch, keep):
    monkeypatch.setattr(config, "keep", keep)
    layer, x = Explicit(), torch.randn(T, D, requires_grad=True)
    expected = step(whole, layer, x)
    kept = [torch.ops.moeblaze.route.default, torch.ops.moeblaze.dispatch.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)

    def run(layer, x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    torch.testing.assert_close(step(run, layer, x), expected)
    assert Calls.count == 2
    other = step(all_again, layer, x)
    assert not torch.allclose(other["w_up"], expected["w_up"]), "without it, the layer is routed anew"


def test_a_layer_that_nothing_repeats_is_left_to_the_partitioner(layer):
    marked = []
    x = torch.randn(T, D, requires_grad=True)
    torch._dynamo.reset()

    def watch(gm, joint_inputs, **keywords):
        graphs = partition(gm, joint_inputs, **keywords)
        marked.extend(node for node in gm.graph.nodes if node.meta.get("recompute") is not None)
        return graphs

    def backend(gm, inputs):
        assert switch.rewrite(gm).rewritten
        boxed = lambda gm, inputs: make_boxed_func(gm.forward)  # noqa: E731
        return aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=watch)(gm, inputs)

    step(torch.compile(whole, backend=backend, fullgraph=True), layer, x)
    assert not marked


def test_with_inductor():
    """Its own passes on the joint graph are the first thing that asks for the marks."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(T, D, requires_grad=True)
    expected = step(whole, layer, x)
    torch._dynamo.reset()
    with graphs_compiled_anew():
        got = step(torch.compile(all_again, backend="moeblaze", fullgraph=True), layer, x)
    torch.testing.assert_close(got, expected)
