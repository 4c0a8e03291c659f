"""``pack_experts``: the parameters of separate expert modules side by side in memory, where ops read them in place.

The modules stay as they are: parameters keep their identity, names, values and gradients, so optimizers, state dicts and
hooks do not notice. Only their memory moves, to be views of one block for all experts.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeblaze_ops.arguments.separate_experts import are_in_a_row


@torch.no_grad()
def pack_experts(model: nn.Module) -> int:
    """Move equal parameters of the modules in each innermost ``nn.ModuleList`` or ``ParameterList`` side by side.

    A layer that is rewritten joins separate weights by a copy in each forward and again in each backward; weights that lie side
    by side need none. Call it once the model is on its device and in its dtype, and before compiling it: ``model.to``,
    ``copy.deepcopy`` and wrappers that shard parameters give each its own memory again, which costs the copy and nothing
    else. ``load_state_dict`` keeps what is packed.

    Left alone: parameters that are tied, differ in shape, strides, dtype or device, are not dense, or are of a subclass of
    ``nn.Parameter``, and lists of such lists. As much memory as the largest group takes is needed on top, for a moment.

    Args:
        model: any module; what else is in it does not matter.

    Returns:
        Bytes that were moved: 0 where nothing is to be packed, or all is already.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    groups = [group for group in _groups(model) if all(uses[id(p)] == 1 for p in group) and _are_alike(group)]
    return sum(_pack(group) for group in groups if not are_in_a_row(group))


def _groups(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Parameters that correspond to each other, of all entries of each list."""
    for module in model.modules():
        if isinstance(module, nn.ParameterList):
            yield list(module)
        elif isinstance(module, nn.ModuleList) and not any(_holds_list(entry) for entry in module):
            entries = [dict(entry.named_parameters(remove_duplicate=False)) for entry in module]
            for name in entries[0] if entries else ():
                if all(name in entry for entry in entries):
                    yield [entry[name] for entry in entries]


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(inner, (nn.ModuleList, nn.ParameterList)) for inner in module.modules())


def _are_alike(group: list[nn.Parameter]) -> bool:
    if len(group) < 2 or any(type(p) is not nn.Parameter or p.is_meta for p in group):
        return False
    layouts = {(p.shape, p.stride(), p.dtype, p.device) for p in group}
    return len(layouts) == 1 and group[0].numel() > 0 and _is_dense(group[0])


def _is_dense(tensor: Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _pack(group: list[nn.Parameter]) -> int:
    lead = group[0]
    block = lead.new_empty(len(group) * lead.numel())
    for position, parameter in enumerate(group):
        place = block.as_strided(lead.shape, lead.stride(), position * lead.numel())
        place.copy_(parameter)
        parameter.data = place
    return block.numel() * block.element_size()
