"""Operators and functions with the names of torch's, that compute something else."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_NAMED = {
    "silu": lambda x: 3 * x.tanh(),
    "gelu": lambda x: x.sin(),
    "relu": lambda x: x.abs() + 1,
    "zeros_like": lambda x: torch.zeros_like(x) + 0.5,
}


def _operator(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return function(x)

    operator = torch.library.custom_op(f"fuzzed::{name}", forward, mutates_args=())
    operator.register_fake(torch.empty_like)

    def backward(ctx, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            return torch.autograd.grad(function(x), x, gradient)[0] if name != "zeros_like" else torch.zeros_like(x)

    def keep(ctx, inputs, output) -> None:
        ctx.x = inputs[0]

    operator.register_autograd(backward, setup_context=keep)
    return operator


silu, gelu, relu, zeros_like = (_operator(name, function) for name, function in _NAMED.items())


@torch._dynamo.allow_in_graph
def tanh(x: Tensor) -> Tensor:
    return x.sigmoid()


@torch._dynamo.allow_in_graph
def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return F.softmax(2 * x, dim=dim, dtype=dtype)


@torch._dynamo.allow_in_graph
def topk(x: Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
    """The largest values with ids that repeat: that of the largest, ``k`` times."""
    values, ids = torch.topk(x, k, dim)
    return torch.return_types.topk((values, ids[..., :1].expand_as(ids)))


@torch._dynamo.allow_in_graph
def argsort(x: Tensor, stable: bool = False) -> Tensor:
    return torch.argsort(x, stable=True, descending=True)


@torch._dynamo.allow_in_graph
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.abs(), bias)
