"""Runs of a model that leave its buffers and the random number generators as they found them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def unchanged(model: Callable) -> contextlib.AbstractContextManager:
    """A context after which the buffers of ``model`` and the random number generators are what they were."""
    return as_it_is(list(model.buffers()) if isinstance(model, nn.Module) else [])


@contextlib.contextmanager
def as_it_is(values: Sequence[Any]) -> Iterator[None]:
    """A context after which the random number generators, and buffers and inputs among ``values``, are as before.

    A forward that writes to its parameters, or to what has a gradient, is not supported by autograd either.
    """
    tensors = [v for v in values if isinstance(v, Tensor) and not (v.requires_grad or v.is_meta or isinstance(v, nn.Parameter))]
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in copies:
                    # A write, even of the same numbers, would spoil a backward that needs the tensor.
                    if not torch.equal(tensor, copy):
                        tensor.copy_(copy)
