"""What routing weights are multiplied by where no tensor ``[T, K]`` holds the product: numbers of experts, or of tokens.

    out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * scale[e])

is the layer whose routing weights are ``weights * scale[ids]``. A factor that is 0 or 1 is no weight but a mask: where it is 0,
as for padding, no expert takes the token, whatever it would make of it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from operator import and_

import torch

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import at_least_fp32
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.pointwise import opposite
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand, by_number, joined
from moeblaze_ops.lowering.match.operands.find_routing import find_routing
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.terms.routing_term import Routing

_NUMBER = -6
"""The level of the variable that stands for an expert where weights are indexed by ids."""


@dataclass(frozen=True)
class Scale:
    """A factor of routing weights: ``width`` numbers of each token, 1 or K; or a number of each expert, where it is None.

    A mask that is negated holds ones where no expert takes the token.
    """

    operand: Operand
    width: int | None = None
    is_mask: bool = False
    is_negated: bool = False


Factors = tuple[Expr, ...]


def find_scaled_routing(
    algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int
) -> tuple[Operand, Operand | None, int, tuple[Scale, ...]]:
    """As ``find_routing``, and what the weights are multiplied by: no more than has to be beside them, but for masks."""
    shared = reduce(and_, (Counter(_factors(routing)) for routing in routings))
    declined = None
    marks = [] if depth else filter(is_indicator, shared)
    masks = {mark: scale for mark in marks if (scale := _mask(algebra, finder, routings[0], mark)) is not None}
    for own, scales in _ways(algebra, finder, routings, shared, depth, masks):
        try:
            plain = [_without(algebra, routing, (*scales, *of)) for routing, of in zip(routings, own.of, strict=True)]
            # A mask that is one factor of the weights that the graph holds, too, says which slots are unused.
            beside = [mask for factor, mask in masks.items() if factor not in scales]
            return *find_routing(algebra, finder, plain, depth), (*scales.values(), *own.scales, *beside)
        except Declined as error:
            declined = declined or error
    raise declined


@dataclass(frozen=True)
class _Own:
    """The factors ``of`` each term that are its expert's, and what they are together."""

    of: Sequence[Factors]
    scales: tuple[Scale, ...] = ()


def _ways(
    algebra: Algebra,
    finder: Finder,
    routings: Sequence[Routing],
    shared: Iterable[Expr],
    depth: int,
    masks: dict[Expr, Scale],
) -> Iterator[tuple[_Own, dict[Expr, Scale]]]:
    """What may be taken out of the weights, each factor as what holds it: masks, nothing, and then more and more.

    A mask of the experts' input (of weights inside projections) is none of the experts: they may make something of zeros.
    """
    none = _Own([()] * len(routings))
    if masks:
        yield none, masks
    yield none, {}
    own = _of_experts(algebra, finder, routings) or none
    numbers: dict[Expr, Scale] = {}
    for factor in shared:
        if factor not in masks and factor.free and all(var.args[2] == "t" for var in factor.free):
            operand = finder.find_scaled((factor,), (algebra.zero,), 1, depth)
            numbers |= {factor: Scale(operand, 1)} if operand is not None else {}
    for count in range(len(numbers) + 1):
        for taken in combinations(numbers.items(), count):
            yield own, {**masks, **dict(taken)}


def _factors(routing: Routing) -> Factors:
    return tuple(factor for weight in routing.weights for factor in factors_of(weight))


def _mask(algebra: Algebra, finder: Finder, routing: Routing, factor: Expr) -> Scale | None:
    """A tensor that is not zero where ``factor`` is 1, or where it is 0."""
    if factor.kind == "cast":
        factor = factor.args[1]
    places = [(algebra.zero, 1), *([(slot, slot.args[1])] if (slot := routing.slot) is not None else [])]
    for target in (factor, opposite(algebra, factor)):
        for column, width in places:
            if (operand := finder.find((target,), (column,), width)) is not None:
                return Scale(operand, width, is_mask=True, is_negated=target is not factor)
        if (operand := finder.find_sorted(target, *places[-1])) is not None:
            return Scale(operand, places[-1][1], is_mask=True, is_negated=target is not factor)
    return None


