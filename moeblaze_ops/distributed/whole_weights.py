"""Modules whose sharded parameters read as whole tensors while their layer runs.

A module gets a subclass of its own class with a property for each sharded parameter. ``_parameters`` holds the DTensor, so
optimizers, ``fully_shard`` and ``state_dict`` see what is stored. Code of the layer sees ``[E, ...]``:

    stored.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

Forward gathers the weights, backward reduces and scatters their gradients: the gradient of a shard is the sum over the ranks.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_classes: dict[tuple, type] = {}


class RunningLayer:
    """How often a layer is running, and the sharded weights that it reads."""

    def __init__(self) -> None:
        self.depth = 0
        self.weights: list[WholeWeights] = []

    def start(self) -> None:
        if not torch.compiler.is_compiling():  # Dynamo lets checkpointed functions write no objects
            self.depth += 1

    def end(self) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth -= 1
        if self.depth == 0:
            for weights in self.weights:
                weights.read_so_far.clear()

    def is_running(self) -> bool:
        """Checkpointed code of the layer runs again in backward, when the layer itself does not."""
        return self.depth > 0 or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


class WholeWeights:
    """The sharded parameters of one module, and the whole of those that its layer has read since it started."""

    def __init__(self, owner: nn.Module, layer: RunningLayer) -> None:
        self.parameters = owner._parameters
        self.layer = layer
        self.read_so_far: dict[str, Tensor] = {}
        layer.weights.append(self)

    def read(self, name: str) -> Tensor:
        """All experts of a parameter, gathered once while the layer runs; a compiler joins equal gathers itself."""
        if self.layer.depth == 0 or torch.compiler.is_compiling():
            return whole_of(self.parameters[name])
        if name not in self.read_so_far:
            self.read_so_far[name] = whole_of(self.parameters[name])
        return self.read_so_far[name]


def whole_of(stored: Tensor) -> Tensor:
    """All experts of a parameter ``[E / ranks, ...]``; its gradient is the sum over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    return stored.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def is_sharded(module: nn.Module) -> bool:
    """Whether a module reads parameters as whole tensors already."""
    return "_moeblaze_weights" in module.__dict__


def read_whole(module: nn.Module, names: Iterable[str], weights: WholeWeights) -> None:
    """Let the sharded parameters ``names`` of ``module`` read as whole tensors while its layer runs, as stored otherwise."""
    module.__dict__["_moeblaze_weights"] = weights
    _subclass(module, {name: _stored_here(name) for name in names}, "stored")


def read_from_stack(module: nn.Module, keys: dict[str, str], expert: int, weights: WholeWeights) -> None:
    """Let ``module.name`` read as entry ``expert`` of the stacked parameter ``keys[name]``.

    While the layer does not run it is the entry that this rank stores, or a tensor without data for the expert of another rank.
    """
    module.__dict__["_moeblaze_weights"] = weights
    module.__dict__["_moeblaze_expert"] = expert
    _subclass(module, {name: _stored_in_stack(key) for name, key in keys.items()}, "stack", *keys.values())


def run_in_layer(module: nn.Module, layer: RunningLayer) -> None:
    """Let ``forward`` of ``module`` count as running ``layer``."""
    module.__dict__["_moeblaze_layer"] = layer
    own = module.__dict__.get("forward")
    if own is not None:
        module.__dict__["forward"] = _in_layer(own, layer)
        return
    _subclass(module, {"forward": _forward_of(type(module))}, "layer")


def has_forward(module: nn.Module) -> bool:
    """Whether a module computes something, and is no mere container."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def local_entry(stored: Tensor, expert: int) -> Tensor:
    """Entry ``expert`` of a stacked parameter where this rank stores it, else a tensor of its shape without data."""
    local = stored.to_local()
    first = first_expert(stored)
    if first <= expert < first + local.shape[0]:
        return local[expert - first]
    return torch.empty(stored.shape[1:], dtype=stored.dtype, device="meta")


def first_expert(stored: Tensor) -> int:
    """The number of the first entry that this rank stores of a parameter sharded on its first axis."""
    return stored.device_mesh.get_local_rank() * (stored.shape[0] // stored.device_mesh.size())


def _stored_here(name: str) -> property:
    def read(self: nn.Module) -> Tensor:
        weights = self._moeblaze_weights
        return weights.read(name) if weights.layer.is_running() else weights.parameters[name]

    return property(read)


def _stored_in_stack(key: str) -> property:
    def read(self: nn.Module) -> Tensor:
        weights = self._moeblaze_weights
        if weights.layer.is_running():
            return weights.read(key)[self._moeblaze_expert]
        return local_entry(weights.parameters[key], self._moeblaze_expert)

    return property(read)


def _forward_of(original: type[nn.Module]) -> Callable:
    def forward(self, *args, **kwargs):
        layer = self._moeblaze_layer
        layer.start()
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            layer.end()

    return forward


def _in_layer(function: Callable, layer: RunningLayer) -> Callable:
    def forward(*args, **kwargs):
        layer.start()
        try:
            return function(*args, **kwargs)
        finally:
            layer.end()

    return forward


def _subclass(module: nn.Module, members: dict, *kind: str) -> None:
    """Give ``module`` a class of its own kind: modules of one class and kind share it, so they compile once."""
    original = type(module)
    key = (original, *kind, *members)
    if key not in _classes:
        _classes[key] = type(original.__name__, (original,), {**members, "__module__": original.__module__})
    module.__class__ = _classes[key]
