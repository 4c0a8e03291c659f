"""The dial between memory and time: keep=, activation_memory_budget, checkpointing and its policies.

For each setting: what is kept between forward and backward, which of our ops run again, and that results stay the same.
"""

import functools
from dataclasses import dataclass, field

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.kernels.eight_bits import row_width
from moeblaze_ops.lowering.inductor.pinned_routing import pin_before_partition
from moeblaze_ops.memory import estimate
from tests.tools.op_harness import OurOps, is_ours

ops = torch.ops.moeblaze
T, D, F, E, K = 48, 16, 24, 4, 2
GRADIENTS = ["expert_weight_grad", "expert_up_backward", "expert_weight_grad"]


@pytest.fixture(autouse=True)
def setup():
    pin_before_partition()


def make_model(keep=None, sizes=((D, F),), **options):
    """Independent layers, so that what one keeps does not hang on another."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(moeblaze_ops.MoE(width, hidden, E, K, keep=keep, **options) for width, hidden in sizes)
    xs = [torch.randn(T, width, requires_grad=True) for width, _ in sizes]
    return layers, xs


def run_layers(layers, xs):
    return [layer(x) for layer, x in zip(layers, xs, strict=True)]


def train_step(run, layers, xs):
    """Outputs, and gradients of every input and parameter."""
    outs = run(layers, xs)
    return [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), [*xs, *layers.parameters()])]


def is_expert_op(op):
    """The router's op runs whatever is kept."""
    return is_ours(op) and not op.overloadpacket.__name__.startswith("route")


def ops_of_a_step(run, layers, xs):
    """Our ops in forward, and in backward."""
    with OurOps(is_expert_op) as forward:
        outs = run(layers, xs)
    with OurOps(is_expert_op) as backward:
        sum(out.square().sum() for out in outs).backward()
    return forward.names, backward.names


def kept_shapes(run, layers, xs):
    """Shapes of the distinct tensors kept for backward, without inputs and parameters."""
    given = {t.untyped_storage().data_ptr() for t in (*xs, *layers.parameters())}
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr(), tuple(t.shape)] = tuple(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outs = run(layers, xs)
    del outs
    return sorted(shape for (pointer, _), shape in kept.items() if pointer not in given)


@dataclass
class Partition:
    """What torch.compile's partitioner decided: bytes saved beyond inputs, our ops in the backward graph."""

    saved_bytes: int = 0
    backward: list = field(default_factory=list)
    up_widths: list = field(default_factory=list)


def backend_of(partition):
    """AOTAutograd with the partitioner that Inductor uses; the graphs run as they are."""

    def forward(gm, inputs):
        outputs = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        saved = {node: node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node) and node.op != "placeholder"}
        partition.saved_bytes = sum(
            value.numel() * value.element_size()
            for node, value in saved.items()
            if isinstance(value, torch.Tensor) and node.target is not torch.ops.aten.transpose.int
        )
        return make_boxed_func(gm.forward)

    def backward(gm, inputs):
        ours = [node for node in gm.graph.nodes if is_expert_op(node.target)]
        partition.backward = [node.target.overloadpacket.__name__ for node in ours]
        partition.up_widths = [node.args[0].meta["val"].shape[1] for node in ours if node.target is ops.expert_up.default]
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)


def compiled_with(partition, run=run_layers):
    torch._dynamo.reset()
    return torch.compile(run, backend=backend_of(partition), fullgraph=True)


def partitioned_step(layers, xs, **settings):
    partition = Partition()
    with functorch_config.patch(is_non_builtin_to_include=True, **settings):
        results = train_step(compiled_with(partition), layers, xs)
    return partition, results


def outputs_bytes(xs):
    return sum(x.numel() * x.element_size() for x in xs)