def _of_experts(algebra: Algebra, finder: Finder, routings: Sequence[Routing]) -> _Own | None:
    """The factors that tell nothing of a token but its expert, where a tensor ``[E]``, or one for each, holds their product.

    Numbers of all experts may be in tensors of their own: ``expert(x) * scale[e] * self.scale * self.warmup``.
    """
    of: list[Factors] = []
    product_of: dict[Expr, Expr] = {}
    for routing in routings:
        number = routing.expert or algebra.var(_NUMBER, algebra.extent(routing.ids), "r")
        at_number = {factor: algebra.substitute(factor, {routing.ids: number}) for factor in _factors(routing)}
        of.append(tuple(f for f in _factors(routing) if f.kind != "const" and at_number[f].free <= number.free))
        product = algebra.mul(*(at_number[factor] for factor in of[-1]))
        if product_of.setdefault(number, product) is not product:
            return None  # slots of one expert differ
    of_all = [factor for factor in reduce(and_, map(Counter, of)).elements() if not factor.free]
    for apart in ([], of_all):
        rest = {at: algebra.mul(*(Counter(factors_of(whole)) - Counter(apart)).elements()) for at, whole in product_of.items()}
        each = [dict.fromkeys(product_of, factor) for factor in apart]
        found = [held_of_experts(algebra, finder, one) for one in (rest, *each) if set(one.values()) != {algebra.one}]
        if found and None not in found:
            return _Own(of, tuple(map(Scale, found)))
    return None


def held_of_experts(algebra: Algebra, finder: Finder, product_of: dict[Expr, Expr]) -> Operand | None:
    """What holds a number of each expert, by the experts' numbers: a tensor ``[E]``, or one for each, or one for all."""
    experts, products, count = by_number(product_of)
    found = finder.find_table(products, (count, experts), reshaped=True) if isinstance(count, int) else None
    if found is None and len(set(products)) == 1:
        found = finder.find_table(products[:1], (1, (algebra.zero,)), reshaped=True)
    if found is None and experts[0].kind == "const":
        found = joined([finder.find_table((product,), (1, (algebra.zero,)), reshaped=True) for product in products])
    return found


def _without(algebra: Algebra, routing: Routing, taken: Factors) -> Routing:
    """A routing without factors of its weights; its score, where they are somewhere inside, is the weight of any token."""
    weights = tuple((Counter(_factors(routing)) - Counter(taken)).elements())
    of_score = Counter(factors_of(routing.score)) if routing.score is not None else Counter()
    rest = (of_score - Counter(taken)).elements() if Counter(taken) <= of_score else weights
    return replace(routing, weights=weights, score=None if routing.score is None else algebra.mul(*rest))


def usable_weights(weights: Operand | None, dtype: torch.dtype) -> Operand | None:
    """Weights in a dtype that the ops take beside experts of ``dtype``."""
    if weights is None:
        return None
    prove(weights.dtype.is_floating_point, Reason.DTYPE_PATH, "integer routing weights")
    usable = weights.dtype in (dtype, torch.float32)
    prove(usable or not weights.is_rounded, Reason.DTYPE_PATH, f"weights rounded to {weights.dtype}")
    return weights if usable else replace(weights, dtype=at_least_fp32(dtype))


def unrounded_weights(weights: Operand | None) -> Operand | None:
    """Weights in fp32 where a tensor holds them so and the layer casts them, or their rows, to its own dtype.

    The ops multiply and sum in fp32 and round once, as code of Inductor does that has such a cast between two of its steps.

        y * weights[order].to(y.dtype)              accepted: nobody else reads the cast
        weights = weights.to(x.dtype)               left as it is: there is a tensor of rounded weights
    """
    if weights is None or weights.dtype.itemsize >= torch.float32.itemsize:
        return weights
    is_held = all(fake_of(node).dtype == torch.float32 for node in weights.nodes)
    return replace(weights, dtype=torch.float32) if is_held else weights


def usable_scale(scale: Scale, dtype: torch.dtype) -> Scale:
    """The same for what they are multiplied by."""
    if scale.is_mask:
        return scale
    operand = scale.operand
    if not operand.dtype.is_floating_point:  # a product of it and a weight has the dtype of the weight
        operand = replace(operand, dtype=at_least_fp32(dtype))
    return replace(scale, operand=usable_weights(operand, dtype))
