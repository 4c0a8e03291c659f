"""What is asked of a GPU when code for it is made. All of it is in the keys of the caches on disk, so nothing else may be."""

from functools import cache

import torch


def capability(device: torch.device) -> tuple[int, int]:
    """Its compute capability."""
    return torch.cuda.get_device_capability(device)


def why_no_kernels(device: torch.device, found: tuple[int, int]) -> str | None:
    """What keeps a GPU of this compute capability from running the kernels, or None."""
    if torch.version.hip is not None:
        return "the kernels are CUDA's, and this torch is built for ROCm"
    major, minor = found
    return f"the kernels need compute capability 8.0 or newer, {device} has {major}.{minor}" if major < 8 else None


@cache
def multiprocessors(device: torch.device) -> int:
    """How many it has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def memory_bytes(device: torch.device | int | None) -> int:
    """All of its memory, free or not; None is the current GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def all_that_is_asked(device: torch.device) -> tuple[object, ...]:
    """The answers to all of these questions."""
    return capability(device), multiprocessors(device), memory_bytes(device)
