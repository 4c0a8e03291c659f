"""What Dynamo does for real while it traces, it does as often as without rewriting: no attempt is made that would do it."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tools.rewrite_harness import rewriting_backend

D, E = 8, 4


class Layer(nn.Module):
    """A loop that skips idle experts; of one token, most of them are."""

    def __init__(self, up=lambda: nn.Linear(D, 12, bias=False), down=lambda: nn.Linear(12, D, bias=False), after=lambda x: x):
        super().__init__()
        self.router, self.after = nn.Linear(D, E, bias=False), after
        self.up, self.down = (nn.ModuleList(make() for _ in range(E)) for make in (up, down))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            if len(token) == 0:
                continue
            out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, slot, None])
        return self.after(out)


calls = []


@torch._dynamo.assume_constant_result
def number_of_calls():
    calls.append(None)
    return len(calls)


class Counter:
    @torch._dynamo.assume_constant_result
    def number(self):
        return number_of_calls()


COUNTER, PARTIAL = Counter(), functools.partial(number_of_calls)
LAZY = {
    "linear": lambda: Layer(lambda: nn.LazyLinear(12, bias=False), lambda: nn.LazyLinear(D, bias=False)),
    "in_a_sequence": lambda: Layer(lambda: nn.Sequential(nn.LazyLinear(12, bias=False))),
    "one_projection": lambda: Layer(down=lambda: nn.LazyLinear(D)),
}
CONSTANT = {
    "function": lambda: Layer(after=lambda x: x * number_of_calls()),
    "method": lambda: Layer(after=lambda x: x * COUNTER.number()),
    "partial": lambda: Layer(after=lambda x: x * PARTIAL()),
    "among_others": lambda: Layer(after=lambda x: x * [len, number_of_calls][1]()),
}


def run(make, how):
    torch._dynamo.reset()
    torch.manual_seed(0)
    calls.clear()
    layer, x = make(), torch.randn(1, D)
    with rewriting_backend() as backend:
        out = (torch.compile(layer, backend=backend if how == "rewriting" else "eager") if how != "as it is" else layer)(x)
    lazy = [name for name, parameter in layer.named_parameters() if isinstance(parameter, nn.UninitializedParameter)]
    return out.detach(), lazy, torch.rand(1), len(calls)


@pytest.mark.parametrize("name", LAZY)
def test_lazy_experts_without_tokens_stay_lazy(name):
    out, lazy, drawn, _ = run(LAZY[name], "as it is")
    compiled = run(LAZY[name], "rewriting")
    torch.testing.assert_close(compiled[0], out)
    assert lazy and compiled[1] == lazy and compiled[2] == drawn


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_function_is_called_as_often(name):
    out, _, _, number = run(CONSTANT[name], "without rewriting")
    compiled = run(CONSTANT[name], "rewriting")
    torch.testing.assert_close(compiled[0], out)
    assert number and compiled[3] == number