ROUTER = [(T, E), (T, K), (T, K)]  # logits, ids and weights
ROUTING = [(T * K,), (E + 1,), (T, K), (T * K // 128 + E + 1, 2)]


KEPT_H = {"preactivation": [(T * K, 2, F)], "h8": [(T * K, 2, row_width(F))], "input": []}


@pytest.mark.parametrize("through", ["argument", "knob"])
@pytest.mark.parametrize(("keep", "extra"), KEPT_H.items())
def test_keep_decides_what_is_kept(keep, extra, through, monkeypatch):
    layers, xs = make_model(keep if through == "argument" else None)
    if through == "knob":
        monkeypatch.setattr(config, "keep", keep)
    assert kept_shapes(run_layers, layers, xs) == sorted(ROUTER + ROUTING + extra)


def test_auto_through_the_knob(monkeypatch):
    monkeypatch.setattr(config, "keep", "auto")
    for free, names in ((1 << 40, ["expert_up", "expert_down"]), (0, ["expert_mlp"])):
        monkeypatch.setattr(estimate, "free_bytes", lambda device, free=free: free)
        estimate.forget_choices()
        assert ops_of_a_step(run_layers, *make_model())[0] == ["dispatch", *names]
    estimate.forget_choices()


def test_input_repeats_the_up_projection_only():
    up_down = ["dispatch", "expert_up", "expert_down"], ["expert_down_backward", *GRADIENTS]
    assert ops_of_a_step(run_layers, *make_model("preactivation")) == up_down
    mlp = ["dispatch", "expert_mlp"], ["expert_mlp_backward", *GRADIENTS]
    assert ops_of_a_step(run_layers, *make_model("input")) == mlp


@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "relu2"}], ids=["gated", "ungated_bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_keep_changes_no_bit(options, dtype):
    layers, xs = make_model(dtype=dtype, **options)
    xs = [x.detach().to(dtype).requires_grad_() for x in xs]
    results = {}
    for keep in ("preactivation", "input"):
        layers[0].keep = keep
        results[keep] = train_step(run_layers, layers, xs)
        compiled = train_step(compiled_with(Partition()), layers, xs)
        assert all(torch.equal(a, b) for a, b in zip(results[keep], compiled, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))


@pytest.mark.parametrize("keep", ["preactivation", "h8", "input", "auto"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_writes_no_preactivation(keep, context):
    layers, xs = make_model(keep)
    expected = run_layers(layers, xs)
    with context(), OurOps(is_expert_op) as ours:
        outs = run_layers(layers, xs)
    assert ours.names == ["dispatch", "expert_mlp"]
    assert torch.equal(outs[0], expected[0])


def test_a_compiled_layer_follows_the_gradient_mode():
    layers, xs = make_model()
    graphs = []

    def backend(gm, inputs):
        graphs.append([n.target.__name__ for n in gm.graph.nodes if is_expert_op(n.target)])
        return gm.forward

    compiled = torch.compile(run_layers, backend=backend, fullgraph=True)
    contexts = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad)
    outs = []
    for context in contexts:
        with context():
            outs += compiled(layers, xs)
    inference = ["dispatch.default", "expert_mlp.default"]
    assert graphs == [inference, ["dispatch.default", "expert_up.default", "expert_down.default"], inference]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_keep_rejects_other_values():
    with pytest.raises(ValueError, match="MoE: keep must be one of preactivation, h8, input, auto, got 'all'"):
        make_model("all")


def test_memory_budget_is_a_curve():
    layers, xs = make_model(sizes=((D, F),) * 4)
    expected = train_step(run_layers, layers, xs)
    points = {}
    for budget in (1.0, 0.8, 0.5, 0.2, 0.0):
        partition, results = partitioned_step(layers, xs, activation_memory_budget=budget)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert "expert_down" not in partition.backward
        points[budget] = partition
    saved = [partition.saved_bytes - outputs_bytes(xs) for partition in points.values()]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == 5
    assert all(size <= budget * saved[0] for budget, size in zip(points, saved, strict=True))
    ups = [partition.backward.count("expert_up") for partition in points.values()]
    assert ups[0] == 0 and 0 < ups[1] < ups[2] < ups[3] == ups[4] == 4
    assert points[1.0].backward.count("dispatch") == 0 and points[0.0].backward.count("dispatch") == 4


def test_memory_budget_recomputes_the_cheapest_projection_first():
    layers, xs = make_model(sizes=((128, 32), (16, 32)))
    partition, _ = partitioned_step(layers, xs, activation_memory_budget=0.8)
    assert partition.up_widths == [16]


def test_memory_budget_drops_the_routing_where_only_x_is_kept():
    layers, xs = make_model("input")
    whole, _ = partitioned_step(layers, xs, activation_memory_budget=1.0)
    assert whole.backward == ["expert_mlp_backward", *GRADIENTS]
    none, results = partitioned_step(layers, xs, activation_memory_budget=0.0)
    assert none.backward == ["dispatch", "expert_mlp_backward", *GRADIENTS]
    assert none.saved_bytes == outputs_bytes(xs)
    assert all(torch.equal(a, b) for a, b in zip(results, train_step(run_layers, layers, xs), strict=True))


def checkpointed(saved=None, use_reentrant=False):
    """``run_layers`` under torch.utils.checkpoint, with the outputs of the ops in ``saved`` kept."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if saved else {}

    def run(layers, xs):
        # Flat arguments: the reentrant kind looks for tensors that require gradients only there.
        return checkpoint(lambda *xs: tuple(run_layers(layers, xs)), *xs, use_reentrant=use_reentrant, **contexts)

    return run


ROUTE, UP, DOWN, MLP = (op.default for op in (ops.dispatch, ops.expert_up, ops.expert_down, ops.expert_mlp))


@pytest.mark.parametrize(
    ("keep", "saved", "repeated"),
    [
        ("preactivation", (), ["dispatch", "expert_up", "expert_down"]),
        ("preactivation", (ROUTE,), ["expert_up", "expert_down"]),
        ("preactivation", (ROUTE, DOWN), ["expert_up"]),
        ("preactivation", (ROUTE, UP, DOWN), []),
        ("input", (), ["dispatch", "expert_mlp"]),
        ("input", (ROUTE, MLP), []),
    ],
)
def test_checkpoint_policies_choose_among_the_ops(keep, saved, repeated):
    layers, xs = make_model(keep)
    expected = train_step(run_layers, layers, xs)
    results = train_step(checkpointed(saved), layers, xs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    _, backward = ops_of_a_step(checkpointed(saved), layers, xs)
    first = "expert_mlp_backward" if keep == "input" else "expert_down_backward"
    assert backward == [*repeated, first, *GRADIENTS]


@pytest.mark.parametrize(
    ("keep", "saved", "repeated"),
    [
        ("preactivation", (), ["expert_up"]),
        ("preactivation", (ROUTE,), ["expert_up"]),
        ("preactivation", (UP,), []),
        ("input", (), []),
    ],
)
def test_compiled_checkpoint_policies_choose_among_the_ops(keep, saved, repeated):
    """The routing is kept whatever they say."""
    layers, xs = make_model(keep)
    expected = train_step(run_layers, layers, xs)
    partition = Partition()
    results = train_step(compiled_with(partition, checkpointed(saved)), layers, xs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    first = "expert_mlp_backward" if keep == "input" else "expert_down_backward"
    assert partition.backward == [*repeated, first, *GRADIENTS]


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_reentrant_checkpoint(keep):
    layers, xs = make_model(keep)
    expected = train_step(run_layers, layers, xs)
    out = checkpointed(use_reentrant=True)(layers, xs)[0]
    out.square().sum().backward()
    got = [out, *(t.grad for t in (*xs, *layers.parameters()))]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
