"""Modules that are converted in forward, mostly into what they are: nothing is converted then, and nothing is written."""

import pytest
import torch
from torch import nn

from moeblaze_ops.compile.records import recording
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

D, E = 8, 4


class Layer(nn.Module):
    """A loop over experts; ``convert`` is called with each module before it is."""

    def __init__(self, convert, skips=True, before=lambda x: x):
        super().__init__()
        self.router, self.convert, self.skips, self.before = nn.Linear(D, E), convert, skips, before
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.SiLU(), nn.Linear(12, D)) for _ in range(E))

    def forward(self, x):
        x = self.before(x)
        self.router = self.convert(self.router, x)
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if self.skips and len(token) == 0:
                continue
            out.index_add_(0, token, self.convert(expert, x)(x[token]) * weights[token, slot, None])
        return out


def doubled(module, x):
    for parameter in module.parameters():
        parameter.data = parameter.data * 2
    return module


CONVERSIONS = {
    "to_a_dtype": lambda module, x: module.to(x.dtype),
    "to_a_device": lambda module, x: module.to(x.device),
    "as_a_tensor": lambda module, x: module.to(x),
    "float": lambda module, x: module.float(),
}
BEFORE = {
    "the_tensor_itself": lambda x: x if x.to(x.dtype) is x else -x,
    "a_copy": lambda x: -x if x.to(x.dtype, copy=True) is x else x,
    "wider": lambda x: -x if x.double() is x else x,
    "written_by_the_program": lambda x: torch.Tensor.set_(y := x.detach().clone(), y) + x,
    "emptied_by_the_program": lambda x: x + x.detach().clone().set_().numel(),
}


def run(make, compiled, times=1):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = make(), torch.randn(32, D, requires_grad=True)
    with rewriting_backend() as backend, recording() as records:
        run = torch.compile(layer, backend=backend) if compiled else layer
        for _ in range(times):
            run(x).square().sum().backward()
        out = run(x)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.parameters()], bool(rewritten_in(records))


def check(make, is_rewritten, times=1):
    actual, found = run(make, True, times)
    expected, _ = run(make, False, times)
    assert found == is_rewritten
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("skips", [True, False], ids=["skips", "all_experts"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_into_what_it_is(name, skips):
    check(lambda: Layer(CONVERSIONS[name], skips), True)


@pytest.mark.parametrize("name", BEFORE)
def test_a_tensor_is_itself_where_it_is_not_converted(name):
    check(lambda: Layer(lambda module, x: module, before=BEFORE[name]), True)


def written_behind_a_product(x):
    y = x.detach().clone()
    product = y * x
    torch.Tensor.set_(y, y)
    return product


@pytest.mark.parametrize("compiled", [True, False])
def test_what_the_program_writes_for_itself_counts_as_written(compiled):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(lambda: Layer(lambda module, x: module, before=written_behind_a_product), compiled)


@pytest.mark.parametrize("skips", [True, False], ids=["skips", "all_experts"])
def test_parameters_that_are_written_are_written(skips):
    check(lambda: Layer(doubled, skips), False, times=2)


def test_new_parameters_where_conversions_give_them():
    """What is compiled holds as long as conversions keep parameters."""
    torch._dynamo.reset()
    layer, x = Layer(CONVERSIONS["to_a_dtype"]), torch.randn(32, D)
    with rewriting_backend() as backend:
        compiled = torch.compile(layer, backend=backend)
        compiled(x)
        before = layer.router.weight
        try:
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            compiled(x)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert layer.router.weight is not before
