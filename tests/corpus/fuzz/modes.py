"""Modes in which fuzzers run programs; some show what makes two right results differ."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moeblaze_ops.lowering.match import layer_proof
from moeblaze_ops.lowering.router import match_router


@contextlib.contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """A context in which memory is NaN until somebody writes to it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TopkOfTies(TorchDispatchMode):
    """Sees whether a top-k had a choice between equal scores, as low precision gives: any choice is right then."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.topk.default:
            scores = args[0].sort(-1, descending=True)[0][..., : args[1] + 1]
            self.found |= bool((scores.diff() == 0).any())
        return func(*args, **(kwargs or {}))


class Kinked(TorchDispatchMode):
    """Sees activations whose gradient jumps, so that a rounding decides about it."""

    _aten = torch.ops.aten
    KINKED = frozenset((_aten.relu.default, _aten.abs.default, _aten.clamp.default, _aten.clamp_min.default))
    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found |= func in self.KINKED
        return func(*args, **(kwargs or {}))


class GathersByInt64(TorchDispatchMode):
    """Gathers as they are meant: by an index in int32 that is expanded, torch 2.13 reads wrong rows on a CPU.

    So does the gradient of ``out.scatter_add(0, token.int()[:, None].expand(-1, D), y)``.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.gather.default:
            args = (*args[:2], args[2].long(), *args[3:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What the rewrite decides by the device is decided as on a GPU: routers are fused, and mixtures of all experts rewritten."""
    with (
        mock.patch.object(match_router, "breaks_ties_as_topk", lambda device: True),
        mock.patch.object(layer_proof, "gains_without_choices", lambda device: True),
    ):
        yield
