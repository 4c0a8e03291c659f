"""Modules whose sharded parameters read as whole tensors while their layer runs.

A module gets a subclass of its own class with a property for each sharded parameter. ``_parameters`` holds the DTensor, so
optimizers, ``fully_shard`` and ``state_dict`` see what is stored. Code of the layer sees ``[E, ...]``:

    stored.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

Forward gathers the weights, backward reduces and scatters their gradients: the gradient of a shard is the sum over the ranks.

In eager mode that happens for all weights of a layer together: once when it starts, and once in backward, whatever it reads. A
rank that skips its experts, because no token chose one, does what the others do. So it does where Dynamo cannot capture a layer
whole: it starts and ends as written, and the pieces of its code are compiled in between. The hosts meet before weights travel, so
a rank that skips the layer is named, and its weights are not taken for those of another one.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._pytree import tree_leaves, tree_map_only

# A graph from a compiler's cache calls these ops without anything having rewritten the layer.
from moeblaze_ops.ops.sharded import experts_over_ranks as _experts_over_ranks  # noqa: F401
from moeblaze_ops.ops.sharded.gathered_weights import gathered, whole_of
from moeblaze_ops.ops.sharded.no_tokens import any_number, of_any_number, settled
from moeblaze_ops.ops.sharded.stored_layers import layers

Member = tuple[str, Callable, tuple]
"""Of a class that is made: a name, and the function that makes it of the original class and these arguments."""


class RunningLayer:
    """How often the layer at a path of the model is running, and the sharded weights that it reads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.depth = 0
        self.weights: list[WholeWeights] = []
        layers.add(self)

    def shards(self) -> Iterator[Tensor]:
        """What this rank stores of the layer's experts now."""
        for stored in (weights.parameters[name] for weights in self.weights for name in weights.names):
            yield stored.to_local().detach() if isinstance(stored, DTensor) else stored

    def run(self, function: Callable, /, *args: object, **kwargs: object) -> object:
        """Call ``function`` as the layer, or as a part of it.

        Dynamo traces a call of this in a larger frame; as a frame of its own it runs as written, and ``function`` is compiled.
        """
        if torch.compiler.is_compiling():  # Dynamo lets checkpointed functions write no objects
            return _as_with_tokens(function, args, kwargs)
        self.depth += 1
        try:
            whole = self.gather()
            result = function(*args, **kwargs)
            return tied(result, whole, (args, kwargs)) if whole and torch.is_grad_enabled() else result
        finally:
            self.depth -= 1
            if self.depth == 0:
                for weights in self.weights:
                    weights.whole.clear()

    def gather(self) -> list[Tensor]:
        """All weights of the layer, but for those that ``fully_shard`` unshards for a part of it: they are gathered there."""
        here = [(w, name) for w in self.weights for name in w.names if name not in w.whole]
        here = [(w, name) for w, name in here if w.parameters[name].device_mesh.ndim == 1]
        if not here:
            return []
        stored = [weights.parameters[name] for weights, name in here]
        mesh, shards = stored[0].device_mesh, [each.to_local() for each in stored]
        group = mesh.get_group().group_name
        everyone = gathered(shards, mesh.size(), group)
        for (weights, name), whole in zip(here, everyone, strict=True):
            weights.whole[name] = whole
        return list(everyone)

    def is_running(self) -> bool:
        """Checkpointed code of the layer runs again in backward, when the layer itself does not."""
        return self.depth > 0 or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


class WholeWeights:
    """The sharded parameters of one module, and the whole of each while its layer runs."""

    def __init__(self, owner: nn.Module, names: Iterable[str], layer: RunningLayer) -> None:
        self.parameters = owner._parameters
        self.names = tuple(names)
        self.layer = layer
        self.whole: dict[str, Tensor] = {}
        layer.weights.append(self)

    def read(self, name: str) -> Tensor:
        """All experts of a parameter, gathered once while the layer runs; the rewriter joins the gathers of a graph."""
        if torch.compiler.is_compiling():
            return self.whole[name] if name in self.whole else whole_of(self.parameters[name])
        if self.layer.depth == 0:
            return whole_of(self.parameters[name])
        if name not in self.whole:
            self.whole[name] = whole_of(self.parameters[name])
        return self.whole[name]


