"""The router before a matched layer: which of the scorings of ``moeblaze::route`` made its ids and weights, or its weights alone.

Read from what the layer's two operands hold, by whatever operators and views that was made; `expert_choice` reads what the
choice goes by where that is not the scores themselves. Only scores that are taken in fp32 are recognised, so that the fused op
changes no rounding; everything else stays as the user wrote it, which costs time and nothing more.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from moeblaze_ops import config
from moeblaze_ops.arguments.validation_calls import MAX_TOP_K
from moeblaze_ops.kernels.configs import SIGMOID_EPS
from moeblaze_ops.lowering.forms.views import is_scattered_over
from moeblaze_ops.lowering.graph.dependencies import own_dependencies
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.graph.sizes import same_shape
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.router.expert_choice import Choice, is_sorted, largest, read_choice

_HALF = (torch.bfloat16, torch.float16)
_NEGLIGIBLE = 1e-12
"""Below half the distance of fp32 numbers at 1 / 4096, the least that the largest of all probabilities can be."""


@dataclass(frozen=True)
class RouterMatch:
    """Arguments of ``moeblaze::route`` beside the number of choices. ``logits`` is ``[..., E]``.

    given: the ids that the scores are taken at, where no choice of this router made them: ``moeblaze::route_at``.
    shared: the chosen ids, where others read them as well; they then come from the fused router, too.
    """

    logits: fx.Node
    scoring: str
    renormalize: bool
    scale: float
    choice: Choice = Choice()
    given: fx.Node | None = None
    shared: fx.Node | None = None

    @property
    def last_source(self) -> fx.Node:
        """The later one of what the fused router reads."""
        bias = self.choice.bias
        return self.logits if bias is None or bias < self.logits else bias


def match_router(view: GraphView, match: MoEMatch) -> RouterMatch | None:
    """The router that made the layer's ids and weights, or the weights of ids that something else made.

    weights, ids = logits.softmax(-1).topk(2)     # ``route``; others may read the ids, but nothing else of what it replaces
    weights = logits.softmax(-1).gather(1, ids)   # ``route_at``, whatever the ids are: recorded ones, or by a hash
    """
    weights, experts = match.weights, match.experts
    if weights is None or weights.rest or weights.detached or experts is None or experts.rest:
        return None
    if weights.spread or experts.spread or not breaks_ties_as_topk(fake_of(match.x.node).device):
        return None
    scores, ids = (view.value_at(operand.node, view.position[match.root]) for operand in (weights, experts))
    ids = _behind(ids, _same_order)
    topk = largest(ids, 1)
    if weights.gathered:
        scores = _scattered(scores, ids, turned=weights.turned) if topk is not None else None
    if scores is None or not ids.shape or ids.shape[-1] != match.K or match.K > MAX_TOP_K:
        return None
    read = _Reader(view, ids, topk).read(scores)
    logits, chosen = None if read is None else _held(view, _before_cast_up(read.logits)), _held(view, ids)
    if logits is None or chosen is None or not isinstance(read.logits.shape[-1], int):
        return None
    found = RouterMatch(logits, read.scoring, read.renormalize, read.scale, read.choice)
    bias = read.choice.bias
    # The fused router reads them at the end of the layer, and saves the logits for the backward.
    if read.choice.reachable(read.logits.shape[-1]) < match.K or (bias is not None and not _stays(view, bias)):
        return None
    sources = {read.scores.node, chosen if topk is None else topk.args[0]}
    own = _between(view, {weights.node, experts.node}, sources)
    read_by_others = {node for node in own if not (own | set(match.region.nodes)).issuperset(node.users)}
    if topk is None:
        fits = ids.dtype == torch.int64 and same_shape(ids.shape[:-1], read.logits.shape[:-1])  # gather takes no others
        return replace(found, given=chosen) if fits and read_by_others <= _integers(own) else None
    if not read_by_others:
        return found
    gives_all = read_by_others <= _integers(own) and is_sorted(topk) and _can_stand_early(view, own, found, chosen)
    return replace(found, shared=chosen) if gives_all else None


def breaks_ties_as_topk(device: torch.device) -> bool:
    """True if the lower id between equal scores is right, as the fused router has it. ``torch.topk`` takes any on a CPU.

    With ``config.batch_invariant`` the fused router runs there, too: its softmax depends on no other token.
    """
    return device.type != "cpu" or config.batch_invariant


def _stays(view: GraphView, node: fx.Node) -> bool:
    """True if nothing in the whole graph writes to what a node gave, by whatever alias."""
    return view.value_at(node, len(view.position)) is view.value(node)


def _held(view: GraphView, value: Value) -> fx.Node | None:
    """A node that holds a value from the beginning to the end."""
    tensors = (node for node in view.position if isinstance(fake_of(node), torch.Tensor))
    return next((node for node in tensors if view.value(node) is value and _stays(view, node)), None)


def _between(view: GraphView, ends: Collection[fx.Node], sources: Collection[fx.Node]) -> set[fx.Node]:
    """What is computed from ``sources`` on the way to ``ends``, the ends among it."""
    reached = set(sources)
    for node in sorted(own_dependencies(view, ends, sources, without=()), key=view.position.__getitem__):
        if isinstance(fake_of(node), torch.Tensor | tuple | list) and not reached.isdisjoint(view.reads[node]):
            reached.add(node)
    return reached.difference(sources)


def _integers(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """The chosen ids in whatever shape or type."""
    fakes = {node: fake_of(node) for node in nodes}
    return {node for node, fake in fakes.items() if isinstance(fake, torch.Tensor) and not fake.is_floating_point()}


def _can_stand_early(view: GraphView, own: set[fx.Node], router: RouterMatch, chosen: fx.Node) -> bool:
    """True if a fused router right behind what it reads has a gradient, and ids in the place of those that others read."""
    place, ids = router.last_source, fake_of(chosen)
    if place.op not in ("call_function", "call_method") or view.is_without_gradient(place):
        return False
    return all(_stays(view, node) for node in _integers(own)) and ids.is_contiguous() and ids.dtype == torch.int64


@dataclass(frozen=True)
class _Read:
    """A scoring of ``logits``; ``scores`` are what is chosen from."""

    logits: Value
    scores: Value
    scoring: str
    renormalize: bool
    scale: float
    choice: Choice = Choice()


class _Reader:
    """Reads the weights of ``ids``: of what ``topk`` chose, or of ids that are given."""

    def __init__(self, view: GraphView, ids: Value, topk: fx.Node | None):
        self._view, self._ids, self._topk = view, ids, topk
        self._chosen_from = None if topk is None else view.value_at(topk.args[0], view.position[topk])

    def read(self, weights: Value) -> _Read | None:
        weights = _behind(weights, _same_order_or_last_cast)
        if not same_shape(weights.shape, self._ids.shape):
            return None
        weights, scale = _with_number(weights, "mul") or (weights, 1.0)
        kept, eps = _renormalized(_behind(weights, _same_choices)) or (weights, None)
        kept = _behind(kept, _same_choices)
        if scale <= 0:
            return None
        if (found := self._scored(kept)) is not None:
            return self._last(kept.dtype, *found, scale, eps)
        scores = self._values(kept)
        if scores is not None:
            choice: Choice | None = Choice()
        elif (scores := self._taken(kept)) is not None:
            choice = Choice() if self._topk is None else read_choice(self._view, self._topk, scores)
        found = None if scores is None or choice is None or scores.dtype != torch.float32 else self._scored(scores)
        if found is None:
            return None
        scoring, logits = found
        if scoring == "softmax":
            # What is not chosen by its score may have no probability but what is added. And it scores groups in another way.
            unsure = self._topk is None or choice.bias is not None
            allowed = eps is None or (0 <= eps < _NEGLIGIBLE and not (eps and unsure))
        else:
            allowed = eps in (None, 0, SIGMOID_EPS)
        if not allowed or (choice.num_groups > 1 and scoring != "sigmoid"):
            return None
        return _Read(logits, scores, scoring, eps is not None, float(scale), choice)

    def _last(self, dtype: torch.dtype, scoring: str, values: Value, scale: float, eps: float | None) -> _Read | None:
        """The scoring of the chosen logits alone. Half precision has to be rounded once, at the end."""
        values = _behind(values, lambda step, source: _same_choices(step, source) or _is_cast_up(step, source))
        logits = self._values(values) if self._topk is not None else self._taken(values)
        once = scale == 1 and eps is None
        allowed = eps in ((None, 0, SIGMOID_EPS) if scoring == "sigmoid" else (None,))
        if logits is None or not allowed or not (dtype == torch.float32 or (once and dtype in _HALF)):
            return None
        return _Read(logits, logits, "softmax_topk" if scoring == "softmax" else scoring, eps is not None, float(scale))

    def _scored(self, scores: Value) -> tuple[str, Value] | None:
        """The function that gave scores, and of what."""
        if scores.op == "pointwise" and scores.args[0] == "sigmoid":
            return "sigmoid", scores.args[1][0]
        last = len(scores.shape) - 1
        if scores.op == "softmax":
            return ("softmax", scores.args[0]) if scores.args[1] == last else None
        node = scores.node
        if scores.op != "opaque" or scores is not self._view.opaque(node):  # else it was written to
            return None
        if target_name(node) != "softmax" or not node.args or self._view.is_without_gradient(node):
            return None
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return ("softmax", self._view.value_at(node.args[0], self._view.position[node])) if dim in (-1, last) else None

    def _values(self, values: Value) -> Value | None:
        """What the top-k chose from, if these are what it chose."""
        is_own = self._topk is not None and largest(values, 0) is self._topk and not self._view.is_without_gradient(self._topk)
        return self._chosen_from if is_own else None

    def _taken(self, values: Value) -> Value | None:
        """The scores that are gathered by the ids."""
        if values.op != "take":
            return None
        scores, dim, index = values.args
        return scores if dim == len(scores.shape) - 1 and _behind(index, _same_choices) is self._ids else None


def _scattered(scores: Value, ids: Value, *, turned: bool) -> Value | None:
    """The weights that are scattered to the ids, among zeros."""
    scores = _behind(scores, _same_order_or_last_cast)
    if turned:
        if scores.op != "permute" or scores.args[1] != (1, 0):
            return None
        scores = _behind(scores.args[0], _same_order_or_last_cast)
    if not is_scattered_over(scores, 0) or scores.args[1] != len(scores.shape) - 1:
        return None
    return scores.args[3] if _behind(scores.args[2], _same_choices) is ids else None


def _renormalized(weights: Value) -> tuple[Value, float] | None:
    """The numerator of ``w / (w.sum(-1, keepdim=True) + eps)``, and eps."""
    if weights.op != "pointwise" or weights.args[0] != "div":
        return None
    kept, total = weights.args[1]
    total, eps = _with_number(total, "add") or (total, 0)
    if not same_shape(total.shape, (*kept.shape[:-1], 1)) or not same_shape(kept.shape, weights.shape):
        return None
    total = _behind(total, _same_order)
    is_sum = total.op == "sum" and total.args[:2] == (kept, (len(kept.shape) - 1,)) and total.dtype == kept.dtype
    return (kept, eps) if is_sum else None


def _with_number(value: Value, name: str) -> tuple[Value, float] | None:
    """What is multiplied by one number, or added to one, and the number."""
    if value.op != "pointwise" or value.args[0] != name:
        return None
    for rest, number in (value.args[1], value.args[1][::-1]):
        if number.op == "full" and isinstance(number.args[0], int | float) and same_shape(rest.shape, value.shape):
            return rest, number.args[0]
    return None


_Step: TypeAlias = Callable[[Value, Value], bool]


def _behind(value: Value, takes: _Step) -> Value:
    """The first value behind one that is not a step that ``takes(step, its input)`` is true of."""
    while value.op in ("reshape", "cast") and takes(value, value.args[0]):
        value = value.args[0]
    return value


def _same_order(step: Value, source: Value) -> bool:
    """Any reshape, or a cast between integers: the layer flattens its choices anyway."""
    return step.op == "reshape" or not (step.dtype.is_floating_point or source.dtype.is_floating_point)


def _same_choices(step: Value, source: Value) -> bool:
    """A reshape that keeps the K choices of a token together, or a cast between integers."""
    together = bool(step.shape and source.shape) and same_shape(step.shape[-1:], source.shape[-1:])
    return _same_order(step, source) and (step.op == "cast" or together)


def _same_order_or_last_cast(step: Value, source: Value) -> bool:
    """Any reshape, or a cast from fp32: what the layer reads is then the cast of the router's weights."""
    return _same_order(step, source) or source.dtype == torch.float32


def _is_cast_up(step: Value, source: Value) -> bool:
    return step.op == "cast" and step.dtype == torch.float32 and source.dtype in _HALF


def _before_cast_up(value: Value) -> Value:
    """What was cast to fp32: the fused op does that itself."""
    return value.args[0] if value.op == "cast" and _is_cast_up(value, value.args[0]) else value
