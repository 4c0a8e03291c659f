"""Calls that go past the dispatcher do what ops do, and do not go past it where something watches."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import moeblaze_ops
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.expert_up import expert_up
from tests.tools.op_harness import OurOps, is_ours

T, K, E, D, F = 9, 2, 4, 8, 6


@pytest.fixture
def called(monkeypatch):
    """How often each of our ops is called through the dispatcher, by its name."""
    counts: Counter[str] = Counter()
    through_dispatcher = torch._ops.OpOverload.__call__

    def counted(op, /, *args, **kwargs):
        if is_ours(op):
            counts[op.overloadpacket.__name__] += 1
        return through_dispatcher(op, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", counted)
    return counts


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def arguments(dtype=torch.float32):
    """x, routing weights, ids, w_up, w_down."""
    torch.manual_seed(0)
    x, weights = leaf(T, D, dtype=dtype), torch.rand(T, K).requires_grad_()
    return x, weights, torch.randint(0, E, (T, K)), leaf(E, 2 * F, D, dtype=dtype), leaf(E, D, F, dtype=dtype)


def factors(inputs, outputs):
    return leaf(E, 3, inputs), leaf(E, outputs, 3), 0.5


CASES = {
    "swiglu": dict,
    "a formula": lambda: {"activation": "g * sigmoid(1.7 * g) * (u + 1)"},
    "weights on input": lambda: {"weight_on": "input"},
    "biases": lambda: {"b_up": leaf(E, 2 * F), "b_down": leaf(E, D)},
    "gate apart": lambda: {"w_gate": leaf(E, 2 * F, D)},
    "low rank": lambda: {"lora_up": factors(D, 2 * F), "lora_down": factors(F, D)},
    "parameters": lambda: {"activation": "g * sigmoid(p0 * g) * u", "activation_parameters": [leaf(1)]},
    "input kept": lambda: {"keep": "input"},
    "half precision": dict,
}


def step_of(name):
    args = arguments(torch.bfloat16 if name == "half precision" else torch.float32)
    options = CASES[name]()
    if name == "gate apart":
        args = (*args[:4], leaf(E, D, 2 * F))
    tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
    tensors += [part for value in options.values() if isinstance(value, list | tuple) for part in value]
    leaves = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    dout = torch.randn(T, D).to(args[0].dtype)

    def step():
        out = moeblaze_ops.moe(*args, **options)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    return step


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_ops(name, called):
    step = step_of(name)
    with OurOps() as watching:
        expected = step()
    assert "expert_weight_grad" in watching.names
    step()
    called.clear()
    got = step()
    assert not called
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_a_module_and_inference_go_past_the_dispatcher(called):
    torch.manual_seed(0)
    layer, x = moeblaze_ops.MoE(D, F, E, K), torch.randn(T, D)
    with torch.no_grad(), OurOps():
        expected = layer(x)
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context():
            layer(x)
            called.clear()
            assert torch.equal(layer(x), expected)
            assert not called


class Seen(torch.Tensor):
    """A subclass that only hears of functions."""


class Hearing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


WATCHED = {
    "a dispatch mode": OurOps,
    "a function mode": Hearing,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profiler": torch.profiler.profile,
    "a level of forward mode": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", WATCHED)
def test_who_watches_sees_the_ops(name, called):
    args = arguments()
    for _ in range(2):
        moeblaze_ops.moe(*args)
    called.clear()
    with WATCHED[name]():
        moeblaze_ops.moe(*args)
    assert called.keys() >= {"dispatch", "expert_up", "expert_down"}


def test_subclasses_and_transforms_see_the_ops(called):
    x, *rest = (tensor.detach() for tensor in arguments())
    for _ in range(2):
        moeblaze_ops.moe(x, *rest)
    for run in (
        lambda: moeblaze_ops.moe(x.as_subclass(Seen), *rest),
        lambda: torch.func.grad(lambda x: moeblaze_ops.moe(x, *rest).sum())(x),
    ):
        called.clear()
        run()
        assert called.keys() >= {"expert_up", "expert_down"}


def test_a_compiler_sees_the_ops():
    args = arguments()
    for _ in range(2):
        expected = moeblaze_ops.moe(*args)
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    got = torch.compile(moeblaze_ops.moe, fullgraph=True, backend=backend)(*args)
    called = {node.target for graph in graphs for node in graph.graph.nodes if is_ours(node.target)}
    assert {op.overloadpacket.__name__ for op in called} == {"dispatch", "expert_up", "expert_down"}
    assert torch.equal(got, expected)


def test_a_backward_that_is_watched_sees_the_ops(called):
    args = arguments()
    for _ in range(2):
        moeblaze_ops.moe(*args).sum().backward()
    out = moeblaze_ops.moe(*args)
    called.clear()
    with OurOps():
        out.sum().backward()
    assert called.keys() == {"expert_down_backward", "expert_weight_grad", "expert_up_backward"}


def test_the_gradient_of_a_gradient_is_refused():
    args = arguments()
    for _ in range(2):
        (dx,) = torch.autograd.grad(moeblaze_ops.moe(*args).square().sum(), args[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="the gradient of a gradient is not available"):
            dx.sum().backward()


def op_arguments():
    x, _, experts, w_up, _ = arguments()
    routing = dispatch(experts, E)
    return [x, [w_up.unflatten(1, (2, F))], [], None, *routing, "swiglu"]


BAD = {
    "a shape": lambda args: args.__setitem__(0, args[0][:, 1:]),
    "a dtype": lambda args: args.__setitem__(0, args[0].double()),
    "a layout": lambda args: args.__setitem__(0, args[0].detach().to_sparse()),
    "a name": lambda args: args.__setitem__(8, "relu"),
    "a list": lambda args: args[1].append(args[1][0]),
    "a number in place of a tensor": lambda args: args.__setitem__(0, 3),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_op(name):
    args = op_arguments()
    for _ in range(2):
        call(expert_up, *args)
    BAD[name](args)
    with pytest.raises(Exception) as expected:
        expert_up(*args)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as got:
            call(expert_up, *args)
        assert str(got.value) == str(expected.value)


def test_a_call_of_moe_that_passed_hides_no_bad_one():
    x, weights, experts, w_up, w_down = arguments()
    for _ in range(2):
        moeblaze_ops.moe(x, weights, experts, w_up, w_down, interleaved=True)
    for bad, error in (({"interleaved": 1}, TypeError), ({"weight_on": "both"}, ValueError), ({"keep": []}, TypeError)):
        with pytest.raises(error):
            moeblaze_ops.moe(x, weights, experts, w_up, w_down, **{"interleaved": True} | bad)
    with pytest.raises(TypeError, match="be dense"):
        moeblaze_ops.moe(x.detach().to_sparse(), weights, experts, w_up, w_down)
    with pytest.raises(ValueError, match="hold expert ids below"):
        moeblaze_ops.moe(x, weights, experts + E, w_up, w_down)


def test_negated_views_are_read_with_their_sign():
    x, *rest = (tensor.detach() for tensor in arguments())
    for _ in range(2):
        expected = moeblaze_ops.moe(x, *rest)
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg() and torch.equal(negated, x)
    assert torch.equal(moeblaze_ops.moe(negated, *rest), expected)


def test_autograd_keeps_what_it_keeps_of_the_ops():
    args = arguments()

    def kept():
        packed = []

        def pack(tensor):
            position = [i for i, arg in enumerate(args) if arg.data_ptr() == tensor.data_ptr()]
            packed.append((position, tensor.shape, tensor.stride(), tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            moeblaze_ops.moe(*args)
        return packed

    with OurOps():
        expected = kept()
    kept()
    assert kept() == expected


def test_what_hooks_hand_back_is_checked():
    args = arguments()
    moeblaze_ops.moe(*args).sum().backward()
    out = moeblaze_ops.moe(*args)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[..., :-1]):
        out = moeblaze_ops.moe(*args)
    with pytest.raises(ValueError, match="must have"):
        out.sum().backward()


def test_checkpoints_that_are_watched_on_one_side_alone():
    args = arguments()
    for _ in range(2):
        expected = torch.autograd.grad(moeblaze_ops.moe(*args).sum(), args[3:])
    with OurOps():
        out = torch.utils.checkpoint.checkpoint(moeblaze_ops.moe, *args, use_reentrant=False)
    got = torch.autograd.grad(out.sum(), args[3:])
    assert all(map(torch.equal, got, expected))
