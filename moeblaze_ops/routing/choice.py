"""The calls in which a router chooses experts: ``torch.topk`` of scores by token, and ``moeblaze_ops.route``.

A choice turns scores ``[..., W]`` into K values and K ids for each token. It can be taken at given ids instead: the values are
then the scores at these ids, and so their gradient reaches the router.

    weights, ids = scores.softmax(-1).topk(K, dim=-1)        # a choice; at ids of one's own: scores.softmax(-1).gather(-1, ids)
    groups = scores.view(T, 8, -1).amax(-1).topk(4).indices  # one as well, of groups
    best = scores.topk(K, dim=0)                             # none: of tokens
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moeblaze_ops.ops.route_at import route_at as _weights_at

_TOPK = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class Choice:
    """One call that chooses; ``width`` is the number of what it chooses from."""

    ids: Tensor
    width: int

    @property
    def ids_TK(self) -> Tensor:
        return self.ids.reshape(-1, self.ids.shape[-1])


class Watch(TorchFunctionMode):
    """A mode in which every choice is shown to ``notice``, and taken at the ids that this returns, if it returns some.

    The innermost of several decides. ``route`` looks for these modes by itself: Dynamo shows them functions of torch only.
    """

    def notice(self, choice: Choice) -> Tensor | None:
        raise NotImplementedError

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        scores = _chosen_from(func, args, kwargs)
        if scores is None:
            return result
        ids = self.notice(Choice(result[1], scores.shape[-1]))
        if ids is None:
            return result
        values = scores.gather(-1, ids)
        if "out" in kwargs:
            result[0].copy_(values)
            result[1].copy_(ids)
            return result
        return torch.return_types.topk((values, ids))

    def watch_route(self, logits: Tensor, options: dict[str, Any], result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids = self.notice(Choice(result[1], logits.shape[-1]))
        return result if ids is None else route_at(logits, ids, **options)


def _chosen_from(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The scores of which a call chooses the largest along the last axis, or None if it does not."""
    if func not in _TOPK:
        return None
    scores = args[0] if args else kwargs["input"]
    options = {"dim": -1, "largest": True} | dict(zip(("k", "dim", "largest"), args[1:], strict=False)) | kwargs
    along_last = options["dim"] in (-1, scores.dim() - 1)
    return scores if along_last and options["largest"] and scores.dim() >= 2 else None


def route_at(logits: Tensor, ids: Tensor, *, scoring: str, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What ``route`` returns where it chooses ``ids``, in int64; what only guides the choice has no say."""
    shape = ids.shape
    weights_TK = _weights_at(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1, shape[-1]), scoring, renormalize, scale)
    return weights_TK.view(shape), ids.to(torch.int32)
