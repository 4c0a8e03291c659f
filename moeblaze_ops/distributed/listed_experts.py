"""Experts that are one module each: stored as stacks, saved and loaded under the names of the modules.

In a state dict each expert is a DTensor, in rows over the ranks that share the experts. So torch saves, loads, gathers and
broadcasts it as any other, and a rank has as much as it stores. Stacks become rows, and rows stacks, by an all-to-all.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from moeblaze_ops.distributed.whole_weights import add_members, expert_axis, own_experts


def stacked(experts: nn.ModuleList, name: str) -> Tensor:
    """Parameter ``name`` of every entry, ``[E, ...]``."""
    return torch.stack([entry.get_parameter(name).detach() for entry in experts])


def keep_names_of_entries(experts: nn.ModuleList, stacks: dict[str, str]) -> None:
    """Let ``state_dict`` hold ``3.w1.weight`` of each expert in place of the stack ``w1_weight``, and ``load_state_dict`` take it.

    Every rank calls them. Loaded are the DTensors of a state dict, or whole tensors, of which a rank needs its own experts.
    """
    experts.__dict__["_moeblaze_stacks"] = stacks
    members = ("_save_to_state_dict", _saves), ("_load_from_state_dict", _loads), ("named_buffers", _names_entries)
    add_members(experts, ((name, make, ()) for name, make in members))


def _saves(original: type[nn.Module]) -> Callable:
    def save(self: nn.ModuleList, state: dict, prefix: str, *others) -> None:
        original._save_to_state_dict(self, state, prefix, *others)
        stacks = self._moeblaze_stacks
        rows = [_entries(state.pop(prefix + key)) for key in stacks.values()]
        for number, entries in enumerate(zip(*rows, strict=True)):
            state.update({f"{prefix}{number}.{name}": entry for name, entry in zip(stacks, entries, strict=True)})

    return save


def _loads(original: type[nn.Module]) -> Callable:
    def load(self: nn.ModuleList, *args) -> None:
        # A hook runs behind those of fully_shard, which shard what it reads.
        hook = self.register_load_state_dict_pre_hook(_join_entries)
        try:
            original._load_from_state_dict(self, *args)
        finally:
            hook.remove()

    return load


def _names_entries(original: type[nn.Module]) -> Callable:
    def named_buffers(self: nn.ModuleList, prefix: str = "", recurse: bool = True, *args) -> Iterator[tuple[str, Tensor]]:
        """With ``recurse=False`` entries too, without values: torch's state dicts of models ask so for what a module has."""
        yield from original.named_buffers(self, prefix, recurse, *args)
        if not recurse:
            for number in range(len(self)):
                for name, key in self._moeblaze_stacks.items():
                    yield f"{prefix}.{number}.{name}".lstrip("."), _empty_entry(self._parameters[key])

    return named_buffers


def _join_entries(
    experts: nn.ModuleList, state: dict, prefix: str, metadata: dict, strict: bool, missing: list, unexpected: list, errors: list
) -> None:
    for name, key in experts._moeblaze_stacks.items():
        stored = experts._parameters[key]
        names = [f"{prefix}{number}.{name}" for number in range(len(experts))]
        given = {each: state.pop(each) for each in names if each in state}
        if not any(isinstance(each, DTensor) for each in given.values()):
            names = [names[number] for number in own_experts(stored)]
        shape = stored.shape[1:]
        wrong = [f"size mismatch for {each}: must be {shape}, got {given[each].shape}" for each in given if given[each].shape != shape]
        absent = [each for each in names if each not in given]
        state[prefix + key] = stored if wrong or absent else _joined([given[each] for each in names], stored)
        errors += wrong
        missing += absent if strict else []


def _entry_placements(stored: DTensor) -> list[Placement]:
    if stored.dim() == 1:
        return [Replicate()] * stored.device_mesh.ndim
    return [p if p.is_replicate() else Shard(max(p.dim - 1, 0)) for p in stored.placements]


def _empty_entry(stored: DTensor) -> DTensor:
    entry = torch.empty(stored.shape[1:], dtype=stored.dtype, device="meta")
    placed = distribute_tensor(entry, stored.device_mesh, _entry_placements(stored))
    return placed if stored.is_meta else torch.empty_like(placed, device=stored.device_mesh.device_type)


def _entries(stored: Tensor) -> tuple[DTensor, ...]:
    """The experts of a stack, each in rows."""
    if stored.is_meta:
        return tuple(_empty_entry(stored) for _ in range(stored.shape[0]))
    stack = stored.detach().to(stored.device_mesh.device_type)
    return stack.redistribute(placements=_moved(_entry_placements(stored), 1)).unbind(0)


def _joined(entries: list[Tensor], stored: DTensor) -> DTensor:
    """The stack as it is stored of the entries of a state dict, or of this rank's own, whole."""
    mesh = stored.device_mesh
    if isinstance(entries[0], DTensor):
        placed = _entry_placements(stored)
        entries = [entry.redistribute(mesh, placed).to_local() for entry in entries]
        placements = _moved(placed, 1)
    else:
        placements = [Shard(0) if number == expert_axis(stored) else Replicate() for number in range(mesh.ndim)]
    local = torch.stack([entry.to(mesh.device_type) for entry in entries])
    stack = DTensor.from_local(local, mesh, placements, run_check=False, shape=stored.shape, stride=stored.stride())
    return stack.redistribute(placements=stored.placements)


def _moved(placements: list[Placement], axes: int) -> list[Placement]:
    return [Shard(p.dim + axes) if p.is_shard() else p for p in placements]
