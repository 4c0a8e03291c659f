"""``shard_experts``: each expert on one rank of a mesh axis, and layers that see their experts whole."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moeblaze_ops.arguments.validation_values import kind_of, refuse_type
from moeblaze_ops.distributed.find_experts import ExpertGroup, Left, find_experts
from moeblaze_ops.distributed.replaced_parameters import note_replaced, watch_optimizers
from moeblaze_ops.distributed.state_dicts import keep_names_of_entries, load_whole
from moeblaze_ops.distributed.whole_weights import (
    RunningLayer,
    WholeWeights,
    has_forward,
    is_sharded,
    read_from_stack,
    read_whole,
    run_in_layer,
)
from moeblaze_ops.ops.sharded.hosts import prepare

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Taken:
    """A parameter that is sharded: its path, its shape over all ranks and why it was taken."""

    name: str
    shape: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class ShardedExperts:
    """What ``shard_experts`` did."""

    taken: tuple[Taken, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        lines = [f"  {t.name} {list(t.shape)}: {t.why}" for t in self.taken]
        lines += [f"  left: {left.name}: {left.why}" for left in self.left]
        return "\n".join([f"shard_experts: {len(self.taken)} parameters sharded", *lines])


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    parameters: Iterable[str] | Callable[[str, Tensor], bool] | None = None,
) -> ShardedExperts:
    """Store each expert of ``model`` on one rank of ``mesh``, in place; every rank of the mesh calls this.

    Expert parameters become DTensors ``Shard(0)``. Modules read them whole while they run, so a layer computes what it did in any
    spelling, in eager mode too: weights are gathered in forward, gradients are reduced and scattered in backward. Under
    ``torch.compile`` with rewriting, a proven layer moves tokens instead where that is fewer bytes. Call it before
    ``fully_shard`` (on another mesh axis) and before the optimizer is made, which raises otherwise; the model may be on the meta
    device.

    The gradient of an expert is the *sum* over the ranks of the axis, each with its own tokens. To train on the mean over the
    ranks, divide each rank's loss by their number. Other parameters are untouched: reduce their gradients as before. To clip all
    of them together, call ``moeblaze_ops.distributed.clip_grad_norm_``: torch's takes no DTensors beside plain tensors.

    Args:
        model: any module. Stacked experts are parameters ``[E, ...]``. A ``ModuleList`` of E equal modules is stored as one
            stacked parameter for each parameter of an entry, on the list, with dots as underscores (``experts.w1_weight``);
            names in ``state_dict`` stay those of the entries, and a rank has the entries of its own experts there.
        mesh: one axis of a device mesh, such as ``mesh["ep"]``. Rank r stores experts ``[r * E / ranks, (r + 1) * E / ranks)``
            of the values that rank 0 has.
        parameters: names of the expert parameters or of modules that have no others, or a predicate of name and parameter,
            instead of those that are found by shape: weights of two layers at least with the axis E, near a router with that
            axis.

    Returns:
        Which parameters were taken and why, and what looked like experts and was left.

    Raises:
        TypeError: the mesh is none.
        ValueError: the mesh has several axes, or not this rank. On all ranks, with one message: their number does not divide E, a
            parameter is a DTensor already, is on another type of device than the mesh, belongs to two modules, or is frozen for
            some entries of a list, the ranks have different models, or a predicate raises on one of them.
    """
    if not isinstance(model, nn.Module):
        refuse_type("shard_experts", "model", "be an nn.Module", kind_of(model))
    if not isinstance(mesh, DeviceMesh):
        refuse_type("shard_experts", "mesh", "be a DeviceMesh of one axis, such as init_device_mesh(...)['ep']", kind_of(mesh))
    if mesh.ndim != 1:
        raise ValueError(f"shard_experts: mesh must have one axis, such as mesh['ep'], got {mesh.ndim} axes")
    if mesh.get_coordinate() is None:
        raise ValueError(f"shard_experts: mesh must have this rank, got {mesh} on rank {dist.get_rank()}")
    groups, left = _agreed(lambda: _plan(model, mesh, parameters), mesh)
    prepare(mesh.get_group().group_name)
    layers: dict[str, RunningLayer] = {}
    taken = []
    for group in groups:
        taken += _shard(model, group, mesh, layers.setdefault(group.layer, RunningLayer(group.layer)))
    for path, layer in layers.items():
        if has_forward(model.get_submodule(path)):
            run_in_layer(model.get_submodule(path), layer, whole=True)
    watch_optimizers()
    report = ShardedExperts(tuple(taken), tuple(left))
    log.info("%s", report)
    return report


def _plan(
    model: nn.Module, mesh: DeviceMesh, parameters: Iterable[str] | Callable[[str, Tensor], bool] | None
) -> tuple[list[ExpertGroup], list[Left], list[str]]:
    """What to shard, and the model in words; raises where that is not possible."""
    groups, left = find_experts(model, parameters)
    uses = Counter(p for module in model.modules() for p in module._parameters.values())
    for group in groups:
        owner = model.get_submodule(group.owner)
        if any(map(is_sharded, owner.modules())):
            raise ValueError(f"shard_experts: model must not be sharded twice, got {group.owner!r} again")
        entries = list(owner) if group.listed else [owner]
        for name in group.names:
            full = f"{group.owner}.{name}" if group.owner else name
            _check_alike(full, [entry.get_parameter(name) for entry in entries], group, mesh, uses)
    return groups, left, _described(model, groups)


def _described(model: nn.Module, groups: list[ExpertGroup]) -> list[str]:
    """The model in words, which are the same on all ranks."""
    trained = {True: "", False: " frozen"}
    described = [f"{name} {list(p.shape)} {p.dtype}{trained[p.requires_grad]}" for name, p in model.named_parameters()]
    return [*described, *(f"experts {group.names} in {group.owner!r}" for group in groups)]


def _check_alike(name: str, parameters: list[nn.Parameter], group: ExpertGroup, mesh: DeviceMesh, uses: Counter) -> None:
    """Refuses the parameters of one name that are not the group's alone, or not alike; ``uses`` counts whose they are."""
    for parameter in parameters:
        _check(name, parameter, group, mesh)
    uses.update(parameters)
    if max(uses[p] for p in parameters) > 2:  # a module's, and this group's
        raise ValueError(f"shard_experts: {name} must belong to one module, got a parameter that several modules share")
    if len({p.requires_grad for p in parameters}) > 1:
        frozen = [number for number, p in enumerate(parameters) if not p.requires_grad]
        raise ValueError(f"shard_experts: {name} must be frozen for all experts or for none, got it frozen for {frozen}")


