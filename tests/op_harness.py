"""What tests of several ops do alike: see which of ours run, and compile one graph for all numbers of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode


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


def assert_one_graph_for_several_token_counts(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """``run(x_TD, weights_TK, experts_TK)`` of the sizes of ``make_layer()``: compiled once, with the bits of eager."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for num_tokens in (6, 31, 200):
        x = torch.randn(num_tokens, 24, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(num_tokens, 2, dtype=torch.float64)
        experts = torch.randint(0, 5, (num_tokens, 2))
        for tensor in (x, weights, experts):
            torch._dynamo.mark_dynamic(tensor, 0)
        out, expected = compiled(x, weights, experts), run(x, weights, experts)
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in (out, expected)))
    assert counter.frame_count == 1
