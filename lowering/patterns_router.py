"""The router before a matched layer: which of the scorings of ``moeblaze::route`` made its ids and weights.

Read from the layer's two operands backwards, node by node. Only scores that are taken in fp32 are recognised, so that
the fused op changes no rounding; everything else stays as the user wrote it, which costs time and nothing more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from moeblaze_ops.lowering.match import MoEMatch
from moeblaze_ops.lowering.values import GraphView, fake_of, target_name

_SHAPES = frozenset(("view", "reshape", "flatten", "contiguous", "clone", "unsqueeze", "squeeze"))
_CASTS = frozenset(("to", "float", "type_as", "long", "int", "bfloat16", "half", "type"))
MAX_CHOICES = 32


@dataclass(frozen=True)
class RouterMatch:
    """Arguments of ``moeblaze::route`` beside the number of choices. ``logits`` is ``[..., E]``."""

    logits: fx.Node
    scoring: str
    renormalize: bool
    scale: float


class _Trail:
    """Walks backwards and remembers which nodes it passed."""

    def __init__(self) -> None:
        self.nodes: set[fx.Node] = set()

    def peel(self, node: fx.Node, accept: Callable[[fx.Node, fx.Node], bool]) -> fx.Node:
        """The first node behind ``node`` that is not a step that ``accept(step, its input)`` takes."""
        while node.op in ("call_function", "call_method") and node.args and isinstance(node.args[0], fx.Node):
            if not accept(node, node.args[0]):
                break
            self.nodes.add(node)
            node = node.args[0]
        return node


def match_router(view: GraphView, match: MoEMatch) -> RouterMatch | None:
    """The router that made the layer's ids and weights, if nobody else reads its choices."""
    if match.weights is None:
        return None
    trail = _Trail()
    choice = trail.peel(match.experts.node, _same_choices)
    topk = _topk_of(choice, 1)
    if topk is None or not _takes_largest_of_last_axis(topk, match.K):
        return None
    found = _read_weights(trail, match.weights.node, topk)
    if found is None or not isinstance(fake_of(found.logits).shape[-1], int):
        return None
    trail.nodes |= {topk, choice}
    readers = {user for node in trail.nodes for user in node.users}
    # The fused router reads the logits at the end of the layer, and saves them for the backward.
    unchanged = view.value_at(found.logits, len(view.position)) is view.value(found.logits)
    return found if unchanged and readers <= trail.nodes | set(match.region.nodes) else None


def _read_weights(trail: _Trail, weights: fx.Node, topk: fx.Node) -> RouterMatch | None:
    node = trail.peel(weights, _same_choices_or_last_cast)
    scale, renormalize = 1.0, False
    if target_name(node) in ("mul", "imul") and isinstance(node.args[1], (int, float)) and node.args[1] > 0:
        scale = float(node.args[1])
        trail.nodes.add(node)
        node = trail.peel(node.args[0], _same_choices)
    if (kept := _renormalized(trail, node)) is not None:
        renormalize = True
        node = trail.peel(kept, _same_choices)
    if target_name(node) == "softmax" and _along_last_axis(node) and fake_of(node).dtype == torch.float32:
        trail.nodes.add(node)
        values = trail.peel(node.args[0], _same_choices_or_cast_up)
        if _topk_of(values, 0) is not topk or renormalize:
            return None
        trail.nodes.add(values)
        return RouterMatch(_before_cast_up(topk.args[0]), "softmax_topk", False, scale)
    if _topk_of(node, 0) is not topk:
        return None
    trail.nodes.add(node)
    scores = topk.args[0]
    if fake_of(scores).dtype != torch.float32:
        return None
    if target_name(scores) == "softmax" and _along_last_axis(scores):
        return RouterMatch(_before_cast_up(scores.args[0]), "softmax", renormalize, scale)
    if target_name(scores) == "sigmoid":
        return RouterMatch(_before_cast_up(scores.args[0]), "sigmoid", renormalize, scale)
    return None


def _renormalized(trail: _Trail, node: fx.Node) -> fx.Node | None:
    """The numerator of ``w / w.sum(-1, keepdim=True)``."""
    if target_name(node) not in ("truediv", "itruediv", "div", "div_") or len(node.args) != 2:
        return None
    kept, total = node.args
    if not isinstance(total, fx.Node) or target_name(total) != "sum" or total.args[0] is not kept:
        return None
    dim = total.args[1] if len(total.args) > 1 else total.kwargs.get("dim")
    keepdim = total.args[2] if len(total.args) > 2 else total.kwargs.get("keepdim", False)
    if not keepdim or not _is_last(dim, kept) or total.kwargs.get("dtype") not in (None, fake_of(kept).dtype):
        return None
    trail.nodes |= {node, total}
    return kept


def _topk_of(node: fx.Node, output: int) -> fx.Node | None:
    if target_name(node) != "getitem" or node.args[1] != output:
        return None
    return node.args[0] if target_name(node.args[0]) == "topk" else None


def _takes_largest_of_last_axis(topk: fx.Node, top_k: int) -> bool:
    names = ("input", "k", "dim", "largest", "sorted")
    given = dict(zip(names, topk.args, strict=False)) | dict(topk.kwargs)
    last = _is_last(given.get("dim", -1), given["input"])
    return given["k"] == top_k <= MAX_CHOICES and last and given.get("largest", True) and given.get("sorted", True)


def _along_last_axis(softmax: fx.Node) -> bool:
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return _is_last(dim, softmax.args[0])


def _is_last(dim: int | None, node: fx.Node) -> bool:
    return dim is not None and dim in (-1, fake_of(node).dim() - 1)


def _same_choices(step: fx.Node, source: fx.Node) -> bool:
    """A reshape that keeps the K choices of a token together, or a cast between integers."""
    if target_name(step) in _CASTS:
        return not fake_of(step).is_floating_point() and not fake_of(source).is_floating_point()
    return target_name(step) in _SHAPES and _same_last_axis(step, source)


def _same_choices_or_last_cast(step: fx.Node, source: fx.Node) -> bool:
    """The same, or a cast from fp32: what the layer reads is then the cast of the router's weights."""
    if target_name(step) in _CASTS:
        return fake_of(source).dtype == torch.float32
    return _same_choices(step, source)


def _same_choices_or_cast_up(step: fx.Node, source: fx.Node) -> bool:
    return _is_cast_up(step, source) or _same_choices(step, source)


def _before_cast_up(node: fx.Node) -> fx.Node:
    """What was cast to fp32: the fused op does that itself."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return source if source is not None and _is_cast_up(node, source) else node


def _is_cast_up(step: fx.Node, source: fx.Node) -> bool:
    half = (torch.bfloat16, torch.float16)
    return target_name(step) in _CASTS and fake_of(step).dtype == torch.float32 and fake_of(source).dtype in half


def _same_last_axis(a: fx.Node, b: fx.Node) -> bool:
    shapes = fake_of(a).shape, fake_of(b).shape
    return all(shapes) and shapes[0][-1:] == shapes[1][-1:]
