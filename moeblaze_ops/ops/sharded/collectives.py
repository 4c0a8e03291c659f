"""Collectives of the ranks that share a layer's experts, and what a host has to know before tokens move.

Transport is torch's functional collectives by the name of a process group: they start at once and are waited for by name.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

_functional = torch.ops._c10d_functional
_library = torch.library.Library("moeblaze", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def start_gather(local: Tensor, ranks: int, group: str) -> Tensor:
    """Start to gather ``local`` of every rank on the first axis; the result is to be waited for, and has no gradient."""
    with torch.no_grad():
        return _functional.all_gather_into_tensor(local.detach().contiguous(), ranks, group)


def start_reduce_scatter(whole: Tensor, ranks: int, group: str) -> Tensor:
    """Start to sum ``whole`` over the ranks, of which each gets its part of the first axis; to be waited for."""
    return _functional.reduce_scatter_tensor(whole.contiguous(), "sum", ranks, group)


def wait(started: Tensor) -> Tensor:
    return _functional.wait_tensor(started)



def local_shard(sharded: Tensor) -> Tensor:
    """What this rank stores of a DTensor; its gradient is that of the shard."""
    return sharded.to_local()


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


@functools.cache
def _host_group(name: str) -> dist.ProcessGroup:
    """A group of the same ranks for numbers of the host."""
    group = process_group(name)
    if dist.get_backend(group) == "gloo":
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def _used_slots(slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
    _read_answers()  # a host that waits for tokens that never come would not raise
    return slots_N[: int(offsets_E1[-1])].clone()


def _used_slots_fake(slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
    if isinstance(slots_N.shape[0], int) and slots_N.shape[0] == 0:
        return torch.empty_like(slots_N)
    context = torch.library.get_ctx()
    if context._shape_env is None:
        return slots_N.new_empty(context.new_dynamic_size(min=0))
    # Not `new_dynamic_size`: frames may be captured without ops whose output shape depends on data, and this one is ours.
    count = context._shape_env.create_unbacked_symint()
    torch._check(count >= 0)
    torch._check(count <= slots_N.shape[0])
    return slots_N.new_empty(count)


_asked: dict[str, tuple[dist.Work, list[Tensor]]] = {}
_agreed: set[tuple[str, int]] = set()


def _same_tokens(x_TD: Tensor, group: str) -> Tensor:
    host, mine = _host_group(group), x_TD.shape[0]
    _read_answers()
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(host.size())]
    work = dist.all_gather(everyone, torch.tensor([mine], dtype=torch.int64), group=host, async_op=True)
    if host is process_group(group) or (group, mine) not in _agreed:
        _prove_same(work, everyone)
        _agreed.add((group, mine))
    else:
        _asked[group] = work, everyone
    return x_TD.new_zeros(1, dtype=torch.int32)


def _read_answers() -> None:
    """Prove for every question that was asked and not answered yet that the ranks have as many tokens."""
    while _asked:
        _, question = _asked.popitem()
        _prove_same(*question)


def _prove_same(work: dist.Work, everyone: list[Tensor]) -> None:
    work.wait()
    counts = [int(count) for count in everyone]
    if len(set(counts)) > 1:
        way = 'set config.experts_move = "weights", or pad tokens with expert ids of -1'
        raise ValueError(f"sharded experts: tokens must be as many on every rank for tokens to move ({way}), got {counts}")


def _same_tokens_fake(x_TD: Tensor, group: str) -> Tensor:
    return x_TD.new_empty(1, dtype=torch.int32)


def _register(name: str, schema: str, real, fake) -> torch._ops.OpOverload:
    _library.define(f"{name}{schema}", tags=_TAGS)
    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moeblaze::{name}", fake, lib=_library)
    return getattr(torch.ops.moeblaze, name).default


used_slots = _register("used_slots", "(Tensor slots_N, Tensor offsets_E1) -> Tensor", _used_slots, _used_slots_fake)
"""The slots of ``dispatch`` that are used: as many as ``offsets_E1`` ends with, which the host reads."""

same_tokens = _register("same_tokens", "(Tensor x_TD, str group) -> Tensor", _same_tokens, _same_tokens_fake)
"""Zero, [1] int32: the ranks of the group tell each other on the host how many tokens they have.

A rank waits for the answers where it has a number for the first time, or where tokens travel by gloo. Otherwise it reads them
before the host waits for a GPU, or when it asks again.

Raises:
    ValueError: the numbers differ, on all ranks the same.
"""
