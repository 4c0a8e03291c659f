"""Process groups by their names, and what is kept for each while it lives: later its name may be that of another one."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

Result = TypeVar("Result")


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def once_a_group(make: Callable[..., Result]) -> Callable[..., Result]:
    """``make`` of a group's name and other arguments, called once for a group and these.

    What it returns may hold no group, or that would live for ever.
    """
    kept: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Result]] = WeakKeyDictionary()

    @functools.wraps(make)
    def of_group(name: str, *arguments: object) -> Result:
        results = kept.setdefault(process_group(name), {})
        if arguments not in results:
            results[arguments] = make(name, *arguments)
        return results[arguments]

    return of_group


@once_a_group
def members_of(name: str) -> list[int]:
    """The ranks of a group, as the whole world numbers them."""
    return dist.get_process_group_ranks(process_group(name))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank of the group waits for the others."""
    (device, *_) = group._device_types or [torch.device("cpu")]
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)
