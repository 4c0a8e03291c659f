"""The router before a matched layer: which of the scorings of ``moeblaze::route`` made its ids and weights, or its weights alone.

Read from the layer's two operands backwards, node by node; `expert_choice` reads what the choice goes by where that
is not the scores themselves. Only scores that are taken in fp32 are recognised, so that the fused op changes no
rounding; everything else stays as the user wrote it, which costs time and nothing more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from moeblaze_ops import config
from moeblaze_ops.arguments.validation_calls import MAX_TOP_K
from moeblaze_ops.kernels.configs import SIGMOID_EPS
from moeblaze_ops.lowering.forms.views import is_scattered_over
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, target_name
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.router.expert_choice import Choice, read_choice

_SHAPES = frozenset(("view", "reshape", "flatten", "contiguous", "clone", "unsqueeze", "squeeze"))
_CASTS = frozenset(("to", "float", "type_as", "long", "int", "bfloat16", "half", "type"))
_HALF = (torch.bfloat16, torch.float16)
_NARROW = (*_HALF, torch.float32)
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


class _Trail:
    """Walks backwards and remembers which nodes it passed, and which it started from."""

    def __init__(self) -> None:
        self.nodes: set[fx.Node] = set()
        self.sources: set[fx.Node] = set()

    @property
    def ids(self) -> set[fx.Node]:
        """Of the nodes, those that are the chosen ids in another shape or type."""
        fakes = {node: fake_of(node) for node in self.nodes}
        return {node for node, fake in fakes.items() if isinstance(fake, torch.Tensor) and not fake.is_floating_point()}

    def peel(self, node: fx.Node, accept: Callable[[fx.Node, fx.Node], bool]) -> fx.Node:
        """The first node behind ``node`` that is not a step that ``accept(step, its input)`` takes."""
        while node.op in ("call_function", "call_method") and node.args and isinstance(node.args[0], fx.Node):
            if not accept(node, node.args[0]):
                break
            self.nodes.add(node)
            node = node.args[0]
        return node


def match_router(view: GraphView, match: MoEMatch) -> RouterMatch | None:
    """The router that made the layer's ids and weights, or the weights of ids that something else made.

    weights, ids = logits.softmax(-1).topk(2)     # ``route``; others may read the ids, but nothing else of what it replaces
    weights = logits.softmax(-1).gather(1, ids)   # ``route_at``, whatever the ids are: recorded ones, or by a hash
    """
    if match.weights is None or match.weights.rest or match.experts is None or match.experts.rest:
        return None
    if not breaks_ties_as_topk(fake_of(match.x.node).device):
        return None
    trail = _Trail()
    choice = trail.peel(match.experts.node, _same_order)
    topk = _topk_of(choice, 1)
    if topk is None:
        return _match_given(view, trail, match, choice)
    if not _takes_largest_of_last_axis(topk, match.K):
        return None
    if match.weights.gathered:
        found = _read_scattered(view, trail, match.weights, topk, choice)
    else:
        found = _read_weights(view, trail, match.weights.node, topk, choice)
    if found is None or not _reaches_logits(view, trail):
        return None
    if not isinstance(fake_of(found.logits).shape[-1], int):
        return None
    if found.choice.reachable(fake_of(found.logits).shape[-1]) < match.K:
        return None
    # The fused router reads them at the end of the layer, and saves the logits for the backward.
    sources = {found.logits, *([found.choice.bias] if found.choice.bias else []), *trail.sources}
    if not _stay_unwritten(view, sources):
        return None
    own = trail.nodes | {topk, choice}
    read_by_others = {node for node in own if not (own | set(match.region.nodes)).issuperset(node.users)}
    if not read_by_others:
        return found
    gives_all = read_by_others <= trail.ids | {choice} and _can_stand_early(view, trail, found, choice)
    return replace(found, shared=choice) if gives_all else None


def _stay_unwritten(view: GraphView, nodes: set[fx.Node]) -> bool:
    """Whether nothing in the whole graph writes to what these nodes gave, by whatever alias."""
    return all(view.value_at(node, len(view.position)) is view.value(node) for node in nodes)


def _can_stand_early(view: GraphView, trail: _Trail, router: RouterMatch, chosen: fx.Node) -> bool:
    """Whether a fused router right behind what it reads has a gradient, and ids in the place of those that others read."""
    place, ids = router.last_source, fake_of(chosen)
    if place.op not in ("call_function", "call_method") or view.is_without_gradient(place):
        return False
    return _stay_unwritten(view, trail.ids | {chosen}) and ids.is_contiguous() and ids.dtype == torch.int64


def _match_given(view: GraphView, trail: _Trail, match: MoEMatch, ids: fx.Node) -> RouterMatch | None:
    """The weights of ids that are no choice of this router."""
    shape = fake_of(ids).shape
    if match.weights.gathered or not shape or shape[-1] != match.K or match.K > MAX_TOP_K:
        return None
    if fake_of(ids).dtype != torch.int64:  # gather takes no others
        return None
    found = _read_weights(view, trail, match.weights.node, None, ids)
    if found is None or not _reaches_logits(view, trail):
        return None
    if not isinstance(fake_of(found.logits).shape[-1], int) or fake_of(found.logits).shape[:-1] != shape[:-1]:
        return None
    if not _stay_unwritten(view, {found.logits, ids, *trail.sources, *trail.ids}):
        return None
    scored = trail.nodes - trail.ids
    readers = {user for node in scored for user in node.users}
    return replace(found, given=ids) if readers <= scored | set(match.region.nodes) else None


def breaks_ties_as_topk(device: torch.device) -> bool:
    """Whether the lower id between equal scores is right, as the fused router has it. ``torch.topk`` takes any on a CPU.

    With ``config.batch_invariant`` the fused router runs there, too: its softmax depends on no other token.
    """
    return device.type != "cpu" or config.batch_invariant


def _reaches_logits(view: GraphView, trail: _Trail) -> bool:
    """Whether the gradient of the weights gets through to the logits, as that of the fused router does."""
    steps = (node.args[0] if target_name(node) == "getitem" else node for node in (*trail.nodes, *trail.sources))
    return not any(map(view.is_without_gradient, steps))


def _read_weights(view: GraphView, trail: _Trail, weights: fx.Node, topk: fx.Node | None, chosen: fx.Node) -> RouterMatch | None:
    """The scoring that made the weights of ``chosen``: what ``topk`` chose, or ids that are given."""
    node = trail.peel(weights, _same_order_or_last_cast)
    if fake_of(node).shape != fake_of(chosen).shape:
        return None
    scale, eps = 1.0, None
    if target_name(node) in ("mul", "imul") and isinstance(node.args[1], (int, float)) and node.args[1] > 0:
        scale = float(node.args[1])
        trail.nodes.add(node)
        node = trail.peel(node.args[0], _same_choices)
    if (divided := _renormalized(trail, node)) is not None:
        kept, eps = divided
        node = trail.peel(kept, _same_choices)
    scoring = _scoring_of_chosen(node, once=scale == 1 and eps is None)
    if scoring is not None:
        trail.nodes.add(node)
        values = trail.peel(node.args[0], _same_choices_or_cast_up)
        if eps not in ((None, 0, SIGMOID_EPS) if scoring == "sigmoid" else (None,)):
            return None
        if topk is None:
            logits = _gathered_by(trail, values, chosen)
        else:
            logits = topk.args[0] if _topk_of(values, 0) is topk else None
        if logits is None:
            return None
        trail.nodes.add(values)
        trail.sources.add(logits)
        return RouterMatch(_before_cast_up(logits), scoring, eps is not None, scale)
    if topk is not None and _topk_of(node, 0) is topk:
        scores, choice = topk.args[0], Choice()
    elif (scores := _gathered_by(trail, node, chosen)) is not None:
        choice = Choice() if topk is None else read_choice(view, topk, scores)
    else:
        return None
    unsure = topk is None or (choice is not None and choice.bias is not None)
    if unsure and eps and target_name(scores) == "softmax":
        return None  # what is not chosen by its score may have no probability but what is added
    found = _read_scores(scores, scale, eps) if choice is not None else None
    if found is None or (choice.num_groups > 1 and found.scoring != "sigmoid"):  # softmax scores groups in another way
        return None
    trail.nodes.add(node)
    trail.sources.add(scores)
    return replace(found, choice=choice)


def _read_scattered(view: GraphView, trail: _Trail, scores: Operand, topk: fx.Node, chosen: fx.Node) -> RouterMatch | None:
    """Scores of all experts, made of logits that were scattered to the chosen among minus infinity."""
    node = trail.peel(scores.node, _same_choices_or_last_cast)
    scoring = _scoring_of_chosen(node, once=True)
    if scoring is None:
        return None
    before = node.args[0]
    if scores.turned:
        turn = trail.peel(before, _is_cast_up)
        if scoring != "sigmoid" or not _is_turned(turn):
            return None
        trail.nodes.add(turn)
        before = turn.args[0]
    scattered = trail.peel(before, _same_choices_or_cast_up)
    if target_name(scattered) not in ("scatter", "scatter_") or len(scattered.args) != 4 or scattered.kwargs:
        return None
    _, dim, ids, source = scattered.args
    if not is_scattered_over(view.value(scattered), -math.inf):
        return None
    unchanged = view.value_at(scattered, view.position[node]) is view.value(scattered)
    if not unchanged or not _is_last(dim, scattered) or trail.peel(ids, _same_choices) is not chosen:
        return None
    values = trail.peel(source, _same_choices_or_cast_up) if isinstance(source, fx.Node) else scattered
    if _topk_of(values, 0) is not topk:
        return None
    trail.nodes |= {node, scattered, values}
    trail.sources.add(topk.args[0])
    return RouterMatch(_before_cast_up(topk.args[0]), scoring, False, 1.0)


def _is_turned(node: fx.Node) -> bool:
    """Whether a node is a matrix with its axes in the other order."""
    name, axes = target_name(node), node.args[1:]
    both = name == "t" or (name in ("transpose", "swapaxes") and sorted(a % 2 for a in axes if type(a) is int) == [0, 1])
    return both and fake_of(node).dim() == 2 and not node.kwargs


def _scoring_of_chosen(node: fx.Node, *, once: bool) -> str | None:
    """The scoring that a function of the chosen logits is. Half precision has to be rounded to ``once``, at the end."""
    if not (fake_of(node).dtype == torch.float32 or (once and fake_of(node).dtype in _HALF)):
        return None
    if target_name(node) == "softmax":
        return "softmax_topk" if _along_last_axis(node) else None
    return "sigmoid" if target_name(node) == "sigmoid" else None


def _read_scores(scores: fx.Node, scale: float, eps: float | None) -> RouterMatch | None:
    """The scoring of all experts; ``eps`` is what is added to the sum that they are divided by, None without a division."""
    name = target_name(scores)
    if fake_of(scores).dtype != torch.float32 or not scores.args:
        return None
    if name == "softmax" and _along_last_axis(scores) and (eps is None or 0 <= eps < _NEGLIGIBLE):
        return RouterMatch(_before_cast_up(scores.args[0]), "softmax", eps is not None, scale)
    if name == "sigmoid" and eps in (None, 0, SIGMOID_EPS):
        return RouterMatch(_before_cast_up(scores.args[0]), "sigmoid", eps is not None, scale)
    return None


def _gathered_by(trail: _Trail, node: fx.Node, chosen: fx.Node) -> fx.Node | None:
    """The scores that ``node`` gathers by the chosen ids."""
    if target_name(node) != "gather" or len(node.args) != 3:
        return None
    scores, dim, ids = node.args
    same = trail.peel(ids, _same_choices) is chosen and fake_of(ids).dim() == fake_of(scores).dim()
    return scores if same and _is_last(dim, scores) else None


def _renormalized(trail: _Trail, node: fx.Node) -> tuple[fx.Node, float] | None:
    """The numerator of ``w / (w.sum(-1, keepdim=True) + eps)``, and eps."""
    if target_name(node) not in ("truediv", "itruediv", "div", "div_") or len(node.args) != 2:
        return None
    kept, total = node.args
    eps = 0
    if isinstance(total, fx.Node) and target_name(total) in ("add", "iadd") and len(total.args) == 2:
        trail.nodes.add(total)
        total, eps = total.args
    if not isinstance(total, fx.Node) or target_name(total) != "sum" or total.args[0] is not kept:
        return None
    dim = total.args[1] if len(total.args) > 1 else total.kwargs.get("dim")
    keepdim = total.args[2] if len(total.args) > 2 else total.kwargs.get("keepdim", False)
    if not keepdim or not _is_last(dim, kept) or total.kwargs.get("dtype") not in (None, fake_of(kept).dtype):
        return None
    trail.nodes |= {node, total}
    return (kept, eps) if isinstance(eps, (int, float)) else None


def _topk_of(node: fx.Node, output: int) -> fx.Node | None:
    if target_name(node) != "getitem" or node.args[1] != output:
        return None
    return node.args[0] if target_name(node.args[0]) == "topk" else None


def _takes_largest_of_last_axis(topk: fx.Node, top_k: int) -> bool:
    names = ("input", "k", "dim", "largest", "sorted")
    given = dict(zip(names, topk.args, strict=False)) | dict(topk.kwargs)
    last = _is_last(given.get("dim", -1), given["input"])
    return given["k"] == top_k <= MAX_TOP_K and last and given.get("largest", True)


def _along_last_axis(softmax: fx.Node) -> bool:
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return _is_last(dim, softmax.args[0])


def _is_last(dim: int | None, node: fx.Node) -> bool:
    return dim is not None and dim in (-1, fake_of(node).dim() - 1)


def _same_choices(step: fx.Node, source: fx.Node) -> bool:
    """A reshape that keeps the K choices of a token together, or a cast between integers."""
    if target_name(step) in _CASTS:
        return not fake_of(step).is_floating_point() and not fake_of(source).is_floating_point()
    return _is_reshape(step, source) and _same_last_axis(step, source)


def _is_reshape(step: fx.Node, source: fx.Node) -> bool:
    return target_name(step) in _SHAPES and fake_of(step).dtype == fake_of(source).dtype


def _same_order(step: fx.Node, source: fx.Node) -> bool:
    """Any reshape, or a cast between integers: the layer flattens its choices anyway."""
    return _is_reshape(step, source) or _same_choices(step, source)


def _same_order_or_last_cast(step: fx.Node, source: fx.Node) -> bool:
    """Any reshape, or a cast from fp32: what the layer reads is then the cast of the router's weights."""
    if target_name(step) in _CASTS:
        return fake_of(source).dtype == torch.float32
    return _same_order(step, source)


def _same_choices_or_last_cast(step: fx.Node, source: fx.Node) -> bool:
    return _same_choices(step, source) or (target_name(step) in _CASTS and fake_of(source).dtype == torch.float32)


def _same_choices_or_cast_up(step: fx.Node, source: fx.Node) -> bool:
    return _is_cast_up(step, source) or _same_choices(step, source)


def _before_cast_up(node: fx.Node) -> fx.Node:
    """What was cast to fp32: the fused op does that itself."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return source if source is not None and _is_cast_up(node, source) else node


def _is_cast_up(step: fx.Node, source: fx.Node) -> bool:
    return target_name(step) in _CASTS and fake_of(step).dtype == torch.float32 and fake_of(source).dtype in _NARROW


def _same_last_axis(a: fx.Node, b: fx.Node) -> bool:
    shapes = fake_of(a).shape, fake_of(b).shape
    return all(shapes) and shapes[0][-1:] == shapes[1][-1:]
