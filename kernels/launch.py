"""How launchers reach the device: traceable launches, and what they may ask about sizes, devices and precision."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

from moeblaze_ops.kernels.configs import Operands, choose_rank_block
from moeblaze_ops.kernels.tracing import is_traceable


@triton.jit
def _nothing():
    pass


IS_INTERPRETED = not isinstance(_nothing, JITFunction)
"""Whether kernels run in Triton's interpreter, which is settled when they are decorated."""


def launch(kernel: Any, num_programs: int, *args: Any, **keywords: Any) -> None:
    """Launches ``num_programs`` programs of a ``@triton.jit`` kernel, eagerly or into the graph being traced.

    Args:
        kernel: a ``@triton.jit`` function, or its interpreted form under ``TRITON_INTERPRET=1``.
        num_programs: size of the one-dimensional grid, int or SymInt; nothing happens for a plain 0.
        args, keywords: the kernel's arguments, and ``num_warps`` and ``num_stages``.
    """
    if isinstance(num_programs, int) and num_programs == 0:
        return
    # To wrap a kernel takes longer than to launch it, and wrap_triton of torch 2.11 refuses interpreted functions.
    launched = wrap_triton(kernel) if is_traceable() and isinstance(kernel, JITFunction) else kernel
    launched[(num_programs,)](*args, **keywords)


def static_size(size: int) -> int | None:
    """``size`` when it is a plain int, ``None`` when it is symbolic: never adds a guard."""
    return size if isinstance(size, int) else None


def size_hint(size: int) -> int | None:
    """``size``, or of a symbolic one the size that it was traced with, ``None`` when there is none: never adds a guard."""
    return size if isinstance(size, int) else size.node.hint


def is_multiple(size: int, block: int) -> bool:
    """Whether ``size`` is known to be a multiple of ``block`` without a guard."""
    return isinstance(size, int) and size % block == 0


def ceil_div(size: int, block: int) -> int:
    """Number of blocks of ``block`` that cover ``size``; a SymInt for a symbolic size."""
    return (size + block - 1) // block


def mean_rows(num_rows: int, num_experts: int) -> int | None:
    """Rows of an expert on average, rounded up; ``None`` when either is symbolic."""
    if static_size(num_rows) is None or static_size(num_experts) is None:
        return None
    return ceil_div(num_rows, max(1, num_experts))


def gate_and_up(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The gate and the up part of a list of up weights or biases, as views; the same one twice when ungated."""
    return tensors[0].select(1, 0), tensors[-1].select(1, tensors[-1].shape[1] - 1)


def strides_of(tensor: Tensor | None, rank: int) -> tuple[int | None, ...]:
    """Strides as a kernel takes them, None for each of ``rank`` axes of a tensor that there is not."""
    return (None,) * rank if tensor is None else tensor.stride()


def low_rank_blocks(rows_NR: Tensor | None) -> dict[str, int]:
    """What a kernel is compiled for in R more columns of its contraction: 0 where there are none."""
    if rows_NR is None:
        return {"R": 0, "BLOCK_R": 0}
    rank = rows_NR.shape[1]
    return {"R": rank, "BLOCK_R": choose_rank_block(operands(rows_NR), rank)}


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the device of ``tensor``; that of a Hopper for tensors of the interpreter."""
    if tensor.device.type != "cuda":
        return (9, 0)
    return torch.cuda.get_device_capability(tensor.device)


def operands(tensor: torch.Tensor) -> Operands:
    """How matrix products of tensors like this one are computed."""
    return Operands(tensor.element_size(), tensor.dtype != torch.float32 or allows_tf32())


def allows_tf32() -> bool:
    """Whether torch lets fp32 matrix products round their operands to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
