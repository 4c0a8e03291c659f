"""Host side of the Hopper kernels: TMA descriptors, views of weights, and the persistent launch."""

from functools import cache, lru_cache

import torch
from torch import Tensor

from moeblaze_ops.kernels.gluon_api import TensorDescriptor, gl
from moeblaze_ops.kernels.hopper_configs import REGISTERS

_ELEMENT_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@lru_cache(maxsize=256)
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENT_TYPES[dtype])


_MOST_FORMS = 4096
_forms: dict[tuple, dict] = {}
"""All of a descriptor but its base, by what it follows from: Triton's checks of it take longer than a launch."""


def describe(tensor: Tensor, *block: int) -> TensorDescriptor:
    """A TMA descriptor of ``tensor`` for boxes of shape ``block``. The last stride of ``tensor`` must be 1."""
    key = (tensor.shape, tensor.stride(), tensor.dtype, block)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        checked = TensorDescriptor.from_tensor(tensor, list(block), _shared_layout(block, tensor.dtype))
        form = _forms[key] = {name: value for name, value in vars(checked).items() if name != "base"}
    assert tensor.data_ptr() % 16 == 0, "a tensor that TMA describes begins at a multiple of 16 bytes"
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(form, base=tensor)
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


def bias_stride(biases) -> int | None:
    """Elements from one expert's bias to the next one's, None without a bias."""
    return biases[0].stride(0) if biases else None


def needs_wide_offsets(tensor: Tensor) -> bool:
    """Whether offsets of its elements exceed 32 bits; narrow ones spare the gathering warps half of their arithmetic."""
    return tensor.shape[0] * tensor.stride(0) >= 2**31


@cache
def num_programs(device: torch.device) -> int:
    """One persistent program for each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_persistent(kernel, device: torch.device, *args, registers: int = REGISTERS) -> None:
    """Runs a warp-specialised kernel whose first partition has four warps."""
    kernel[(num_programs(device),)](*args, num_warps=4, maxnreg=registers)