def _as_with_tokens(function: Callable, args: tuple, kwargs: dict) -> object:
    """Have a layer without tokens traced as one with tokens, or ranks would not do the same."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    empty = [each for each in tensors if guard_or_false(each.numel() == 0)]
    if not empty:
        return function(*args, **kwargs)
    number = any_number(empty[0].detach())
    args, kwargs = tree_map_only(Tensor, lambda each: of_any_number(each, number), (args, kwargs))
    return tree_map_only(Tensor, lambda each: settled(each, number), function(*args, **kwargs))


class _Tied(torch.autograd.Function):
    """A copy of a result through which backward reaches tensors that it was not computed from.

    Backward begins with something that forward has saved: where the layer is checkpointed, it runs again there on every rank.
    """

    @staticmethod
    def forward(ctx, result: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        ctx.save_for_backward(result.new_empty(0))
        return result.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        _ = ctx.saved_tensors
        return gradient, *(None,) * ctx.count


def tied(result: object, whole: list[Tensor], inputs: object) -> object:
    """Let backward reach ``whole``, and what needs a gradient among the inputs, through a result."""
    others = [each for each in (*whole, *tree_leaves(inputs)) if isinstance(each, Tensor) and each.requires_grad]

    def tie(tensor: Tensor) -> Tensor:
        return _Tied.apply(tensor, *others) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, tie, result) if others else result


def is_sharded(module: nn.Module) -> bool:
    """True if a module reads parameters as whole tensors already."""
    return "_moeblaze_weights" in module.__dict__


def read_whole(module: nn.Module, names: Iterable[str], weights: WholeWeights) -> None:
    """Let the sharded parameters ``names`` of ``module`` read as whole tensors while its layer runs, as stored otherwise."""
    module.__dict__["_moeblaze_weights"] = weights
    add_members(module, ((name, _stored_here, (name,)) for name in names))


def read_from_stack(module: nn.Module, keys: dict[str, str], expert: int, weights: WholeWeights) -> None:
    """Let ``module.name`` read as entry ``expert`` of the stacked parameter ``keys[name]``.

    While the layer does not run it is the entry that this rank stores, or a tensor without data for the expert of another rank.
    """
    module.__dict__["_moeblaze_weights"] = weights
    module.__dict__["_moeblaze_expert"] = expert
    add_members(module, ((name, _stored_in_stack, (key,)) for name, key in keys.items()))


def run_in_layer(module: nn.Module, layer: RunningLayer, whole: bool) -> None:
    """Let ``forward`` of ``module`` count as running ``layer``: the whole of it, or a part."""
    module.__dict__["_moeblaze_layer"] = layer
    members: list[Member] = [("_moeblaze_is_layer", _told, (whole,))]
    own = module.__dict__.get("forward")
    if own is None:
        members.append(("forward", _forward_of, ()))
    else:
        module.__dict__["forward"] = functools.partial(layer.run, own)
    add_members(module, members)


def has_forward(module: nn.Module) -> bool:
    """True if a module computes something, and is no mere container."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def expert_axis(stored: DTensor) -> int:
    """The axis of a parameter's mesh over which ``shard_experts`` spread its experts; ``fully_shard`` adds others."""
    return stored.placements.index(Shard(0))


def own_experts(stored: DTensor) -> range:
    """The experts of a parameter that this rank stores, or shares on the mesh axes of ``fully_shard``."""
    mesh, axis = stored.device_mesh, expert_axis(stored)
    count = stored.shape[0] // mesh.size(axis)
    return range(mesh.get_local_rank(axis) * count, (mesh.get_local_rank(axis) + 1) * count)


def _local_entry(stored: DTensor, expert: int) -> Tensor:
    """Entry ``expert`` of a stacked parameter where this rank stores it, else a tensor of its shape without data.

    It is a DTensor where ``fully_shard`` has sharded the entries on other axes.
    """
    own, local, mesh, axis = own_experts(stored), stored.to_local(), stored.device_mesh, expert_axis(stored)
    if expert not in own or len(own) != len(local):
        return torch.empty(stored.shape[1:], dtype=stored.dtype, device="meta")
    entry = local[own.index(expert)]
    others = [number for number in range(mesh.ndim) if number != axis]
    if not others:
        return entry
    placements = [Shard(p.dim - 1) if p.is_shard() else p for p in (stored.placements[number] for number in others)]
    mesh = mesh[tuple(mesh.mesh_dim_names[number] for number in others)]
    return DTensor.from_local(entry, mesh, placements, run_check=False, shape=stored.shape[1:], stride=stored.stride()[1:])


def _stored_here(original: type[nn.Module], name: str) -> property:
    def read(self: nn.Module) -> Tensor:
        weights = self._moeblaze_weights
        return weights.read(name) if weights.layer.is_running() else weights.parameters[name]

    return property(read)


def _stored_in_stack(original: type[nn.Module], key: str) -> property:
    def read(self: nn.Module) -> Tensor:
        weights = self._moeblaze_weights
        if weights.layer.is_running():
            return weights.read(key)[self._moeblaze_expert]
        return _local_entry(weights.parameters[key], self._moeblaze_expert)

    return property(read)


def _told(original: type[nn.Module], value: bool) -> bool:
    return value


def _forward_of(original: type[nn.Module]) -> Callable:
    def forward(self, *args, **kwargs):
        return self._moeblaze_layer.run(original.forward, self, *args, **kwargs)

    return forward


def add_members(module: nn.Module, members: Iterable[Member]) -> None:
    """Give ``module`` a class of its own with more members: modules of one class and members share it, so they compile once."""
    original, before = vars(type(module)).get("_moeblaze_made", (type(module), ()))
    module.__class__ = _subclass(original, (*before, *members))


@functools.cache
def _subclass(original: type[nn.Module], members: tuple[Member, ...]) -> type[nn.Module]:
    made = {name: make(original, *arguments) for name, make, arguments in members}
    about = {"__module__": original.__module__, "__qualname__": original.__qualname__, "_moeblaze_made": (original, members)}
    return type(original.__name__, (original,), {**made, **about, "__reduce_ex__": _reduce})


def _reduce(self: nn.Module, protocol: int) -> tuple:
    """A copy, or a process that unpickles it, makes the class anew."""
    original, members = type(self)._moeblaze_made
    _, _, *state = original.__reduce_ex__(self, max(protocol, 2))
    return _unpickled, (original, members), *state


def _unpickled(original: type[nn.Module], members: tuple[Member, ...]) -> nn.Module:
    made = _subclass(original, members)
    return made.__new__(made)
