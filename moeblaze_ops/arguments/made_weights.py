"""Weights that functions give: called in forward, and again in backward in place of keeping what they gave.

    moe(x, weights, experts, lambda: unpack(codes, scales), w_down)

In eager mode, what autograd would keep of such a weight is replaced by how to get it again. In compiled code the graph has what
the function does, and Inductor's partitioner is told to repeat it. Hooks on saved tensors hide those outside of them: what is no
such weight is given to the ones that were there, so that ``torch.utils.checkpoint`` around the layer keeps its input alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moeblaze_ops.arguments.validation_values import refuse_type


class _Made(NamedTuple):
    """A view of what ``make`` gives."""

    make: Callable[[], Tensor]
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt

    def again(self) -> Tensor:
        with torch.no_grad():
            return self.make().as_strided(self.shape, self.strides, self.offset)


def is_maker(weight: Any) -> bool:
    """True if a weight is given as what makes it: a function, or a module with a forward, which lists of modules lack."""
    return callable(weight) and not isinstance(weight, nn.ParameterList | nn.ModuleList)


def with_made_weights(function: Callable[..., Tensor], op: str, weights: Mapping[str, Any], x: Tensor) -> Tensor:
    """``function`` of the weights by name, those that are functions called, of which autograd keeps nothing.

    Raises:
        TypeError: a function gives something else than a tensor.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    makers = {name: partial(_made, op, name, weight, dtype) for name, weight in weights.items() if is_maker(weight)}
    given = {name: weight for name, weight in weights.items() if name not in makers}
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(**given, **{name: make() for name, make in makers.items()})
    made = {name: checkpoint(make, use_reentrant=False) for name, make in makers.items()}
    owners = {tensor.untyped_storage().data_ptr(): makers[name] for name, tensor in made.items() if tensor.numel()}
    pack_rest, unpack_rest = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_same, _same)

    def pack(tensor: Tensor) -> Any:
        make = owners.get(tensor.untyped_storage().data_ptr())
        return pack_rest(tensor) if make is None else _Made(make, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(saved: Any) -> Tensor:
        return saved.again() if isinstance(saved, _Made) else unpack_rest(saved)

    with saved_tensors_hooks(pack, unpack):
        return function(**given, **made)


def _made(op: str, name: str, make: Callable[[], Any], dtype: torch.dtype | None) -> Tensor:
    """What a function gives, in the dtype that autocast would give it."""
    tensor = make()
    if not isinstance(tensor, Tensor):
        refuse_type(op, name, "give a tensor where it is a function", type(tensor).__name__)
    return tensor if dtype is None else tensor.to(dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor
