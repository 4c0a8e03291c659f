"""What tests of several ops do alike: take a step, see which of ours run, compile one graph for all numbers of tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.corpus.layers import Layer


def is_ours(op: Callable) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op.namespace == "moeblaze"


class OurOps(TorchDispatchMode):
    """Names of our ops, or of those that ``counts`` holds for, in the order in which they run."""

    def __init__(self, counts: Callable[[Callable], bool] = is_ours):
        super().__init__()
        self.counts, self.names = counts, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.counts(func):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def detach(value: Any) -> Any:
    """An argument of an op, with every tensor in it detached."""
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(detach, value)) if isinstance(value, list | tuple) else value


def step(out: Tensor, layer: Layer, dout: Tensor) -> list[Tensor]:
    """The output of a layer, and the gradients of its leaves."""
    return [out, *torch.autograd.grad(out, layer.leaves, dout)]


def assert_one_graph_for_several_token_counts(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], token_counts: tuple[int, ...] = (6, 31, 200)
) -> None:
    """``run(x_TD, weights_TK, experts_TK)`` of the sizes of ``make_layer()``: compiled once, with the bits of eager."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for num_tokens in token_counts:
        x = torch.randn(num_tokens, 24, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(num_tokens, 2, dtype=torch.float64)
        experts = torch.randint(0, 5, (num_tokens, 2))
        for tensor in (x, weights, experts):
            torch._dynamo.mark_dynamic(tensor, 0)
        out, expected = compiled(x, weights, experts), run(x, weights, experts)
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in (out, expected)))
    assert counter.frame_count == 1
