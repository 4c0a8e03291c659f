"""That a sum of experts is a layer which the ops compute: every proof obligation, in order.

The terms of the sum are read by `expert_term` and `routing_term`, and the operands that they speak of are looked up
in the graph by `find_operands` and `weight_layout`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.kernels.formulas.expression import GATED_SYMBOLS, PARAMETER_SYMBOLS, UNGATED_SYMBOLS
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.lowering.evaluate.depth import MAX_PROJECTIONS
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.facts.subscripts import of_experts_alone
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, at_least_fp32, target_name
from moeblaze_ops.lowering.graph.operators import GROUPED_PRODUCTS
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, size_of
from moeblaze_ops.lowering.index_notation.expr import Expr, subexpressions
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative
from moeblaze_ops.lowering.match.match_result import MoEMatch, Reading
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand
from moeblaze_ops.lowering.match.operands.find_parameters import find_parameters
from moeblaze_ops.lowering.match.operands.find_routing import find_kept, find_x, is_permuted, with_scaled_x
from moeblaze_ops.lowering.match.operands.find_scales import (
    Scale,
    find_scaled_routing,
    unrounded_weights,
    usable_scale,
    usable_weights,
)
from moeblaze_ops.lowering.match.operands.find_scored import Named, find_scored, usable_named
from moeblaze_ops.lowering.match.operands.low_rank import Additions, Factors, factor_views, has_low_rank, split_expert, sums_of
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView, order_in_memory, weight_views
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.region import Region, prove_region, written_before_backward
from moeblaze_ops.lowering.match.terms.activation import Formulas, without_gradient
from moeblaze_ops.lowering.match.terms.expert_coverage import (
    expert_order,
    extent,
    weight_index,
)
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm, made_by, read_expert
from moeblaze_ops.lowering.match.terms.padding import without_padding
from moeblaze_ops.lowering.match.terms.routing_term import (
    Routing,
    expert_index,
    read_compared,
    read_indexed,
    read_scored,
    with_kept_apart,
    without_input_mask,
)
from moeblaze_ops.lowering.match.zero_computation import ZeroComputation, ZeroComputationTerm, find_zero_computation

NO_COUNTS = "not proven to end at counts of the sorted ids, as those of torch.bincount(ids, minlength=E).cumsum(0) do"


def _prove_reads_tokens(expert: ExpertTerm, index: Expr | None) -> None:
    """Refuses an expert that reads what is computed of the rows that it selects.

        expert(norm(x)[token])        but not        expert(norm(x[token]))
    """
    rows = [binder for binder in expert.binders if binder is not index]
    if expert.x.kind == "leaf" and any(at in rows for at in expert.x.args[1]) and _keeps_shape(expert.x.args[0].node):
        computed = f"{made_by(expert.x, expert.feature_in)} of the rows that it selects"
        raise Declined(Reason.DIFFERENT_INPUTS, f"an expert reads {computed}; compute it of all tokens first")
    for leaf in (leaf for f in expert.routing for leaf in subexpressions(f, lambda e: e.kind == "leaf")):
        what = "is computed of the rows that an expert selects, and weights or selects them; compute it of all tokens first"
        prove(not any(at in rows for at in leaf.args[1]), Reason.ROUTING, f"'{leaf.args[0].node.name}' {what}")


def _keeps_shape(node: fx.Node) -> bool:
    """True if a value has the shape of what it is computed of first."""
    values = [fake_of(each) for each in (node, *node.all_input_nodes[:1])]
    sizes = [[size_of(size) for size in value.shape] for value in values if isinstance(value, torch.Tensor)]
    return len(sizes) == 2 and same_shape(*sizes)


@dataclass(frozen=True)
class Candidate:
    """A value that may be the output of a layer, completed by ``root``: its element at ``tokens`` and ``feature`` is a sum.

    ``terms`` are its experts, which ``chosen`` counts; ``added``, as they were read, are experts without projections. ``base`` is
    what the sum starts from.
    """

    root: fx.Node
    value: Value
    tokens: tuple[Expr, ...]
    feature: Expr
    terms: Sequence[Expr]
    chosen: Counter
    base: fx.Node | None
    added: Sequence[ZeroComputationTerm]


Refusal: TypeAlias = Callable[[GraphView, MoEMatch], Reason | None]
"""Why what a match states of its operands is not what its graph computes, None if it is."""


def prove_layer(
    view: GraphView, evaluator: Evaluator, formulas: Formulas, candidate: Candidate, refusal: Refusal
) -> MoEMatch:
    """The layer that a candidate is, its low-rank factors apart from the weights where that can be proven.

    Raises:
        Declined: it is not proven to be one.
    """
    terms = [of_experts_alone(evaluator.algebra, term, candidate.feature) for term in candidate.terms]
    candidate = replace(candidate, terms=terms)
    experts = [read_expert(evaluator.algebra, formulas, term, candidate.feature) for term in terms]

    def stated(split: bool) -> MoEMatch:
        match = _Proof(view, evaluator, formulas, candidate).layer(experts, split)
        if (reason := refusal(view, match)) is not None:
            raise Declined(reason)
        return match

    if not has_low_rank(experts):
        return stated(split=False)
    try:
        return stated(split=True)
    except Declined as declined:
        try:
            return stated(split=False)
        except Declined:
            raise declined from None


def unshaped(view: GraphView, node: fx.Node, root: fx.Node) -> Value:
    """What a node holds at ``root``, in the shape in which it was made."""
    value = view.value_at(node, view.position[root])
    while value.op in ("reshape", "cast"):
        value = value.args[0]
    return value


@dataclass(frozen=True)
class _Routed:
    """Experts, how each is routed, and the operands that say so. ``order``: the terms of the experts by their numbers."""

    experts: list[ExpertTerm]
    routings: list[Routing]
    order: list[int]
    numbers: tuple[int, ...]
    ids: Operand | None
    weights: Operand | None
    scales: tuple[Scale, ...]
    top_k: int
    kept: Operand | None = None
    named: Named | None = None
    scored: bool = False  # a token may go to every expert

    @property
    def is_dense(self) -> bool:
        """True if experts compare ids with their numbers; else ids select their weights."""
        return self.routings[0].expert is not None

    @property
    def is_of_all(self) -> bool:
        """True if every expert takes every token."""
        return self.scored and self.named is None and not any(scale.width == self.top_k for scale in self.scales)

    @property
    def is_gathered(self) -> bool:
        return self.weights is not None and self.weights.gathered

    @property
    def is_by_number(self) -> bool:
        """True if every factor of a score is one of all experts alike."""
        return not (self.kept or self.scored) and all(scale.width is not None for scale in self.scales)


@dataclass(frozen=True)
class _Stored:
    """What experts have stored, as views; ``sums`` are the nodes that add low-rank products to the weights."""

    num_experts: int
    parameters: tuple[Operand, ...]
    w_up: tuple[WeightView, ...]
    b_up: tuple[WeightView, ...]
    w_down: WeightView
    b_down: WeightView | None
    low_rank_up: tuple[tuple[Factors, ...], ...] = ()
    low_rank_down: tuple[Factors, ...] = ()
    sums: frozenset[fx.Node] = frozenset()

    @property
    def views(self) -> list[WeightView]:
        factors = [view for group in (*self.low_rank_up, self.low_rank_down) for view in _views(group)]
        return [*self.w_up, *self.b_up, self.w_down, *([self.b_down] if self.b_down else []), *factors]


def _views(group: tuple[Factors, ...]) -> list[WeightView]:
    return [view for factors in group for view in factors.views]


class _Proof:
    """The proof of one candidate."""

    def __init__(self, view: GraphView, evaluator: Evaluator, formulas: Formulas, candidate: Candidate):
        self.view, self.evaluator, self.algebra, self.candidate = view, evaluator, evaluator.algebra, candidate
        self.formulas = formulas
        self.root, self.feature = candidate.root, candidate.feature
        self.finder = Finder(view, evaluator, candidate.root, candidate.tokens, candidate.value.shape[:-1])

    def layer(self, experts: Sequence[ExpertTerm], split: bool) -> MoEMatch:
        """The layer, its low-rank factors apart from the weights where they are ``split``."""
        candidate, root = self.candidate, self.root
        routed = self._routed(self._normal(experts))
        x = find_x(self.finder, routed.experts)
        activations = {(expert.activation, bool(expert.scale), expert.dropout) for expert in routed.experts}
        prove(len(activations) == 1, Reason.DIFFERENT_ACTIVATIONS)
        lead = routed.experts[0]
        routed = self._in_order_of_memory(routed)
        stored = self._stored(routed, split)
        if fake_of(self.view.writes.get(root, root)).requires_grad:
            _prove_reached(lead.activation, x, stored)
        by_number = routed.is_by_number or not candidate.added
        prove(by_number, Reason.ROUTING, "experts that are routed otherwise than those without projections")
        plain = self._zero_computation(routed, x)
        self._prove_slots(routed, plain, stored.num_experts)
        stored, dtype = self._in_one_dtype(stored, x)
        weights = unrounded_weights(usable_weights(routed.weights, dtype))
        named = routed.named and usable_named(routed.named, dtype)
        scales = tuple(usable_scale(scale, dtype) for scale in routed.scales)
        self._prove_unchanged(stored)
        of_plain = (operand for own in plain for operand in (own.vector, own.of_token))
        optional = (routed.ids, weights, *of_plain, *((named.tokens, named.weights) if named else ()))
        factors = (scale.operand for scale in scales if not scale.is_mask)
        marks = _nodes(routed.kept, *(scale.operand for scale in scales if scale.is_mask))
        read, of_weights = _nodes(x, *stored.parameters, *factors, *optional), _nodes(*stored.views)
        marks, read = marks - read - of_weights - {candidate.base}, marks | read
        region = self._region(read | of_weights, stored.sums, dtype, marks)
        changed = written_before_backward(self.view, root, of_weights)
        prove(not changed, Reason.OPERAND_CHANGED, "written before the backward", min(changed, default=None))
        prove(not routed.is_of_all or gains_without_choices(fake_of(x.node).device), Reason.ALL_EXPERTS)
        bounds, E = self._bounds(routed), stored.num_experts
        reading = Reading(self.evaluator, self.formulas, tuple(zip(candidate.terms, experts, strict=True)))
        selects = not (routed.is_dense or _all_below(bounds, E) or _has_row_groups(region))
        return MoEMatch(
            root=root, reading=reading, region=region, x=x, experts=routed.ids, weights=weights,
            scales=scales, weights_on_input=bool(lead.scale),
            w_up=stored.w_up, b_up=stored.b_up, w_down=stored.w_down, b_down=stored.b_down,
            activation=lead.activation, spelling=_spelling(region, routed),
            T=math.prod(candidate.value.shape[:-1]), K=routed.top_k, E=E, D=lead.feature_in.args[1], F=lead.width.args[1],
            out_width=candidate.value.shape[-1], dropout=lead.dropout, dtype=dtype,
            chosen=candidate.chosen, base=candidate.base, kept=routed.kept,
            numbers=_numbers(routed.numbers, E, bounds) if routed.is_dense else (), zero_computation=plain,
            named=named, parameters=stored.parameters, low_rank_up=stored.low_rank_up, low_rank_down=stored.low_rank_down,
            subscripts=selects, copied=written_before_backward(self.view, root, read),
        )  # fmt: skip

    def _normal(self, experts: Sequence[ExpertTerm]) -> list[ExpertTerm]:
        """Experts without what their input has in common with other spellings: scales of tokens, masks, padding."""
        self.evaluator.learn_largest(self.view.numbers)
        experts = [with_scaled_x(self.algebra, self.finder, expert) for expert in experts]
        experts = [without_input_mask(self.algebra, expert, self.feature) for expert in experts]
        return [without_padding(self.algebra, expert, self.finder.token) for expert in experts]

    def _routed(self, experts: list[ExpertTerm]) -> _Routed:
        scored = [self._scored_routing(expert) for expert in experts]
        if all(scored):
            return self._routed_by_scores(scored)
        try:
            return self._routed_by_ids(experts, [self._routing(expert) for expert in experts])
        except Declined as declined:
            scored = [self._scored_routing(expert, named=True) for expert in experts]
            if not all(scored):
                raise
            try:
                return self._routed_by_scores(scored)
            except Declined as further:
                raise max(declined, further, key=lambda each: each.reason.rank) from None

    def _routed_by_scores(self, scored: Sequence[tuple[ExpertTerm, Routing]]) -> _Routed:
        experts, given = [expert for expert, _ in scored], [routing for _, routing in scored]
        routings, found = find_scored(self.algebra, self.finder, given)
        order, numbers = expert_order(routings)
        top_k = routings[0].ids.args[1]
        return _Routed(
            experts, routings, order, numbers, None, found.weights, found.masks, top_k, named=found.named, scored=True
        )

    def _routed_by_ids(self, experts: list[ExpertTerm], routings: list[Routing]) -> _Routed:
        try:
            return self._routed_as(experts, routings)
        except Declined:
            apart = [with_kept_apart(self.algebra, routing) for routing in routings]
            if apart == routings:
                raise
        return self._routed_as(experts, apart)

    def _routed_as(self, experts: list[ExpertTerm], routings: list[Routing]) -> _Routed:
        order, numbers = expert_order(routings)
        depth = MAX_PROJECTIONS if experts[0].scale else 0
        ids, weights, top_k, scales = find_scaled_routing(self.algebra, self.finder, routings, depth)
        kept = find_kept(self.algebra, self.finder, routings, ids)
        return _Routed(experts, routings, order, numbers, ids, weights, scales, top_k, kept)

    def _scored_routing(self, expert: ExpertTerm, *, named: bool = False) -> tuple[ExpertTerm, Routing] | None:
        index = expert_index(self.algebra, expert, self.feature)
        by_number = index is None or index in expert.binders
        return read_scored(self.algebra, expert, index, self.finder.names, named=named) if by_number else None

    def _routing(self, expert: ExpertTerm) -> Routing:
        index = expert_index(self.algebra, expert, self.feature)
        if index is None or index in expert.binders:
            try:
                return read_compared(self.algebra, index, expert.binders, expert.routing, expert.scale)
            except Declined:
                _prove_reads_tokens(expert, index)
                raise
        factors = (*expert.routing, *expert.scale)
        permuted = index.kind == "group" or any(True for _ in subexpressions(index, is_permuted))
        prove(not permuted, Reason.SAME_PERMUTATION, f"the rows are in groups, {NO_COUNTS}")
        return read_indexed(index, expert.binders, factors)

    def _in_order_of_memory(self, routed: _Routed) -> _Routed:
        """Experts whose weights are parts of one tensor by their places there, which their numbers may not be."""
        if not (routed.numbers and routed.is_by_number):
            return routed
        experts = [routed.experts[i] for i in routed.order]
        weights, features = [e.down.weight for e in experts], [(e.width, self.feature) for e in experts]
        places = order_in_memory(self.algebra, weights, features)
        order, numbers = ([own[place] for place in places] for own in (routed.order, routed.numbers))
        return replace(routed, order=order, numbers=tuple(numbers))

    def _stored(self, routed: _Routed, split: bool) -> _Stored:
        experts, order, feature = routed.experts, routed.order, self.feature
        of_up: list[Additions] = []
        of_down: list[Additions] = []
        sums: frozenset[fx.Node] = frozenset()
        if split:
            sums = sums_of(self.view, experts, self.view.position[self.root])
            parts = [split_expert(self.evaluator, expert, feature) for expert in experts]
            experts, of_up, of_down = (list(part) for part in zip(*parts, strict=True))
        chosen = [experts[i] for i in order]
        indices = [weight_index(routed.routings[i]) for i in order]
        num_experts = extent(routed.routings[order[0]].expert, len(order))

        def views(leaves: list[list[Expr]], features: list[tuple[Expr, ...]], halves: bool):
            return weight_views(self.algebra, leaves, features, indices, num_experts, halves_axis=halves)

        parameters = find_parameters(self.algebra, self.finder, [routed.routings[i].expert for i in order], chosen)
        w_up, E = views([[u.weight for u in e.up] for e in chosen], [(e.width, e.feature_in) for e in chosen], True)
        num_experts = E
        (w_down,), _ = views([[e.down.weight] for e in chosen], [(e.width, feature) for e in chosen], False)
        low_rank_up: tuple[tuple[Factors, ...], ...] = ()
        low_rank_down: tuple[Factors, ...] = ()
        if split:
            widths, inputs, outputs = [e.width for e in chosen], [e.feature_in for e in chosen], [feature] * len(chosen)
            up, down = [of_up[i] for i in order], [of_down[i] for i in order]
            low_rank_up = factor_views(self.evaluator, up, widths, inputs, indices, E)
            (low_rank_down,) = factor_views(self.evaluator, down, outputs, widths, indices, E)
        b_up: tuple[WeightView, ...] = ()
        if _all_or_none([u.bias for e in chosen for u in e.up]):
            b_up, _ = views([[u.bias for u in e.up] for e in chosen], [(e.width,) for e in chosen], True)
        b_down = None
        if _all_or_none([e.down.bias for e in chosen]):
            (b_down,), _ = views([[e.down.bias] for e in chosen], [(feature,) for _ in chosen], False)
        return _Stored(E, parameters, w_up, b_up, w_down, b_down, low_rank_up, low_rank_down, sums)

    def _zero_computation(self, routed: _Routed, x: Operand) -> tuple[ZeroComputation, ...]:
        x_value = unshaped(self.view, x.node, self.root)
        return find_zero_computation(
            self.algebra, self.finder, self.candidate.added, self.feature, routed.routings,
            is_x=lambda operand: unshaped(self.view, operand.node, self.root) is x_value,
        )  # fmt: skip

    def _prove_slots(self, routed: _Routed, plain: tuple[ZeroComputation, ...], E: int) -> None:
        """Each slot has one expert, which exists, and one weight."""
        gathered, routings, bounds = routed.is_gathered, routed.routings, self._bounds(routed)
        prove(not (plain and gathered), Reason.SLOT_WEIGHTS, "no weights of slots for experts without projections")
        prove(routed.is_dense or all(never_negative(r.ids) for r in routings), Reason.SLOT_WEIGHTS, "ids that may be negative")
        prove(_all_below(bounds, E) or not gathered, Reason.SLOT_WEIGHTS, "ids that may be no expert's")
        known = E + sum(len(own.numbers) for own in plain)  # the number behind them may stand for none
        others = any(isinstance(bound, int) and bound > known + 1 for bound in bounds)
        is_all = not others and (known > 1 or not routed.is_dense)
        fits = routed.top_k > 0 and (routed.top_k <= E or is_all)
        prove(fits, Reason.EXPERT_COVERAGE, f"{routed.top_k} slots for {E} experts of more")

    def _bounds(self, routed: _Routed) -> list[Size | None]:
        """What the ids of each routing are below, as far as is known."""
        return [self.algebra.extent(routing.ids) for routing in routed.routings]

    def _in_one_dtype(self, stored: _Stored, x: Operand) -> tuple[_Stored, torch.dtype]:
        dtype = stored.w_down.dtype
        b_up = tuple(_in_dtype(view, dtype) for view in stored.b_up)
        b_down = stored.b_down and _in_dtype(stored.b_down, dtype)
        same = all(view.dtype == dtype for view in stored.w_up)
        prove(same and x.dtype == dtype, Reason.DTYPE_PATH, "tokens and weights of several dtypes")
        parameters = tuple(replace(operand, dtype=at_least_fp32(dtype)) for operand in stored.parameters)
        return replace(stored, b_up=b_up, b_down=b_down, parameters=parameters), dtype

    def _prove_unchanged(self, stored: _Stored) -> None:
        """Weights hold at the layer's end what its products read."""
        position = self.view.position[self.root]
        for value in (value for view in stored.views for value in view.values):
            prove(self.view.value_at(value.node, position) is value, Reason.OPERAND_CHANGED, node=value.node)

    def _region(self, operands: Set[fx.Node], sums: Set[fx.Node], dtype: torch.dtype, marks: Set[fx.Node]) -> Region:
        """The nodes that go, among them ``sums``, if they can."""
        try:
            return prove_region(self.view, self.root, operands, dtype, self.candidate.base, marks)
        except Declined:
            if not sums:
                raise
            return prove_region(self.view, self.root, operands | sums, dtype, self.candidate.base, marks)


