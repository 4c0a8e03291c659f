"""What state dicts have of sharded experts: DTensors under the names of the model as it was written.

A stack of experts is saved as it is stored. Experts that are one module each are stored as a stack, and saved one by one, each in
parts over the ranks that share them: so torch saves, loads, gathers and broadcasts them as any other parameter, and a rank has as
much as it stores. An all-to-all makes parts of a stack, and one a stack of parts.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from moeblaze_ops.distributed.whole_weights import add_members, expert_axis, own_experts


def load_whole(module: nn.Module, names: Iterable[str]) -> None:
    """Let ``load_state_dict`` take whole tensors for the parameters ``names``, too: a rank loads its own experts."""
    add_members(module, [("_load_from_state_dict", _loads, (_take_own, *names))])


def keep_names_of_entries(experts: nn.ModuleList, stacks: dict[str, str]) -> None:
    """Let state dicts have ``3.w1.weight`` of each expert in place of the stack ``w1_weight``; all ranks of its mesh call them.

    ``load_state_dict`` takes the DTensors of a state dict, or whole tensors, of which a rank needs its own experts.
    """
    names = tuple(stacks.items())
    members = [("_save_to_state_dict", _saves, names), ("named_buffers", _names_entries, names)]
    add_members(experts, [*members, ("_load_from_state_dict", _loads, (_join_entries, *names))])


def _saves(original: type[nn.Module], *stacks: tuple[str, str]) -> Callable:
    def save(self: nn.ModuleList, state: dict, prefix: str, *others) -> None:
        original._save_to_state_dict(self, state, prefix, *others)
        parts = [_entries(state.pop(prefix + key)) for _, key in stacks]
        for number, entries in enumerate(zip(*parts, strict=True)):
            state.update({f"{prefix}{number}.{name}": entry for (name, _), entry in zip(stacks, entries, strict=True)})

    return save


def _names_entries(original: type[nn.Module], *stacks: tuple[str, str]) -> Callable:
    def named_buffers(self: nn.ModuleList, prefix: str = "", recurse: bool = True, *args) -> Iterator[tuple[str, Tensor]]:
        """With ``recurse=False`` entries too, without values: torch's state dicts of models ask so for what a module has."""
        yield from original.named_buffers(self, prefix, recurse, *args)
        if not recurse:
            for number in range(len(self)):
                for name, key in stacks:
                    yield f"{prefix}.{number}.{name}".lstrip("."), _empty_entry(self._parameters[key])

    return named_buffers


def _loads(original: type[nn.Module], hook: Callable, *names) -> Callable:
    def load(self: nn.Module, *args) -> None:
        # Hooks run in turn: this one reads what those of fully_shard shard.
        handle = self.register_load_state_dict_pre_hook(partial(hook, names))
        try:
            original._load_from_state_dict(self, *args)
        finally:
            handle.remove()

    return load


def _take_own(names: Iterable[str], module: nn.Module, state: dict, prefix: str, *others) -> None:
    for name in names:
        given, stored = state.get(prefix + name), module._parameters[name]
        if given is not None and not isinstance(given, DTensor) and given.shape == stored.shape:
            own = own_experts(stored)
            state[prefix + name] = _as_stored(given[own.start : own.stop], _by_experts(stored), stored)


def _join_entries(
    stacks: Iterable[tuple[str, str]], experts: nn.ModuleList, state: dict, prefix: str,
    metadata: dict, strict: bool, missing: list, unexpected: list, errors: list,
) -> None:  # fmt: skip
    for name, key in stacks:
        stored = experts._parameters[key]
        names = [f"{prefix}{number}.{name}" for number in range(len(experts))]
        given = {each: state.pop(each) for each in names if each in state}
        given = {each: entry for each, entry in given.items() if not _is_unwritten(entry)}
        in_parts = any(isinstance(each, DTensor) for each in given.values())
        needed = names if in_parts else [names[number] for number in own_experts(stored)]
        absent = [each for each in needed if each not in given]
        shape = stored.shape[1:]
        wrong = [f"size mismatch for {each}: must be {shape}, got {e.shape}" for each, e in given.items() if e.shape != shape]
        missing += absent
        errors += wrong
        state[prefix + key] = stored
        if wrong or absent == needed:
            continue
        of_entry = _entry_placements(stored)
        placements = _of_stack(of_entry) if in_parts else _by_experts(stored)
        before = stored.detach().redistribute(placements=placements).to_local() if absent else [None] * len(needed)
        entries = [given.get(each, kept) for each, kept in zip(needed, before, strict=True)]
        local = [e.redistribute(stored.device_mesh, of_entry).to_local() if isinstance(e, DTensor) else e for e in entries]
        state[prefix + key] = _as_stored(torch.stack(local), placements, stored)


def _entries(stored: Tensor) -> tuple[DTensor, ...]:
    """The experts of a stack, each in parts."""
    if stored.is_meta:
        return tuple(_empty_entry(stored) for _ in range(stored.shape[0]))
    stack = stored.detach().to(stored.device_mesh.device_type)
    return stack.redistribute(placements=_of_stack(_entry_placements(stored))).unbind(0)


def _empty_entry(stored: DTensor) -> DTensor:
    entry = torch.empty(stored.shape[1:], dtype=stored.dtype, device="meta")
    placed = distribute_tensor(entry, stored.device_mesh, _entry_placements(stored))
    if not stored.is_meta:
        placed = cast(DTensor, torch.empty_like(placed, device=stored.device_mesh.device_type))
    placed._moeblaze_version = placed.to_local()._version
    return placed


def _is_unwritten(entry: Tensor) -> bool:
    """True if a tensor is an empty entry still: nothing was loaded into it."""
    return isinstance(entry, DTensor) and getattr(entry, "_moeblaze_version", None) == entry.to_local()._version


def _as_stored(local: Tensor, placements: list[Placement], stored: DTensor) -> DTensor:
    """A stack that is on the ranks as ``placements`` say, as ``stored`` is on them."""
    mesh = stored.device_mesh
    stack = DTensor.from_local(
        local.to(mesh.device_type), mesh, placements, run_check=False, shape=stored.shape, stride=stored.stride()
    )
    return stack.redistribute(placements=stored.placements)


def _by_experts(stored: DTensor) -> list[Placement]:
    """Placements of a stack of which every rank has its own experts, whole."""
    return [Shard(0) if axis == expert_axis(stored) else Replicate() for axis in range(stored.device_mesh.ndim)]


def _entry_placements(stored: DTensor) -> list[Placement]:
    """Placements of an expert: those of its stack, and where that is by experts an axis of its own.

    Two mesh axes share no axis of a tensor: torch 2.13 gathers one that they do not divide in a wrong order.
    """
    taken = {p.dim - 1 for p in stored.placements if p.is_shard()}
    free = (axis for axis in range(stored.dim() - 1) if axis not in taken)
    placements: list[Placement] = []
    for p in stored.placements:
        axis = None if p.is_replicate() else p.dim - 1 if p.dim > 0 else next(free, None)
        placements.append(Replicate() if axis is None else Shard(axis))
    return placements


def _of_stack(of_entry: list[Placement]) -> list[Placement]:
    """Placements of a stack of entries that are placed so."""
    return [Shard(p.dim + 1) if p.is_shard() else p for p in of_entry]
