"""The fake value that a node gives, and its memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves


def fake_of(node: fx.Node) -> Any:
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    return next(fake.fake_mode for fake in map(fake_of, graph.nodes) if isinstance(fake, FakeTensor))


def fake_result(mode: FakeTensorMode, target: Callable | str, args: tuple, kwargs: dict) -> Any:
    """What a function, or a method of tensors by its name, gives for arguments with nodes among them."""
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    with mode:
        return function(*fx.node.map_arg(args, fake_of), **kwargs)


def needs_gradient(node: fx.Node) -> bool:
    """True if a gradient flows through a value of the graph, or one of several, or did until it was detached in place."""
    detached = any(user.target == "detach_" for user in node.users)
    return detached or any(isinstance(fake, torch.Tensor) and fake.requires_grad for fake in tree_leaves(fake_of(node)))


def storage_of(node: fx.Node) -> int | None:
    """The memory of a tensor, which its views share; None where it has none."""
    fake = fake_of(node)
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    try:
        return fake.untyped_storage()._cdata
    except NotImplementedError:  # subclasses without storage
        return None


def has_storage(node: fx.Node) -> bool:
    """True if a tensor has memory that its aliases can be told by."""
    return storage_of(node) is not None
