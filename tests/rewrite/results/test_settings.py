"""What stands around a rewritten layer: who takes what gradient, writes to what, or hooks in. Results are as in eager mode."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks

from moeblaze_ops import compile as switch
from tests.corpus.loops import guarded, split
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

T = 6
LAYERS = {
    "guarded": lambda: zoo.ModuleListMoE(guarded.numel_continue),
    "split": lambda: zoo.ModuleListMoE(split.split_list),
    "gathered": lambda: zoo.stacked("gathered_einsum"),
}


pytestmark = pytest.mark.usefixtures("scratch")


def tokens(seed=0, num_tokens=T):
    return torch.randn(num_tokens, zoo.D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def objective(out):
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def gradients(layer, *inputs):
    """Zeros are what a compiled layer gives an expert without tokens."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in (*inputs, *layer.parameters())]


def two_calls_in_one_graph(layer, compiled):
    x = tokens()
    out = compiled(lambda x: layer(layer(x)) + layer(x * 2))(x)
    objective(out).backward()
    return out, *gradients(layer, x)


def two_backwards_add_up(layer, compiled):
    run, x, y = compiled(layer), tokens(), tokens(1)
    a, b = run(x), run(y)
    objective(a).backward(retain_graph=True)  # the first backward decides whether what is saved may be given away
    objective(a).backward()
    objective(b).backward()
    return gradients(layer, x, y)


def one_gradient_alone(layer, compiled):
    x, last = tokens(), list(layer.parameters())[-1]
    out = compiled(layer)(x)
    of_last = torch.autograd.grad(objective(out), last, retain_graph=True)
    return *of_last, *torch.autograd.grad(objective(out), x)


def some_are_frozen(layer, compiled):
    for parameter in list(layer.parameters())[:-1]:
        parameter.requires_grad_(False)
    x = tokens().detach()
    out = compiled(layer)(x)
    objective(out).backward()
    return out, *gradients(layer)


def backward_inside(layer, compiled):
    def step(x):
        out = layer(x)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, layer.router.gate.weight))

    return compiled(step)(tokens())


def weights_are_replaced(layer, compiled):
    run, x = compiled(layer), tokens()
    run(x)
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(1.5 * parameter.detach().mT.contiguous().mT))
    out = run(x)
    objective(out).backward()
    return out, *gradients(layer, x)


def tokens_in_other_strides(layer, compiled):
    base = tokens(num_tokens=2 * T)
    out = compiled(lambda x: layer(x))(base.T.contiguous().T[::2])
    objective(out).backward()
    return out, *gradients(layer, base)


def result_is_written(layer, compiled):
    def run(x):
        out = layer(x * 1).add_(x)
        out[0].mul_(3)
        return out, out[1:].t()

    x = tokens()
    out, part = compiled(run)(x)
    (objective(out) + objective(part)).backward()
    return out, part, *gradients(layer, x)


def tokens_are_written(layer, compiled):
    def run(x):
        return x.mul_(2).copy_(layer(x)) + 1

    with torch.no_grad():
        x = tokens().detach()
        return compiled(run)(x), x


def loads_are_counted(layer, compiled):
    layer.register_buffer("load", torch.zeros(zoo.E, dtype=torch.int64))

    def count(router, args, out):
        layer.load += out[1].flatten().bincount(minlength=zoo.E)

    layer.router.register_forward_hook(count)
    run = compiled(layer)
    return run(tokens()), run(tokens(1)), layer.load


def hooks_on_gradients(layer, compiled):
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    layer.register_full_backward_hook(lambda layer, to_inputs, to_outputs: tuple(3 * gradient for gradient in to_inputs))
    x = tokens()
    objective(compiled(layer)(x)).backward()
    return gradients(layer, x)


def hooks_on_saved_tensors_are_disabled(layer, compiled):
    x = tokens()
    with disable_saved_tensors_hooks("nobody may pack"):
        out = compiled(layer)(x)
        objective(out).backward()
    return out, *gradients(layer, x)


SETTINGS = (
    two_calls_in_one_graph, two_backwards_add_up, one_gradient_alone, some_are_frozen, backward_inside, weights_are_replaced,
    tokens_in_other_strides, result_is_written, tokens_are_written, loads_are_counted, hooks_on_gradients,
    hooks_on_saved_tensors_are_disabled,
)  # fmt: skip


# Each setting around two layers, in turns.
CASES = [(setting, [*LAYERS][(number + i) % 3]) for number, setting in enumerate(SETTINGS) for i in range(2)]


@pytest.mark.parametrize(("setting", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_setting(setting, name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    expected = setting(copy.deepcopy(layer), lambda function: function)
    with rewriting_backend() as backend, switch.recording() as records:
        got = setting(layer, lambda function: torch.compile(function, backend=backend))
    assert rewritten_in(records), records
    for result, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(result, wanted)
        assert wanted.numel() == 0 or result.stride() == wanted.stride()


def test_a_layer_without_storage_is_no_error():
    """Of the device ``meta`` there is no autocast."""
    layer, x = zoo.ModuleListMoE(zoo.masked_sum).to("meta"), torch.empty(T, zoo.D, device="meta")
    with rewriting_backend() as backend:
        out = torch.compile(layer, backend=backend)(x)
    assert out.shape == x.shape and out.device == x.device
