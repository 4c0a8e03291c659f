"""Tensors without rows that a compiler takes for tensors of any number of rows.

A rank without tokens has to compile a layer the way that other ranks compile it: tokens move on all of them or on none. Of a size
that it knows to be 0 a compiler draws conclusions (``torch.where`` finds nothing), and a loop over experts is another program.
"""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

from moeblaze_ops.ops.register import number_of_data, register_plain_op


def of_any_number(tensor: Tensor, number: Tensor) -> Tensor:
    """The tensor, if it has elements; else one in which sizes of 0 are those of ``any_number``."""
    empty = [guard_or_false(size == 0) for size in tensor.shape]
    if not any(empty):
        return tensor
    return sized(tensor, [number.shape[0] if none else size for none, size in zip(empty, tensor.shape, strict=True)])


def _sized(x: Tensor, size: list[int]) -> Tensor:
    return x.new_empty(size)


def _settled_fake(x: Tensor, number: Tensor) -> Tensor:
    return x.new_empty([0 if of_data else size for of_data, size in zip(_of_data(x), x.shape, strict=True)])


def _of_data(x: Tensor) -> list[bool]:
    return [isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size)) for size in x.shape]


any_number = register_plain_op(
    "any_number", "(Tensor x) -> Tensor", lambda x: x.new_empty(0, 0), lambda x: x.new_empty(number_of_data(), 0)
)
"""[n, 0]; n is 0, which a compiler does not know."""

sized = register_plain_op("sized", "(Tensor x, SymInt[] size) -> Tensor", _sized, _sized)
"""A tensor without elements in another shape."""

settled = register_plain_op("settled", "(Tensor x, Tensor number) -> Tensor", lambda x, number: x.clone(), _settled_fake)
"""A copy of a tensor computed from ones of ``of_any_number``, with sizes of 0 that a compiler knows."""


def _sized_context(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _sized_backward(ctx, gradient: Tensor) -> tuple:
    return sized(gradient, ctx.shape), None


def _settled_context(ctx, inputs: tuple, output: Tensor) -> None:
    x, number = inputs
    ctx.of_data = _of_data(x)
    ctx.save_for_backward(number)


def _settled_backward(ctx, gradient: Tensor) -> tuple:
    # The shape of x would do, but a checkpointed layer would gather once more to know it, on this rank alone.
    (number,) = ctx.saved_tensors
    sizes = zip(ctx.of_data, gradient.shape, strict=True)
    return sized(gradient, [number.shape[0] if of_data else size for of_data, size in sizes]), None


torch.library.register_autograd("moeblaze::sized", _sized_backward, setup_context=_sized_context)
torch.library.register_autograd("moeblaze::settled", _settled_backward, setup_context=_settled_context)
