"""``keep="input"`` of layers with low-rank additions or an activation's parameters: the up projection runs again in backward."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moeblaze_ops

T, E, K, D, F, R = 40, 5, 2, 24, 12, 3


def leaf(*shape):
    return (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_()


class Case:
    """A layer as a function of its leaves."""

    def __init__(self, factors=True, parameters=False, **options):
        torch.manual_seed(0)
        self.experts, self.options = torch.randint(-1, E, (T, K)), options
        self.leaves = {"x": leaf(T, D), "weights": leaf(T, K), "w_up": leaf(E, 2 * F, D), "w_down": leaf(E, D, F)}
        if factors:
            self.leaves |= {"up_a": leaf(E, R, D), "up_b": leaf(E, 2 * F, R), "down_a": leaf(E, R, F), "down_b": leaf(E, D, R)}
        if parameters:
            self.leaves |= {"beta": leaf(1)}

    def __call__(self, keep, x=None, run=moeblaze_ops.moe):
        x_leaf, weights, w_up, w_down, *rest = self.leaves.values()
        options = dict(self.options)
        if "up_a" in self.leaves:
            options |= {"lora_up": (*rest[:2], 0.5), "lora_down": (*rest[2:4], 0.5)}
        if "beta" in self.leaves:
            options |= {"activation": "g * sigmoid(p0 * g) * u", "activation_parameters": [rest[-1]]}
        return run(x_leaf if x is None else x, weights, self.experts, w_up, w_down, keep=keep, **options)

    def gradients(self, out):
        return torch.autograd.grad(out.square().sum(), list(self.leaves.values()))


CASES = {
    "factors": {},
    "factors, weights on the input": {"weight_on": "input"},
    "parameters": {"factors": False, "parameters": True},
    "factors and parameters": {"parameters": True},
}


def assert_same(case, repeated, kept):
    assert torch.equal(repeated, kept)
    for ours, theirs in zip(case.gradients(repeated), case.gradients(kept), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_are_those_of_a_kept_pre_activation(name, autocast):
    """Backward runs outside of autocast, and what it repeats as forward ran."""
    case = Case(**CASES[name])
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        repeated, kept = case("input"), case("preactivation")
    assert_same(case, repeated, kept)


@pytest.mark.parametrize("name", CASES)
def test_compiled_code_repeats_it(name):
    torch._dynamo.reset()
    case = Case(**CASES[name])
    compiled = torch.compile(lambda keep: case(keep), backend="aot_eager_decomp_partition", fullgraph=True)
    assert_same(case, compiled("input"), compiled("preactivation"))


def saved_bytes(run):
    """Bytes of all that autograd saves while ``run`` runs, each memory once."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_it_is_saved(name):
    case = Case(**CASES[name])
    assert saved_bytes(lambda: case("preactivation")) - saved_bytes(lambda: case("input")) == T * K * 2 * F * 4


def test_within_a_checkpoint():
    """What is run again holds nothing that a checkpoint around the layer does not hold."""
    case, made = Case(), []
    x = case.leaves["x"]

    def block(x):
        tokens = x.sin()
        made.append(weakref.ref(tokens))
        return case("input", tokens)

    repeated = checkpoint(block, x, use_reentrant=False)
    assert made[0]() is None
    assert_same(case, repeated, case("preactivation", x.sin()))


def test_a_write_before_backward_is_noticed():
    case = Case()
    x = case.leaves["x"].detach().clone()  # needs no gradient, so that no other operator saves it for one
    for name in ("w_up", "up_a", "up_b"):
        case.leaves[name].requires_grad_(False)
    case.leaves["weights"].requires_grad_(False)
    out = case("input", x)
    assert out.requires_grad
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_twice():
    case = Case()
    out = case("input")
    first = torch.autograd.grad(out.sum(), case.leaves["down_a"], retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(out.sum(), case.leaves["down_a"]))