def _nodes(*operands: Operand | WeightView | None) -> set[fx.Node]:
    return {node for operand in operands if operand is not None for node in operand.nodes}


def gains_without_choices(device: torch.device) -> bool:
    """True if experts that all take every token gain by the ops, which gather rows; on a CPU that costs more than it saves."""
    return device.type != "cpu"


def _all_below(bounds: list[Size | None], E: int) -> bool:
    return all(isinstance(bound, int) and bound <= E for bound in bounds)


def _numbers(numbers: tuple[int, ...], E: int, bounds: list[Size | None]) -> tuple[int, ...]:
    """The ids of experts that ids are compared with, in order; none if there are no others than 0 to E-1, as far as is known."""
    all_of_them = not any(isinstance(bound, int) and bound > E for bound in bounds)
    in_order = numbers in ((), tuple(range(E)))
    return () if in_order and all_of_them else numbers or tuple(range(E))


def _prove_reached(activation: str, x: Operand, stored: _Stored) -> None:
    """Nothing would have a gradient of zeros that has none as written, since the activation only compares it.

        torch.where(gate > self.bound, gate, up)            but not where the bound is a parameter
    """
    if activation == IDENTITY or not (unreached := without_gradient(activation)):
        return
    # Gate and up, where they are views of their own.
    halves = [
        (view, *stored.b_up[i : i + 1], *(own for group in stored.low_rank_up[i : i + 1] for own in _views(group)))
        for i, view in enumerate(stored.w_up)
    ]
    names = GATED_SYMBOLS if len(halves) == 2 else UNGATED_SYMBOLS if unreached.issuperset(UNGATED_SYMBOLS) else ()
    of: list[tuple[str, Sequence[WeightView | Operand]]] = [*zip(names, halves, strict=False)]
    of += [(names[0], [x])] if names and unreached.issuperset(names) else []
    of += [(name, [own]) for name, own in zip(PARAMETER_SYMBOLS, stored.parameters, strict=False)]
    reached = {node for name, views in of if name not in unreached for view in views for node in view.nodes}
    for node in (node for name, views in of if name in unreached for view in views for node in view.nodes):
        needs = fake_of(node).requires_grad and node not in reached
        prove(not needs, Reason.GRADIENTS, f"'{node.name}' is only compared, which passes no gradient to it", node)


