"""Which ranks of a group are processes of one host, and the groups in which tokens cross hosts once and are spread within.

    ranks of host 0      0 1 2 3          ``within``: the ranks of one host
    ranks of host 1      4 5 6 7          ``between``: the ranks of one place on every host, such as 1 and 5

A host is what has a name of its own, or started on its own. Ranks tell each other theirs when their experts are sharded: what is
compiled later asks nobody.
"""

import functools
import hashlib
import itertools
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from moeblaze_ops.ops.sharded import host_numbers
from moeblaze_ops.ops.sharded.groups import members_of, once_a_group, process_group, timeout_of

_HIDE_OVERLAP = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
"""Settings under which a transfer and a product wait for each other: one queue for all streams, or a host that waits."""


def prepare(group: str) -> None:
    """Learn the hosts of a group's ranks, all of which call this, and how they tell each other numbers."""
    host_numbers.prepare(group)
    members, found = members_of(group), hosts_of(group)
    per_host = ranks_per_host(host_numbers.told(_this_host(), group))
    if not found and 1 < per_host < len(members) and members == sorted(members):
        own = members.index(dist.get_rank())
        first = own - own % per_host
        for ranks in (members[own % per_host :: per_host], members[first : first + per_host]):
            made = dist.new_group(ranks, timeout_of(process_group(group)), use_local_synchronization=True)
            found.append(made.group_name)
    if torch.cuda.is_available():
        _warn_of(hide_overlap(os.environ))


@once_a_group
def hosts_of(group: str) -> list[str]:
    """The names of the groups ``between`` and ``within``; none where all ranks are of one host, or not in equal blocks."""
    return []


def ranks_per_host(hosts: Sequence[int]) -> int:
    """How many ranks behind one another are of one host, if those are as many on each; all ranks otherwise."""
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    is_even = len(set(hosts)) == len(runs) and len(set(runs)) == 1
    return runs[0] if is_even else len(hosts)


def hide_overlap(settings: Mapping[str, str]) -> list[str]:
    """The settings that keep transfers from running beside products."""
    return [f"{name}={value}" for name, value in _HIDE_OVERLAP.items() if settings.get(name) == value]


@functools.cache
def _warn_once(setting: str) -> None:
    warnings.warn(f"sharded experts: transfers do not run beside products with {setting}; unset it", stacklevel=4)


def _warn_of(settings: list[str]) -> None:
    for setting in settings:
        _warn_once(setting)


def _this_host() -> int:
    boot = Path("/proc/sys/kernel/random/boot_id")
    named = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:7], "big")
