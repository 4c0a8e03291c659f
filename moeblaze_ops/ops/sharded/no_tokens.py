"""Tensors without rows that a compiler takes for tensors of any number of rows.

A rank without tokens has to compile a layer the way that other ranks compile it: tokens move on all of them or on none. Of a size
that it knows to be 0 a compiler draws conclusions (``torch.where`` finds nothing), and a loop over experts is another program.
"""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

from moeblaze_ops.ops.sharded.collectives import number_of_data, register


def of_any_number(tensor: Tensor) -> Tensor:
    """The tensor, if it has elements; else one whose sizes of 0 only its data tell."""
    empty = [guard_or_false(size == 0) for size in tensor.shape]
    if not any(empty):
        return tensor
    number = any_number(tensor).shape[0]
    return sized(tensor, [number if none else size for none, size in zip(empty, tensor.shape, strict=True)])


def _no_data(x: Tensor, size: list[int]) -> Tensor:
    return x.new_empty(size)


def _settled_fake(x: Tensor) -> Tensor:
    return x.new_empty([0 if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) else size for size in x.shape])


any_number = register(
    "any_number", "(Tensor x) -> Tensor", lambda x: x.new_empty(0, 0), lambda x: x.new_empty(number_of_data(), 0)
)
"""[n, 0]; n is 0, which a compiler does not know."""

sized = register("sized", "(Tensor x, SymInt[] size) -> Tensor", _no_data, _no_data)
"""A tensor without elements in another shape."""

settled = register("settled", "(Tensor x) -> Tensor", torch.clone, _settled_fake)
"""A copy of a tensor computed from ones of ``of_any_number``, with sizes of 0 that a compiler knows."""


def _keep_shape(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.shape = inputs[0].shape


torch.library.register_autograd("moeblaze::sized", lambda ctx, d: (sized(d, ctx.shape), None), setup_context=_keep_shape)
torch.library.register_autograd("moeblaze::settled", lambda ctx, d: sized(d, ctx.shape), setup_context=_keep_shape)
