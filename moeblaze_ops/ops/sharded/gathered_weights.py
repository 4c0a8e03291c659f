"""Weights of all ranks' experts on each rank: gathered in forward, with gradients that are summed over the ranks in backward.

The hosts meet before weights travel. So a rank that skips the layer, or moves its tokens, is named, and nobody takes weights of
one layer for those of another.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from moeblaze_ops.ops.register import register_plain_op
from moeblaze_ops.ops.sharded.collectives import start_gathers, start_reduce_scatters, wait
from moeblaze_ops.ops.sharded.host_numbers import largest_number
from moeblaze_ops.ops.sharded.stored_layers import path_of


def whole_of(stored: DTensor) -> Tensor:
    """All experts of a parameter ``[E / ranks, ...]``; its gradient is the sum over the ranks."""
    return stored.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def met_and_gathered(stored: DTensor, ranks: int, group: str, layer: str) -> Tensor:
    """``whole_of`` a parameter on one mesh axis, behind a meeting of the hosts; what it becomes in a graph."""
    return gathered([stored.to_local()], ranks, group, layer)[0]


def gathered(shards: list[Tensor], ranks: int, group: str, layer: str = "") -> tuple[Tensor, ...]:
    """Shards of all ranks; the gradient is the sum over the ranks, zeros for a whole that was not read.

    Args:
        layer: the hosts meet before each gather, in words. Empty: they have met.
    """
    return _Gathered.apply(group, ranks, layer, *shards)


class _Gathered(torch.autograd.Function):

    @staticmethod
    def forward(ctx, group: str, ranks: int, layer: str, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.ranks = group, ranks
        sent = [met(shard, group, layer) for shard in shards] if layer else shards
        started = [start_gathers([shard], shard.shape[0], ranks, group, copies=False) for shard in sent]
        return tuple(wait(whole, copies=False) for (whole,) in started)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple:
        needed = [gradient for needs, gradient in zip(ctx.needs_input_grad[3:], gradients, strict=True) if needs]
        sums = (wait(each, copies=False) for each in start_reduce_scatters(needed, ctx.ranks, ctx.group, copies=False))
        return None, None, None, *(next(sums) if needs else None for needs in ctx.needs_input_grad[3:])


def _meet(shard: Tensor, group: str, layer: str) -> Tensor:
    largest_number(0, group, layer, path_of(shard))
    return shard.new_empty(0)


def _met(shard: Tensor, group: str, layer: str) -> Tensor:
    _meet(shard, group, layer)
    return shard.clone()


meet = register_plain_op(
    "meet", "(Tensor shard, str group, str layer) -> Tensor", _meet, lambda shard, group, layer: shard.new_empty(0)
)
"""[0], no data. The hosts of the group wait for each other: all of them have to come to this layer, in words, and by its path."""

met = register_plain_op(
    "met", "(Tensor shard, str group, str layer) -> Tensor", _met, lambda shard, group, layer: torch.empty_like(shard)
)
"""A copy of a shard, once the hosts have met as in ``meet``. Inductor takes the shard itself."""
