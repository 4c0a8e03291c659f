"""``expert_up`` and ``expert_down`` of which backward finds no pre-activation: it runs ``expert_up`` again.

For layers that ``expert_mlp``, the one operator of both, has no arguments for: with low-rank additions, or parameters of an
activation. Beside x and the routing, their low-rank rows are kept, R numbers for each routed row.

    eager       autograd saves how to get h where an operator saves h
    compiled    the graph has a region of checkpointing around ``expert_up``: Inductor's partitioner repeats it
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.expert_up import expert_up


class _Again:
    """What ``expert_up`` of some operands gave as h; gets it again."""

    def __init__(self, operands: tuple, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._device = operands[0].device.type
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        self._operands = tree_map_only(Tensor, lambda tensor: (_Saved(pack(tensor), tensor._version)), operands)
        self._unpack = unpack

    def h(self) -> Tensor:
        operands = tree_map_only(_Saved, lambda saved: saved.unpacked(self._unpack), self._operands)
        enabled, dtype = self._autocast
        with torch.no_grad(), torch.autocast(self._device, dtype=dtype, enabled=enabled):
            return call(expert_up, *operands)[0]


class _Saved:
    """A tensor as the hooks around the layer save it, and which of its values it is."""

    def __init__(self, packed: Any, version: int) -> None:
        self._packed, self._version = packed, version

    def unpacked(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        tensor = unpack(self._packed)
        if tensor is self._packed and tensor._version != self._version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation")
        return tensor


def with_repeated_up(operands: tuple, down: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``down(h, a)`` of h and a of ``expert_up(*operands)``, where autograd keeps nothing of h."""
    if torch.compiler.is_compiling():
        return down(*checkpoint(lambda: call(expert_up, *operands), use_reentrant=False))
    h_NGF, a_NF = call(expert_up, *operands)
    if h_NGF.numel() == 0:
        return down(h_NGF, a_NF)
    address, shape = h_NGF.untyped_storage().data_ptr(), h_NGF.shape
    pack_rest, unpack_rest = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_same, _same)
    again = _Again(operands, pack_rest, unpack_rest)

    def pack(tensor: Tensor) -> Any:
        is_h = tensor.untyped_storage().data_ptr() == address and tensor.shape == shape
        return again if is_h else pack_rest(tensor)

    def unpack(saved: Any) -> Tensor:
        return saved.h() if isinstance(saved, _Again) else unpack_rest(saved)

    with saved_tensors_hooks(pack, unpack):
        return down(h_NGF, a_NF)


def _same(tensor: Tensor) -> Tensor:
    return tensor
