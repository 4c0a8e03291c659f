"""The factors of a low-rank addition to expert weights, as views of the tensors that hold them.

A weight's element is that of the sum ``W[e, f, d] + s * sum_r B[e, f, r] A[e, r, d]``. In whatever order of experts and ranks the
factors are stored, where each of them has its element is a linear function of e, r and a feature, or the addition is none:

    b.view(F, R, E).permute(2, 0, 1)[e, f, r]       experts on the fastest axis, as PEFT has B
    b.roll(1, 0)[e, f, r]                           the factor of another expert: the weight is taken as one tensor
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView, weight_views
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm, Projection


@dataclass(frozen=True)
class Factors:
    """``a`` as [E, R, inputs], ``b`` as [E, outputs, R], and the number that their product is multiplied by."""

    a: WeightView
    b: WeightView
    scale: float

    @property
    def rank(self) -> int:
        return self.a.sizes[self.a.order[1]]


@dataclass(frozen=True)
class Addition:
    """What is added to one weight of one expert, in symbols: ``scale * sum over rank of a * b``."""

    a: Expr
    b: Expr
    rank: Expr
    scale: float


Additions = tuple[Addition | None, ...]
"""Of the halves of one expert's up projection, or of its down projection."""


def has_low_rank(experts: Sequence[ExpertTerm]) -> bool:
    projections = [projection for expert in experts for projection in (*expert.up, expert.down)]
    return any(_value_of(projection.weight) is not None for projection in projections)


def sums_of(view: GraphView, experts: Sequence[ExpertTerm], position: int) -> frozenset[fx.Node]:
    """Nodes that hold weights with their low-rank additions: those that somebody else reads stay."""
    weights = (projection.weight for expert in experts for projection in (*expert.up, expert.down))
    values = [value for weight in weights if (value := _value_of(weight)) is not None]
    return frozenset(value.node for value in values if view.value_at(value.node, position) is value)


def split_expert(evaluator: Evaluator, expert: ExpertTerm, output: Expr) -> tuple[ExpertTerm, Additions, Additions]:
    """An expert with its bare weights, and what is added to those of up and of down."""
    up, of_up = zip(*(_split(evaluator, half, expert.width, expert.feature_in) for half in expert.up), strict=True)
    down, of_down = _split(evaluator, expert.down, output, expert.width)
    return replace(expert, up=up, down=down), of_up, (of_down,)


def factor_views(
    evaluator: Evaluator,
    additions: Sequence[Additions],
    outputs: Sequence[Expr],
    inputs: Sequence[Expr],
    index: Sequence[Expr | None],
    num_experts: int,
) -> tuple[Factors | None, ...]:
    """For each half the factors of all experts, None where nothing is added to it.

    Args:
        additions: per expert those of its halves.
        outputs, inputs: per expert the feature variables of the weight.
        index, num_experts: as for ``weight_views``.
    """
    found: list[Factors | None] = []
    for half in zip(*additions, strict=True):
        present = [addition for addition in half if addition is not None]
        prove(len(present) in (0, len(half)), Reason.WEIGHT_LAYOUT, "some experts have low-rank factors")
        if not present:
            found.append(None)
            continue
        prove(len({addition.scale for addition in present}) == 1, Reason.WEIGHT_LAYOUT, "low-rank factors of several scales")
        ranks = [addition.rank for addition in present]
        a_features, b_features = list(zip(ranks, inputs, strict=True)), list(zip(outputs, ranks, strict=True))
        common: dict[str, Any] = {"index": index, "num_experts": num_experts, "halves_axis": False, "may_copy": True}
        ((a,), _) = weight_views(evaluator.algebra, [[addition.a] for addition in present], a_features, **common)
        ((b,), _) = weight_views(evaluator.algebra, [[addition.b] for addition in present], b_features, **common)
        found.append(Factors(a, b, present[0].scale))
    return tuple(found)


def _value_of(weight: Expr) -> Value | None:
    """The sum that a weight's element is an element of, if it has a low-rank addition."""
    while weight.kind == "cast":
        weight = weight.args[1]
    return weight.args[0] if weight.kind == "leaf" and weight.args[0].op == "low_rank" else None


def _split(evaluator: Evaluator, projection: Projection, output: Expr, feature: Expr) -> tuple[Projection, Addition | None]:
    if (value := _value_of(projection.weight)) is None:
        return projection, None
    leaf, casts = projection.weight, []
    while leaf.kind == "cast":
        casts.append(leaf.args[0])
        leaf = leaf.args[1]
    weight, product = value.args
    base = evaluator.element(weight, leaf.args[1])
    prove(_value_of(base) is None, Reason.PROJECTION_WEIGHTS, "several low-rank additions to one weight")
    for dtype in reversed(casts):
        base = evaluator.algebra.cast(dtype, base)
    return replace(projection, weight=base), _addition(evaluator, evaluator.element(product, leaf.args[1]), output, feature)


def _addition(evaluator: Evaluator, e: Expr, output: Expr, feature: Expr) -> Addition:
    number, e = _number_and_rest(evaluator.algebra, e)
    while e.kind == "cast":
        e = e.args[1]
    prove(e.kind == "sum", Reason.PROJECTION_WEIGHTS, f"'{e.kind}' as a low-rank addition")
    rank, body = evaluator.algebra.open(e)
    numbers, factors = zip(*(_number_and_rest(evaluator.algebra, factor) for factor in factors_of(body)), strict=True)
    tensors = [factor for factor in factors if factor is not evaluator.algebra.one]
    of_output = [factor for factor in tensors if output in factor.free]
    of_input = [factor for factor in tensors if feature in factor.free]
    each_once = len(tensors) == 2 and len(of_output) == len(of_input) == 1 and of_output != of_input
    with_ranks = all(rank in factor.free for factor in tensors)
    prove(each_once and with_ranks, Reason.PROJECTION_WEIGHTS, "a low-rank addition that is no product of two factors")
    return Addition(of_input[0], of_output[0], rank, number * prod(numbers))


def _number_and_rest(algebra: Algebra, e: Expr) -> tuple[float, Expr]:
    """The numbers in a product, multiplied, and the product without them, through casts."""
    if e.kind == "cast":
        number, rest = _number_and_rest(algebra, e.args[1])
        return number, algebra.cast(e.args[0], rest)
    parts = factors_of(algebra.unscaled(e))
    numbers = [part.args[0] for part in parts if part.kind == "const"]
    return prod(numbers), algebra.mul(*(part for part in parts if part.kind != "const"))
