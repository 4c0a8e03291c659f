"""``pack_experts``: the parameters of separate expert modules side by side in memory, where ops read them in place.

The modules stay as they are: parameters keep their identity, names, values and gradients, so optimizers, state dicts and
hooks do not notice. Only their memory moves, to be views of one block for all experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeblaze_ops.arguments.separate_experts import are_in_a_row, separate_weights
from moeblaze_ops.arguments.validation_values import kind_of, refuse, refuse_type

_LISTS = (nn.ModuleList, nn.ParameterList)


def pack_experts(
    model: nn.Module, *inputs: Any, experts: str | Callable[[str, nn.Module], bool] | None = None, **keywords: Any
) -> int:
    """Move the parameters of separate experts side by side, projection by projection.

    A layer that is rewritten joins separate weights by a copy in each forward and again in each backward; weights that lie side
    by side need none. Call it once the model is on its device and in its dtype, and before compiling it: ``model.to``,
    ``copy.deepcopy`` and wrappers that shard parameters give each its own memory again, which costs the copy and nothing
    else. ``load_state_dict`` keeps what is packed.

    Which parameters are those of experts is not guessed. With inputs, the model is traced as ``explain`` does it, and what
    rewritten layers read expert by expert is packed. With ``experts``, the lists that it selects are: parameters of the same
    name of all their entries.

        moeblaze_ops.pack_experts(model, x)
        moeblaze_ops.pack_experts(model, experts="layers.*.mlp.experts")
        moeblaze_ops.pack_experts(model, experts=lambda name, module: name.endswith(".experts"))

    Left alone: parameters that are tied, differ in shape, strides, dtype or device, are not dense, or are of a subclass of
    ``nn.Parameter``. As much memory as the largest group takes is needed on top, for a moment.

    A state dict of some of the experts, saved, takes the memory of these alone: its tensors are views of the parameters'
    memory, as always, each with a storage of its own. ``torch.save`` of a module or a parameter itself writes the block.

    Args:
        model: any module; what else is in it does not matter.
        inputs, keywords: of a call of the model.
        experts: names of ``nn.ModuleList`` or ``nn.ParameterList`` modules, with ``*``, ``?`` and ``[]`` as in the shell, or
            a function of the name and the list. For a model that is such a list itself, its name is "".

    Returns:
        Bytes that were moved: 0 where nothing is to be packed, or all is already.

    Raises:
        ValueError: neither inputs nor ``experts`` are given, or both, or ``experts`` selects no list.
        TypeError: ``model`` is no module, or ``experts`` neither a text nor a function.
    """
    if not isinstance(model, nn.Module):
        refuse_type("pack_experts", "model", "be an nn.Module", kind_of(model))
    if experts is not None and (inputs or keywords):
        refuse("pack_experts", "experts", "be None where inputs are given", kind_of(experts))
    if experts is not None:
        groups = _of_lists(model, experts)
    elif inputs or keywords:
        groups = _of_rewritten_layers(model, inputs, keywords)
    else:
        refuse("pack_experts", "experts", "name lists of experts where no inputs are given to find them with", None)
    owners = {id(p): owner for owner in model.modules() for p in owner.parameters(recurse=False)}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    packable = [group for group in groups if all(uses[id(p)] == 1 for p in group) and _are_alike(group)]
    moved = sum(_pack(group) for group in packable if not are_in_a_row(group))
    for owner in {id(owners[id(p)]): owners[id(p)] for group in packable for p in group}.values():
        if _with_own_storages not in owner._state_dict_hooks.values():
            owner.register_state_dict_post_hook(_with_own_storages)
    return moved


def _of_lists(model: nn.Module, experts: str | Callable[[str, nn.Module], bool]) -> list[list[nn.Parameter]]:
    """Parameters that correspond to each other, of all entries of each list that is selected."""
    if not isinstance(experts, str) and not callable(experts):
        refuse_type("pack_experts", "experts", "be a text or a function", kind_of(experts))
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, _LISTS)]
    select = (lambda name, module: fnmatchcase(name, experts)) if isinstance(experts, str) else experts
    selected = [module for name, module in lists if select(name, module)]
    if not selected:
        refuse("pack_experts", "experts", "select a ModuleList or ParameterList of the model", kind_of(experts))
    return [group for module in selected for group in _groups(module)]


def _groups(module: nn.ModuleList | nn.ParameterList) -> Iterator[list[nn.Parameter]]:
    if isinstance(module, nn.ParameterList):
        yield list(module)
        return
    entries = [dict(entry.named_parameters(remove_duplicate=False)) for entry in module]
    for name in entries[0] if entries else ():
        if all(name in entry for entry in entries):
            yield [entry[name] for entry in entries]


def _of_rewritten_layers(model: nn.Module, inputs: Sequence[Any], keywords: dict[str, Any]) -> list[list[nn.Parameter]]:
    """Parameters that rewritten layers read expert by expert, found by running the model with its layers rewritten."""
    from moeblaze_ops.compile import dry_run
    from moeblaze_ops.explain import one_at_a_time, unseen
    from moeblaze_ops.unchanged import unchanged

    model = getattr(model, "_orig_mod", model)
    reads = _SeparateReads({p.data_ptr(): p for p in model.parameters()})

    def observe(captured, rewritten, report) -> Callable:
        def run(*args: Any) -> Any:
            with reads:
                return rewritten(*args)

        return run

    with one_at_a_time, unchanged(model):
        dry_run(unseen(model), observe, *inputs, **keywords)
    return reads.groups


class _SeparateReads(TorchDispatchMode):
    """The parameters that our ops read expert by expert; what is no parameter as a whole, such as a cast one, is none."""

    def __init__(self, parameters: dict[int, nn.Parameter]):
        super().__init__()
        self._parameters = parameters
        self.groups: list[list[nn.Parameter]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moeblaze":
            for pieces in (pieces for groups in separate_weights(func, args) for pieces in groups):
                group = [self._parameters.get(piece.data_ptr()) for piece in pieces]
                if all(p is not None and p.numel() == piece.numel() for p, piece in zip(group, pieces, strict=True)):
                    self.groups.append(group)
        return func(*args, **(kwargs or {}))


def _are_alike(group: list[nn.Parameter]) -> bool:
    if len(group) < 2 or any(type(p) is not nn.Parameter or p.is_meta for p in group):
        return False
    layouts = {(p.shape, p.stride(), p.dtype, p.device) for p in group}
    return len(layouts) == 1 and group[0].numel() > 0 and _is_dense(group[0])


def _is_dense(tensor: Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


@torch.no_grad()
def _pack(group: list[nn.Parameter]) -> int:
    lead = group[0]
    block = lead.new_empty(len(group) * lead.numel())
    for position, parameter in enumerate(group):
        place = block.as_strided(lead.shape, lead.stride(), position * lead.numel())
        place.copy_(parameter)
        parameter.data = place
    return block.numel() * block.element_size()


def _with_own_storages(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    """Give each tensor of a state dict that is a part of a block a storage of its own, over the same memory.

    Whoever writes it to a file then writes the part, and whoever writes into it, as loaders do, writes into the parameter.
    """
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        # With keep_vars=True it is the parameter itself.
        if type(value) is Tensor and not value.requires_grad and value.untyped_storage().nbytes() > value.nbytes:
            state_dict[prefix + name] = _alone(value)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor over the memory of a dense one, whose storage is that memory and keeps all of it alive."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return torch.from_dlpack(flat).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
