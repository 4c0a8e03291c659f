"""Tensors without rows that a compiler takes for tensors of any number of rows.

A rank without tokens has to compile a layer the way that other ranks compile it: tokens move on all of them or on none. Of a size
that it knows to be 0 a compiler draws conclusions (``torch.where`` finds nothing), and a loop over experts is another program.
"""

import sympy
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


def _settled_fake(x: Tensor, number: Tensor) -> Tensor:
    return x.new_empty([_known(size - rows * number.shape[0]) for size, rows in zip(x.shape, _rows(x, number), strict=True)])


def _rows(x: Tensor, number: Tensor) -> list[int]:
    """How much longer each axis gets for one more row in ``number``."""
    sizes = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in x.shape]
    symbols = free_unbacked_symbols(number)
    return [sum(int(size.coeff(symbol)) for symbol in symbols) for size in sizes]


def _known(size: int | torch.SymInt) -> int | torch.SymInt:
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return size if known is None else known


def _copy(x: Tensor, *_: object) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


any_number = register_plain_op(
    "any_number", "(Tensor x) -> Tensor", lambda x: x.new_empty(0, 0), lambda x: x.new_empty(number_of_data(), 0)
)
"""[n, 0]; n is 0, which a compiler does not know."""

sized = register_plain_op("sized", "(Tensor x, SymInt[] size) -> Tensor", _copy, lambda x, size: x.new_empty(size))
"""A copy of a tensor whose sizes are these, which a compiler may not know."""

settled = register_plain_op("settled", "(Tensor x, Tensor number) -> Tensor", _copy, _settled_fake)
"""A copy of a tensor computed from ones of ``of_any_number`` among others: a compiler knows that the number is 0."""


def _sized_context(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _sized_backward(ctx, gradient: Tensor) -> tuple:
    return sized(gradient, ctx.shape), None


def _settled_context(ctx, inputs: tuple, output: Tensor) -> None:
    x, number = inputs
    ctx.rows = _rows(x, number)
    ctx.save_for_backward(number)


def _settled_backward(ctx, gradient: Tensor) -> tuple:
    # The shape of x would do, but a checkpointed layer would gather once more to know it, on this rank alone.
    (number,) = ctx.saved_tensors
    return sized(gradient, [size + rows * number.shape[0] for size, rows in zip(gradient.shape, ctx.rows, strict=True)]), None


torch.library.register_autograd("moeblaze::sized", _sized_backward, setup_context=_sized_context)
torch.library.register_autograd("moeblaze::settled", _settled_backward, setup_context=_settled_context)
