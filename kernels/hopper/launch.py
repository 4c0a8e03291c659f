"""Host side of the Hopper kernels: TMA descriptors, views of weights, and the launch.

Small layers take less time on the device than a dozen calls of a ``JITFunction`` take to find their compiled kernels. So
a launch remembers its kernel by what Triton specialises on, and descriptors are validated once for each geometry.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.kernels.devices import multiprocessors
from moeblaze_ops.kernels.hopper.configs import REGISTERS, LowRank
from moeblaze_ops.kernels.hopper.gluon_api import TensorDescriptor, gl
from moeblaze_ops.kernels.launch import COMPILE_OPTIONS, shown, specialization
from moeblaze_ops.kernels.multiprocessors import left_free

_ELEMENT_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

_ALIGNMENT = 16
"""TMA takes addresses, and steps but for the inner ones, that are a multiple of this."""

_compiled_kernels: dict[Hashable, object] = {}


@lru_cache(maxsize=1024)
def _description(shape: torch.Size, strides: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype) -> dict:
    """The fields of a descriptor of such a tensor, validated, all but the tensor."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENT_TYPES[dtype])
    stand_in = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    described = vars(TensorDescriptor.from_tensor(stand_in, list(block), layout))
    return {name: value for name, value in described.items() if name != "base"}


def describe(tensor: Tensor, *block: int) -> TensorDescriptor:
    """A TMA descriptor of ``tensor`` for boxes of shape ``block``. The last stride of ``tensor`` must be 1."""
    assert tensor.data_ptr() % _ALIGNMENT == 0, "a tensor that TMA describes begins at a multiple of 16 bytes"
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(_description(tensor.shape, tensor.stride(), block, tensor.dtype), base=tensor)
    return descriptor


def part_views(weights: list[Tensor]) -> tuple[Tensor, ...]:
    """The gate and up (or only) matrices of an up-projection list, each a view of shape [E, F, D] or [E, F]."""
    return tuple(weight[:, part] for weight in weights for part in range(weight.shape[1]))


def describe_weight(w_EFD: Tensor, contract_d: bool, block_n: int, block_k: int) -> tuple[TensorDescriptor, bool]:
    """The descriptor of one matrix per expert, and whether the contracted axis is its inner one.

    Args:
        w_EFD: Shape [E, F, D]; stride 1 in F or in D.
        contract_d: whether D is contracted (rows of width D come in) or F.
        block_n, block_k: extent of a box along the axis that is kept, and along the contracted one.
    """
    d_inner = w_EFD.stride(2) == 1
    stored = w_EFD if d_inner else w_EFD.transpose(1, 2)
    k_inner = d_inner == contract_d
    return describe(stored, 1, *((block_n, block_k) if k_inner else (block_k, block_n))), k_inner


def describe_low_rank(
    rows_NR: Tensor | None, factor_EGRC: Tensor | None, block_m: int, block_n: int
) -> tuple[LowRank, tuple[TensorDescriptor | None, ...]]:
    """What a plan holds of a low-rank addition, and the descriptors of its rows and of the factor beside each part.

    Args:
        rows_NR: rows in expert order, contiguous; None for no addition.
        factor_EGRC: a matrix for each expert and part. Where its columns are not its inner axis, a small copy is made: boxes of
            few ranks a row would be many short reads.
        block_m, block_n: rows of a tile, and columns of one part.
    """
    if rows_NR is None or factor_EGRC is None:
        return LowRank(), (None, None, None)
    low = LowRank(rows_NR.shape[1])
    if factor_EGRC.stride(3) != 1 or any(stride * factor_EGRC.element_size() % _ALIGNMENT for stride in factor_EGRC.stride()[:3]):
        factor_EGRC = factor_EGRC.contiguous()
    parts = [describe(part_ERC, 1, low.block_k, block_n) for part_ERC in factor_EGRC.unbind(1)]
    return low, (describe(rows_NR.unsqueeze(0), 1, block_m, low.block_k), parts[0], parts[-1])


def bias_stride(biases: list[Tensor]) -> int | None:
    """Elements from one expert's bias to the next one's, None without a bias."""
    return biases[0].stride(0) if biases else None


def needs_wide_offsets(tensor: Tensor) -> bool:
    """True if offsets of its elements exceed 32 bits; narrow ones spare the gathering warps half of their arithmetic."""
    return tensor.shape[0] * tensor.stride(0) >= 2**31


def num_programs(device: torch.device) -> int:
    """One persistent program for each multiprocessor that is not left to others."""
    return max(1, multiprocessors(device) - left_free())


def launch_persistent(kernel: Any, device: torch.device, *args: Any, registers: int = REGISTERS) -> None:
    """Runs a warp-specialised kernel whose first partition has four warps, and which waits itself for the one before it."""
    options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
    launch_compiled(kernel, num_programs(device), device, args, **options)


def launch_compiled(kernel: Any, programs: int, device: torch.device, args: tuple, **options: Any) -> None:
    """``kernel[(programs,)](*args, **options)``; ``args`` are all of the kernel's, its compile-time ones too."""
    key = (id(kernel), device.index, tuple(options.values()), *map(_specialization, args))
    compiled = _compiled_kernels.get(key)
    show = shown()
    if compiled is None:
        _compiled_kernels[key] = kernel[(programs,)](*args, **options, **COMPILE_OPTIONS)
    if show is not None:
        show(compiled, programs, args)
    elif compiled is not None:
        compiled[(programs, 1, 1)](*args)


def _specialization(argument) -> Hashable:
    """What a kernel is compiled for in an argument. The box of a descriptor follows from the plan beside it."""
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype
    if isinstance(argument, tuple):
        return tuple(map(_specialization, argument))
    return specialization(argument)
