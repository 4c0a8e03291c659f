"""Experts that are one module each: stored as stacks, saved and loaded under the names of the modules."""

import torch
from torch import Tensor, nn

from moeblaze_ops.distributed.whole_weights import first_expert


def stacked(experts: nn.ModuleList, name: str) -> Tensor:
    """Parameter ``name`` of every entry, ``[E, ...]``."""
    return torch.stack([entry.get_parameter(name).detach() for entry in experts])


def keep_names_of_entries(experts: nn.ModuleList, stacks: dict[str, str]) -> None:
    """Let ``state_dict`` hold ``3.w1.weight`` for each expert of this rank in place of its entry in the stack ``w1_weight``.

    They share the memory of the stack. ``load_state_dict`` takes the entries of this rank's experts and passes over others.
    """

    def save(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        for name, key in stacks.items():
            stored = state.pop(prefix + key, None)
            if stored is None:
                continue
            first = first_expert(stored)
            for place, entry in enumerate(stored.to_local().unbind(0)):
                state[f"{prefix}{first + place}.{name}"] = entry

    def load(module: nn.Module, state: dict, prefix: str, *args) -> None:
        from torch.distributed.tensor import DTensor

        for name, key in stacks.items():
            stored = module._parameters[key]
            first, local = first_expert(stored), stored.to_local()
            entries = {number: state.pop(f"{prefix}{number}.{name}", None) for number in range(len(module))}
            own = [entries[first + place] for place in range(local.shape[0])]
            if any(entry is None for entry in own):
                continue
            stack = torch.stack([entry.to(local.device) for entry in own])
            state[prefix + key] = DTensor.from_local(stack, stored.device_mesh, stored.placements, run_check=False)

    experts.register_state_dict_post_hook(save)
    experts.register_load_state_dict_pre_hook(load)
