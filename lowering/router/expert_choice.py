"""What a router chooses experts by where that is not their scores: scores plus a bias, inside the best groups of experts.

Read from the values of the graph, so that it does not matter by which views a mask over groups became one over experts.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.graph.sizes import same_shape, same_size


@dataclass(frozen=True)
class Choice:
    """Arguments of ``moeblaze::route`` that say which experts are chosen."""

    bias: fx.Node | None = None
    num_groups: int = 1
    top_groups: int = 1

    def reachable(self, num_experts: int) -> int:
        """Experts among which a token may choose."""
        return num_experts // self.num_groups * self.top_groups


def read_choice(view: GraphView, topk: fx.Node, plain: Value) -> Choice | None:
    """How the input of ``topk`` comes from ``plain`` scores ``[T, E]``; None in another way than ``route`` can do."""
    given = view.value_at(topk.args[0], view.position[topk])
    choice = Choice()
    if not isinstance(given, Value) or not isinstance(given.shape[-1], int) or len(given.shape) != 2:
        return None
    if (masked := _masked_with_infinity(given)) is not None:
        left_out, given = masked
        groups = _read_groups(view, left_out, given)
        if groups is None:
            return None
        choice = Choice(None, *groups)
    if given is plain:
        return choice
    for bias, rest in _addends(given):
        exact = bias.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if rest is plain and exact and bias.shape == given.shape[-1:] and view.value(bias.node) is bias:
            return replace(choice, bias=bias.node)
    return None


def _addends(value: Value) -> list[tuple[Value, Value]]:
    if value.op != "pointwise" or value.args[0] != "add":
        return []
    a, b = value.args[1]
    return [(a, b), (b, a)]


def _masked_with_infinity(value: Value) -> tuple[Value, Value] | None:
    """The mask and the rest of ``rest.masked_fill(mask, -inf)``."""
    if value.op != "pointwise" or value.args[0] != "where":
        return None
    mask, filled, rest = value.args[1]
    return (mask, rest) if same_shape(rest.shape, value.shape) and _is_full(filled, -math.inf) else None


def _read_groups(view: GraphView, left_out: Value, scores: Value) -> tuple[int, int] | None:
    """The number of groups, and how many a token may choose from, of a mask of the experts in all others.

    A group's score has to be the sum of its two largest.
    """
    kept = left_out.args[1][0] if left_out.op == "pointwise" and left_out.args[0] == "not" else None
    if kept is None or len(kept.shape) != 2 or not same_size(kept.shape[1], scores.shape[1]):
        return None
    groups = _source(kept)
    if groups.op != "scatter" or len(groups.shape) != 2 or not isinstance(groups.shape[1], int):
        return None
    base, dim, index, source, accumulate = groups.args
    marks = _is_full(base, 0) and _is_full(_source(source), 1)
    best = largest(index, 1)
    if not marks or accumulate or dim != 1 or best is None:
        return None
    num_groups, size = groups.shape[1], scores.shape[1] // groups.shape[1]
    group_scores = view.value_at(best.args[0], view.position[best])
    if not _same_elements(view, kept, groups, size) or not _sums_two_largest(view, group_scores, scores, size):
        return None
    return num_groups, index.shape[1]


def _source(value: Value) -> Value:
    """What a value is a view or a cast of."""
    while value.op in ("reshape", "expand", "cast", "permute"):
        value = value.args[0]
    return value


def _is_full(value: Value, number: float) -> bool:
    return value.op == "full" and value.args[0] == number


def _same_elements(view: GraphView, kept: Value, groups: Value, size: int) -> bool:
    """True if the mask of experts says of each what the mask of groups says of its group."""
    evaluator = Evaluator()
    groups = view.make("cast", groups, shape=groups.shape, dtype=kept.dtype)
    token, expert = evaluator.algebra.var(0, kept.shape[0], "t"), evaluator.algebra.var(1, kept.shape[1], "d")
    try:
        of_group = evaluator.element(groups, (token, evaluator.algebra.div(expert, size)))
        of_expert = evaluator.element(kept, (token, expert))
    except Unroll:
        return False
    return of_expert is of_group


def _sums_two_largest(view: GraphView, group_scores: Value, scores: Value, size: int) -> bool:
    if group_scores.op != "sum" or group_scores.args[1] != (2,) or len(group_scores.args[0].shape) != 3:
        return False
    pair = group_scores.args[0]
    best = largest(pair, 0)
    if best is None or pair.shape[2] != 2:
        return False
    grouped = view.value_at(best.args[0], view.position[best])
    evaluator = Evaluator()
    token, group, member = evaluator.variables(grouped)
    expert = evaluator.algebra.linear(0, [(size, group), (1, member)])
    try:
        return evaluator.element(grouped, (token, group, member)) is evaluator.element(scores, (token, expert))
    except Unroll:
        return False


def largest(value: Value, output: int) -> fx.Node | None:
    """The top-k along the last axis that ``value`` is an output of."""
    if value.op != "output" or value.args[1:] != (output, None) or target_name(value.args[0]) != "topk":
        return None
    topk = value.args[0]
    given = _arguments(topk)
    last = given.get("dim", -1) in (-1, fake_of(topk.args[0]).dim() - 1)
    return topk if last and given.get("largest", True) else None


def is_sorted(topk: fx.Node) -> bool:
    """True if a top-k gives choices in the order of their scores, and not in one of its own."""
    return bool(_arguments(topk).get("sorted", True))


def _arguments(topk: fx.Node) -> dict[str, object]:
    return dict(zip(("input", "k", "dim", "largest", "sorted"), topk.args, strict=False)) | dict(topk.kwargs)