def _all_or_none(biases: list[Expr | None]) -> bool:
    present = [b is not None for b in biases]
    prove(all(present) or not any(present), Reason.WEIGHT_LAYOUT, "some experts have a bias")
    return all(present)


def _in_dtype(bias: WeightView, dtype: torch.dtype) -> WeightView:
    """A bias as the products it is added to, whose sum the ops round to their dtype anyway."""
    prove(bias.dtype.itemsize >= dtype.itemsize, Reason.DTYPE_PATH, "a bias of less precision")
    return bias if bias.dtype == dtype else replace(bias, dtype=dtype, cast=True)


def _spelling(region: Region, routed: _Routed) -> str:
    routing = routed.routings[0]
    if routed.is_of_all:
        return "every expert on every token"
    names = {target_name(node) for node in region.nodes}
    if not names.isdisjoint(GROUPED_PRODUCTS):
        return "sorted grouped_mm"
    fakes = (fake_of(node) for node in region.nodes)
    if any(isinstance(fake, torch.Tensor) and free_unbacked_symbols(fake) for fake in fakes):
        return "loop over experts"
    if routing.expert is None:
        return "gathered weights"
    return "dense batched" if routing.expert.kind == "var" else "masked experts"


def _has_row_groups(region: Region) -> bool:
    return not {target_name(node) for node in region.nodes}.isdisjoint((*GROUPED_PRODUCTS, "searchsorted", "bucketize"))