def _check(name: str, parameter: Tensor, group: ExpertGroup, mesh: DeviceMesh) -> None:
    if isinstance(parameter, DTensor):
        got = f"a DTensor with placements {parameter.placements}"
        raise ValueError(f"shard_experts: {name} must be a plain tensor (shard experts before fully_shard), got {got}")
    size = group.num_experts if group.listed else parameter.shape[0]
    ranks = mesh.size()
    if group.num_experts % ranks or size % group.num_experts:
        raise ValueError(f"shard_experts: mesh must divide the experts of {name}, got {size} over {ranks} ranks")
    if parameter.device.type not in ("meta", mesh.device_type):
        raise ValueError(f"shard_experts: {name} must be on {mesh.device_type} like the mesh, got {parameter.device}")


def _agreed(plan: Callable, mesh: DeviceMesh) -> tuple[list[ExpertGroup], list[Left]]:
    """What ``plan`` gives, if it gives the same on every rank; else one error on all of them."""
    error, text, described = None, None, []
    try:
        groups, left, described = plan()
    except ValueError as raised:
        text = str(raised)
    except Exception as raised:  # of the caller's predicate
        error = raised
        text = f"shard_experts: parameters must be chosen without an error, got {raised!r} on rank {dist.get_rank()}"
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    everyone = _of_all_ranks((digest, text), mesh)
    if error is not None:
        raise error
    if texts := [text for _, text in everyone if text is not None]:
        raise ValueError(texts[0])
    if len(set(everyone)) > 1:
        ranks, descriptions = dist.get_process_group_ranks(mesh.get_group()), _of_all_ranks(described, mesh)
        other = next(number for number, each in enumerate(descriptions) if each != descriptions[0])
        pairs = zip_longest(descriptions[0], descriptions[other], fillvalue="no more")
        one, two = next(pair for pair in pairs if pair[0] != pair[1])
        got = f"{one} on rank {ranks[0]} and {two} on rank {ranks[other]}"
        raise ValueError(f"shard_experts: model must have the same parameters on every rank, got {got}")
    return groups, left


def _of_all_ranks(value: object, mesh: DeviceMesh) -> list:
    everyone: list = [None] * mesh.size()
    try:
        dist.all_gather_object(everyone, value, group=mesh.get_group())
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(mesh.get_group())
        rule = f"be the same on all of its ranks {ranks}, which all call shard_experts"
        raise RuntimeError(f"shard_experts: mesh must {rule}, got {error}") from error
    return everyone


def _shard(model: nn.Module, group: ExpertGroup, mesh: DeviceMesh, layer: RunningLayer) -> list[Taken]:
    owner = model.get_submodule(group.owner)

    def distributed(tensor: Tensor, like: Tensor) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]), requires_grad=like.requires_grad)

    taken = []
    if group.listed:
        stacks = {}
        for name in group.names:
            key = name.replace(".", "_")
            entries = [entry.get_parameter(name) for entry in owner]
            parameter = distributed(torch.stack([entry.detach() for entry in entries]), entries[0])
            for number, entry in enumerate(entries):
                note_replaced(entry, f"{group.owner}.{number}.{name}")
            stacks[name] = key
            owner.register_parameter(key, parameter)
            taken.append(Taken(f"{group.owner}.{key}", tuple(parameter.shape), group.why))
        _replace_entries(owner, stacks, WholeWeights(owner, stacks.values(), layer))
        keep_names_of_entries(owner, stacks)
    else:
        for name in group.names:
            stored = owner._parameters[name]
            owner._parameters[name] = distributed(stored.detach(), stored)
            full = f"{group.owner}.{name}" if group.owner else name
            note_replaced(stored, full)
            taken.append(Taken(full, tuple(stored.shape), group.why))
        read_whole(owner, group.names, WholeWeights(owner, group.names, layer))
        load_whole(owner, group.names)
    if has_forward(owner) and group.owner != group.layer:
        run_in_layer(owner, layer, whole=False)
    return taken


def _replace_entries(experts: nn.ModuleList, stacks: dict[str, str], weights: WholeWeights) -> None:
    """Take the parameters out of the entries, and let them read as entries of the stacks."""
    for number, entry in enumerate(experts):
        by_module: dict[nn.Module, dict[str, str]] = {}
        for name, key in stacks.items():
            inside, _, own = name.rpartition(".")
            holder = entry.get_submodule(inside)
            del holder._parameters[own]
            by_module.setdefault(holder, {})[own] = key
        for holder, keys in by_module.items():
            read_from_stack(holder, keys, number, weights)
