"""Paths of layers by what they store: equal layers share compiled code, which learns from its weights whose it is running."""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class StoredLayer(Protocol):
    """A layer of a model: its path, and what this rank stores of its experts now."""

    path: str

    def shards(self) -> Iterable[Tensor]: ...


layers: WeakSet[StoredLayer] = WeakSet()
_paths: dict[StorageWeakRef, str] = {}


def path_of(shard: Tensor | None) -> str:
    """The path of the layer that stores a shard; empty if none is known to, or several are.

    A storage is looked for among all layers once.
    """
    if shard is None:
        return ""
    storage = StorageWeakRef(shard.untyped_storage())
    if storage not in _paths:
        for old in [old for old in _paths if old.expired()]:
            del _paths[old]
        owners = {layer.path for layer in layers if any(StorageWeakRef(s.untyped_storage()) == storage for s in layer.shards())}
        _paths[storage] = owners.pop() if len(owners) == 1 else ""
    return _paths[storage]
