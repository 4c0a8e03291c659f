"""How launchers reach the device: traceable launches, and what they may ask about sizes, devices and precision."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

from moeblaze_ops.kernels import devices
from moeblaze_ops.kernels.configs import ROW_BLOCK, Operands, choose_rank_block
from moeblaze_ops.kernels.tracing import is_traceable


@triton.jit
def _nothing():
    pass


_ALIGNMENT = 16
"""Triton compiles for addresses and integers that are multiples of it."""

IS_INTERPRETED = not isinstance(_nothing, JITFunction)
"""True if kernels run in Triton's interpreter, which is settled when they are decorated."""

COMPILE_OPTIONS = {"enable_fp_fusion": True}
"""What all kernels are compiled with: Triton 3.10 will fuse a product and a sum only where that is asked for."""


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
    if not isinstance(kernel, JITFunction):
        kernel[(num_programs,)](*args, **keywords)
    elif is_traceable():
        wrap_triton(kernel)[(num_programs,)](*args, **keywords)
    else:
        launch_compiled(kernel, num_programs, args, keywords)


_compiled_kernels: dict[Hashable, tuple[Any, tuple]] = {}
"""Compiled kernels with their compile-time arguments: to find one takes a ``JITFunction`` longer than to launch it."""

_shown = threading.local()


def launch_compiled(kernel: Any, num_programs: int, args: tuple, keywords: dict[str, Any]) -> None:
    """``kernel[(num_programs,)](*args, **keywords)``, by what was compiled for arguments like these."""
    key = (id(kernel), torch.cuda.current_device(), *keywords, *keywords.values(), *map(specialization, args))
    show = shown()
    if key in _compiled_kernels:
        compiled, rest = _compiled_kernels[key]
        (show or run_compiled)(compiled, num_programs, (*args, *rest))
        return
    compiled = kernel[(num_programs,)](*args, **keywords, **COMPILE_OPTIONS)
    parameters, others = kernel.params[: len(args)], kernel.params[len(args) :]
    # The key has the value of what comes by name alone.
    is_whole = all(parameter.name in keywords for parameter in others)
    if is_whole and not any(parameter.is_constexpr for parameter in parameters):
        _compiled_kernels[key] = compiled, tuple(keywords[parameter.name] for parameter in others)
    if show is not None:
        show(None, num_programs, ())


def run_compiled(compiled: Any, num_programs: int, args: tuple) -> None:
    """Runs a compiled kernel on all of its arguments."""
    compiled[(num_programs, 1, 1)](*args)


@contextmanager
def shown_to(show: Callable[[Any, int, tuple], None]) -> Iterator[None]:
    """A context in which this thread's kernels are run by ``show``; it gets None for one that was compiled, and so has run."""
    _shown.to = show
    try:
        yield
    finally:
        _shown.to = None


def shown() -> Callable[[Any, int, tuple], None] | None:
    """What runs this thread's kernels, if it is shown them."""
    return getattr(_shown, "to", None)


def specialization(argument: Any) -> Hashable:
    """What Triton compiles a kernel for in an argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if type(argument) is int:
        return argument == 1, argument % _ALIGNMENT == 0, argument.bit_length() > 31
    return argument


def static_size(size: int) -> int | None:
    """``size`` when it is a plain int, ``None`` when it is symbolic: never adds a guard."""
    return size if isinstance(size, int) else None


def size_hint(size: int) -> int | None:
    """``size``, or of a symbolic one the size that it was traced with, ``None`` when there is none: never adds a guard."""
    return size if isinstance(size, int) else size.node.hint


def is_multiple(size: int, block: int) -> bool:
    """True if ``size`` is known to be a multiple of ``block`` without a guard."""
    return isinstance(size, int) and size % block == 0


def ceil_div(size: int, block: int) -> int:
    """Number of blocks of ``block`` that cover ``size``; a SymInt for a symbolic size."""
    return (size + block - 1) // block


def most_row_tiles(blocks_B2: Tensor, num_rows: int, block_m: int) -> int:
    """Row tiles of a schedule, and tiles without rows: so many programs are launched. An entry has one row or more."""
    num_entries = blocks_B2.shape[0] - 1
    if static_size(num_entries) is not None and static_size(num_rows) is not None:
        num_entries = min(num_entries, num_rows)
    return num_entries * (ROW_BLOCK // block_m)


def has_wide_offsets(tensors: Iterable[Tensor], first_axis: int = 1) -> bool:
    """True if elements that differ in these axes may lie further apart than 32 bits count: those of one expert of a weight."""
    for tensor in tensors:
        sizes, strides = tensor.shape[first_axis:], tensor.stride()[first_axis:]
        if not all(isinstance(number, int) for number in (*sizes, *strides)):
            return True
        if sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= 2**31:
            return True
    return False


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
    """Compute capability of the device of ``tensor``, which has to run the kernels; that of a Hopper for the interpreter's."""
    if tensor.device.type != "cuda":
        return (9, 0)
    found = devices.capability(tensor.device)
    if (lacks := devices.why_no_kernels(tensor.device, found)) is not None:
        raise NotImplementedError(f"moeblaze: {lacks}")
    return found


def operands(tensor: torch.Tensor) -> Operands:
    """How matrix products of tensors like this one are computed."""
    return Operands(tensor.element_size(), tensor.dtype != torch.float32 or allows_tf32())


def allows_tf32() -> bool:
    """True if torch lets fp32 matrix products round their operands to TF32."""
    # What ``torch.backends.cuda.matmul.fp32_precision`` reads, which compares its own name with six others first.
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
