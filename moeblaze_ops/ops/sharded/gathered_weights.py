"""Weights of all ranks' experts on each rank: gathered in forward, with gradients that are summed over the ranks in backward.

The hosts meet before weights travel. So a rank that skips the layer, or moves its tokens, is named, and nobody takes weights of
one layer for those of another. So they do before gradients are summed: of a rank that goes back through another layer.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from moeblaze_ops.ops.sharded.apart import told_apart
from moeblaze_ops.ops.sharded.collectives import meet, met, start_gathers, start_reduce_scatters, wait
from moeblaze_ops.ops.sharded.host_numbers import largest_number, questions
from moeblaze_ops.ops.sharded.stored_layers import path_of


def whole_of(stored: DTensor) -> Tensor:
    """All experts of a parameter ``[E / ranks, ...]``; its gradient is the sum over the ranks."""
    return stored.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def met_and_gathered(stored: DTensor, ranks: int, group: str, layer: str) -> Tensor:
    """``whole_of`` a parameter on one mesh axis, behind a meeting of the hosts; what it becomes in a graph."""
    return _Gathered.apply(group, ranks, layer, False, stored.to_local())[0]


def gathered(shards: list[Tensor], ranks: int, group: str) -> tuple[Tensor, ...]:
    """Shards of all ranks, behind one meeting of the hosts; the gradient is the sum over the ranks, zeros where none is read."""
    layer = "weights that move together"
    meet(shards[0].detach(), group, layer)
    return _Gathered.apply(group, ranks, f"{layer} behind question {questions(group)}", True, *shards)


class _Gathered(torch.autograd.Function):
    """The hosts meet for each tensor that travels; where they travel ``together`` once for all, which forward's caller does."""

    @staticmethod
    def forward(ctx, group: str, ranks: int, layer: str, together: bool, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.settings = group, ranks, layer, together
        sent = list(shards)
        if together:
            ctx.path = path_of(shards[0])
        else:
            ctx.save_for_backward(*shards)
            sent = [met(told_apart(shard), shard, group, layer) for shard in shards]
        started = [start_gathers([shard], shard.shape[0], ranks, group, copies=False) for shard in sent]
        return tuple(wait(whole, copies=False) for (whole,) in started)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple:
        group, ranks, layer, together = ctx.settings
        needs, layer, sent = ctx.needs_input_grad[4:], f"gradients of {layer}", list(gradients)
        if together:  # those that are frozen do not travel, and must be the same everywhere
            largest_number(0, group, f"{layer}, {sum(needs)} of them", ctx.path)
        else:
            pairs = zip(gradients, ctx.saved_tensors, strict=True)
            sent = [met(told_apart(gradient), shard, group, layer) for gradient, shard in pairs]
        needed = [gradient for need, gradient in zip(needs, sent, strict=True) if need]
        sums = (wait(each, copies=False) for each in start_reduce_scatters(needed, ranks, group, copies=False))
        return None, None, None, None, *(next(sums) if need else None for need in needs)
