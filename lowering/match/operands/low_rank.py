"""The factors of a low-rank addition to expert weights, as views of the tensors that hold them.

A weight's element is that of the sum ``W[e, f, d] + s * sum_r B[e, f, r] A[e, r, d]``. In whatever order of experts and ranks the
factors are stored, where each of them has its element is a linear function of e, r and a feature, or the addition is none:

    b.view(F, R, E).permute(2, 0, 1)[e, f, r]       experts on the fastest axis, as PEFT has B
    b.roll(1, 0)[e, f, r]                           the factor of another expert: the weight is taken as one tensor
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of, split_number
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView, weight_views
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm, Projection


@dataclass(frozen=True)
class Factors:
    """``a`` as [E, R, inputs], ``b`` as [E, outputs, R], and what their product is multiplied by: a number, and maybe one for
    each expert, [E]."""

    a: WeightView
    b: WeightView
    scale: float
    scale_E: WeightView | None = None

    @property
    def rank(self) -> int:
        return self.a.sizes[self.a.order[1]]

    @property
    def views(self) -> tuple[WeightView, ...]:
        return (self.a, self.b) if self.scale_E is None else (self.a, self.b, self.scale_E)


@dataclass(frozen=True)
class Addition:
    """What is added to one weight of one expert, in symbols: ``scale * own * sum over rank of a * b``."""

    a: Expr
    b: Expr
    rank: Expr
    scale: float
    own: Expr | None  # the number of the expert itself


_ONE_RANK = -40
"""The variable of a sum over one rank, which no expression has."""

Additions = tuple[tuple[Addition, ...], ...]
"""Of the halves of one expert's up projection, or of its down projection: as many each as adapters are active."""


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
) -> tuple[tuple[Factors, ...], ...]:
    """For each half the factors of all experts, of each of the adapters that are added to it.

    Args:
        additions: per expert those of its halves.
        outputs, inputs: per expert the feature variables of the weight.
        index, num_experts: as for ``weight_views``.
    """
    found: list[tuple[Factors, ...]] = []
    common: dict[str, Any] = {"index": index, "num_experts": num_experts, "halves_axis": False, "may_copy": True}

    def view_of(elements: Sequence[Expr], features: Sequence[tuple[Expr, ...]]) -> WeightView:
        ((view,), _) = weight_views(evaluator.algebra, [[element] for element in elements], features, **common)
        return view

    for half in zip(*additions, strict=True):
        prove(len({len(own) for own in half}) == 1, Reason.WEIGHT_LAYOUT, "experts have several numbers of low-rank factors")
        factors = []
        for adapter in zip(*half, strict=True):
            a = view_of([own.a for own in adapter], [(own.rank, at) for own, at in zip(adapter, inputs, strict=True)])
            b = view_of([own.b for own in adapter], [(at, own.rank) for own, at in zip(adapter, outputs, strict=True)])
            scales = [own.own for own in adapter if own.own is not None]
            prove(len(scales) in (0, len(adapter)), Reason.WEIGHT_LAYOUT, "some experts scale their low-rank factors")
            factors.append(Factors(a, b, adapter[0].scale, view_of(scales, [()] * len(scales)) if scales else None))
        found.append(tuple(factors))
    return tuple(found)


def _value_of(weight: Expr) -> Value | None:
    """The sum that a weight's element is an element of, if it has a low-rank addition."""
    while weight.kind == "cast":
        weight = weight.args[1]
    return weight.args[0] if weight.kind == "leaf" and weight.args[0].op == "low_rank" else None


def _split(evaluator: Evaluator, projection: Projection, output: Expr, feature: Expr) -> tuple[Projection, tuple[Addition, ...]]:
    """A projection with its bare weight, and what is added to it, by each of the adapters that are active."""
    found: list[Addition] = []
    weight = projection.weight
    while (value := _value_of(weight)) is not None:
        leaf, casts = weight, []
        while leaf.kind == "cast":
            casts.append(leaf.args[0])
            leaf = leaf.args[1]
        base, added = value.args
        found += _additions(evaluator, evaluator.element(added, leaf.args[1]), output, feature)
        weight = evaluator.element(base, leaf.args[1])
        for dtype in reversed(casts):
            weight = evaluator.algebra.cast(dtype, weight)
    return replace(projection, weight=weight), tuple(found)


def _additions(evaluator: Evaluator, e: Expr, output: Expr, feature: Expr) -> Iterator[Addition]:
    """The products in a sum of them, or of multiples of sums."""
    number, own, e = _scales_and_rest(evaluator.algebra, e, output, feature)
    if e.kind != "add":
        yield _addition(evaluator, e, output, feature, number, own)
        return
    for term in e.args:
        for addition in _additions(evaluator, term, output, feature):
            yield replace(addition, scale=number * addition.scale, own=own or addition.own)


def _addition(evaluator: Evaluator, e: Expr, output: Expr, feature: Expr, number: float, own: Expr | None) -> Addition:
    prove(e.kind in ("sum", "mul"), Reason.PROJECTION_WEIGHTS, f"'{e.kind}' as a low-rank addition")
    rank, body = evaluator.algebra.open(e) if e.kind == "sum" else (evaluator.algebra.var(_ONE_RANK, 1, "d"), e)
    numbers, factors = zip(*(_number_and_rest(evaluator.algebra, factor) for factor in factors_of(body)), strict=True)
    tensors = [factor for factor in factors if factor is not evaluator.algebra.one]
    of_output = [factor for factor in tensors if output in factor.free]
    of_input = [factor for factor in tensors if feature in factor.free]
    each_once = len(tensors) == 2 and len(of_output) == len(of_input) == 1 and of_output != of_input
    with_ranks = e.kind == "mul" or all(rank in factor.free for factor in tensors)
    prove(each_once and with_ranks, Reason.PROJECTION_WEIGHTS, "a low-rank addition that is no product of two factors")
    return Addition(of_input[0], of_output[0], rank, number * prod(numbers), own)


def _scales_and_rest(algebra: Algebra, e: Expr, output: Expr, feature: Expr) -> tuple[float, Expr | None, Expr]:
    """What a sum or product is multiplied by, through casts: the number, and what differs by expert alone."""
    number, e = _number_and_rest(algebra, e)
    while e.kind == "cast":
        e = e.args[1]
    factors = factors_of(e)
    rest = [factor for factor in factors if output in factor.free or feature in factor.free]
    scales = [factor for factor in factors if factor not in rest]
    prove(len(rest) > 0, Reason.PROJECTION_WEIGHTS, "a low-rank addition that is zero whatever its factors are")
    if len(rest) == 2:  # of one rank
        return number, scales[0] if scales else None, algebra.mul(*rest)
    if e is rest[0]:
        return number, None, e
    inner, _, e = _scales_and_rest(algebra, rest[0], output, feature)
    return number * inner, scales[0], e


def _number_and_rest(algebra: Algebra, e: Expr) -> tuple[float, Expr]:
    """The numbers in a product, multiplied, and the product without them, through casts."""
    if e.kind == "cast":
        number, rest = _number_and_rest(algebra, e.args[1])
        return number, algebra.cast(e.args[0], rest)
    number, factors = split_number(algebra.unscaled(e))
    return number, algebra.mul(*factors)
