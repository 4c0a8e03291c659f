"""Which layers of a graph are Mixtures-of-Experts: every proof obligation, in order.

A candidate is a node that may be the last step of a sum over experts. Its element is expanded by `evaluator`, read as a
sum of expert terms by `expert_term` and `routing_term`, and the operands that the terms speak of are looked up
in the graph by `find_operands` and `weight_layout`. Nothing here changes the graph.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.kernels.formulas.expression import GATED_SYMBOLS, PARAMETER_SYMBOLS, UNGATED_SYMBOLS
from moeblaze_ops.kernels.formulas.named import IDENTITY, is_zero_at_zero
from moeblaze_ops.lowering.evaluate.evaluator import MAX_PROJECTIONS, Evaluator, Unroll
from moeblaze_ops.lowering.facts.non_negative import never_negative
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.dependencies import dependencies, reached
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, at_least_fp32, inplace_name, target_name
from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import MAX_OPERANDS, Expr, TooLarge, factors_of, subexpressions
from moeblaze_ops.lowering.match.internal_errors import tolerate
from moeblaze_ops.lowering.match.match_result import Decline, MoEMatch, furthest
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand
from moeblaze_ops.lowering.match.operands.find_parameters import find_parameters
from moeblaze_ops.lowering.match.operands.find_routing import find_kept, find_x, is_permuted, with_scaled_x
from moeblaze_ops.lowering.match.operands.find_scales import (
    find_scaled_routing,
    unrounded_weights,
    usable_scale,
    usable_weights,
)
from moeblaze_ops.lowering.match.operands.find_scored import find_scored, usable_named
from moeblaze_ops.lowering.match.operands.low_rank import Additions, Factors, factor_views, has_low_rank, split_expert, sums_of
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView, weight_views
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.region import Region, prove_region, written_before_backward
from moeblaze_ops.lowering.match.residual import adds, bases
from moeblaze_ops.lowering.match.same_layer import Chosen, chosen_by, is_part, is_sum_of, values_of
from moeblaze_ops.lowering.match.terms.activation import Formulas, without_gradient
from moeblaze_ops.lowering.match.terms.expert_coverage import (
    expert_order,
    extent,
    prove_distinct,
    prove_shared_weights,
    weight_index,
)
from moeblaze_ops.lowering.match.terms.expert_term import (
    ExpertTerm,
    describe,
    is_chosen_bias,
    is_expert_term,
    is_scored_term,
    read_expert,
)
from moeblaze_ops.lowering.match.terms.padding import without_padding
from moeblaze_ops.lowering.match.terms.routing_term import (
    Routing,
    expert_index,
    read_compared,
    read_indexed,
    read_scored,
    without_input_mask,
)
from moeblaze_ops.lowering.match.zero_computation import (
    ZeroComputationTerm,
    find_zero_computation,
    is_routed,
    read_terms,
)

_COMBINES = frozenset((
    "add", "sum", "index_add", "scatter_add", "scatter", "put", "setitem", "__setitem__", "index_put", "einsum", "bmm", "matmul",
    "index_copy", "copy", "addcmul", "scatter_reduce", "where", "tensordot",
))  # fmt: skip

Sum = tuple[fx.Node, list[Expr], list[Expr]]
"""What a sum starts from, the experts that it adds, and its other terms."""

_NO_COUNTS = "not proven to end at counts of the sorted ids, as those of torch.bincount(ids, minlength=E).cumsum(0) do"

_OF_TERMS = frozenset((
    Reason.OTHER_TERMS, Reason.ROUTING, Reason.SLOT_WEIGHTS, Reason.NOT_TWO_PROJECTIONS, Reason.DIFFERENT_INPUTS,
    Reason.EXPERT_COVERAGE,
))  # fmt: skip
"""Why a sum may be no layer whose terms are not told apart."""

_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def view_of(graph: fx.Graph) -> GraphView:
    """What layers are looked for in."""
    return GraphView(graph, TABLE)


class Matcher:
    """Finds the layers of one graph: those in blocks without gradients in a view of numbers only, and all others in another."""

    def __init__(self, view: GraphView):
        self.view = view
        self._combining = {node: number for number, node in enumerate(filter(_may_combine, view.position))}
        self._evaluate(frozenset())

    def _evaluate(self, opaque: frozenset[Value]) -> None:
        """Start over with what is known of elements, and do not look into ``opaque`` values."""
        self._opaque = opaque
        self._evaluator = Evaluator(opaque)
        self._algebra = self._evaluator.algebra
        self._formulas = Formulas(self._algebra)
        self._expert_terms: dict[Expr, bool] = {}
        self._counted: dict[Value, Counter] = {}
        self._choices: dict[tuple[Expr, Expr], Chosen] = {}

    def matches(self) -> list[MoEMatch | Decline]:
        """Every layer in graph order; of several failed attempts at one layer the one that came furthest."""
        found: list[MoEMatch] = []
        declined: list[Decline] = []
        taken: set[fx.Node] = set()
        parts: set[fx.Node] = set()  # sums of some of the experts of a layer that was declined
        for node in reversed(self._combining):
            if node in taken or node in parts:
                continue
            if self.view.is_gradient_off(node) is not self.view.numbers_only:
                continue
            result = self._attempt(node)
            if isinstance(result, MoEMatch):
                found.append(result)
                taken.update(result.region.nodes)
            elif result is not None:
                declined.append(result)
                parts.update(self._parts(result, parts))
        for decline in declined:
            if decline.reason is Reason.OTHER_TERMS and decline.root not in taken and not self._is_around(decline, found):
                result = self._attempt(decline.root, onto_base=True)
                if isinstance(result, MoEMatch) and not self._is_added_to_base(result, found):
                    found.append(result)
                    taken.update(result.region.nodes)
        results: list[MoEMatch | Decline] = [*found, *(decline for decline in declined if decline.root not in taken)]
        declined = [r for r in results if isinstance(r, Decline) and not self._is_around(r, results)]
        declined = furthest([r for r in declined if not any(self._is_beginning(r, whole) for whole in declined)])
        declined = [r for r in declined if not any(self._is_step(r, whole) for whole in declined)]
        return sorted([*found, *declined], key=lambda r: self.view.position[r.root])

    def _is_around(self, outer: Decline, results: Sequence[MoEMatch | Decline]) -> bool:
        """Whether all experts behind a candidate are those of other results that it depends on, as in ``x + layer(x)``."""
        inner = [result for result in results if self._is_behind(result, outer)]
        inner = [result for result in inner if isinstance(result, MoEMatch) or result.has_experts or not outer.has_experts]
        if outer.rows:
            nodes = set(dependencies(self.view, *(result.root for result in inner)))
            return all(row.node in nodes for row in outer.rows)
        if outer.reason is not Reason.OTHER_TERMS:  # with the same experts it may be the same layer, a step further
            inner = [result for result in inner if isinstance(result, MoEMatch) or result.chosen != outer.chosen]
        return is_sum_of(outer.chosen, [result.chosen for result in inner])

    def _is_added_to_base(self, outer: MoEMatch, found: Sequence[MoEMatch]) -> bool:
        """Whether a layer onto a base is one that was found without it."""
        return any(inner.chosen == outer.chosen for inner in found if self._is_behind(inner, outer))

    def _is_step(self, part: Decline, whole: Decline) -> bool:
        """Whether a candidate is a step of the sum of another, which has more experts and was declined for the same reason."""
        fewer = part.reason is whole.reason and 0 < part.chosen.total() < whole.chosen.total() and part.chosen <= whole.chosen
        return fewer and self._is_behind(part, whole)

    def _is_beginning(self, part: Decline, whole: Decline) -> bool:
        """Whether a candidate without experts is a step of the sum of another, to which experts with projections come later."""
        begins = not part.has_experts and whole.has_experts and part.ids <= whole.ids
        return begins and self._is_behind(part, whole)

    def _parts(self, whole: Decline, known: set[fx.Node]) -> Iterator[fx.Node]:
        """Nodes beside ``known`` ones that sum some of the experts of a declined candidate: none of them is a layer itself."""
        total = self._result(whole.root) if whole.has_experts else None
        if total is None:
            return
        of_data = free_unbacked_symbols(total.shape)
        behind = self._behind[whole.root]
        for node, number in self._combining.items():
            if not behind >> number & 1 or node in known or (value := self._result(node)) is None:
                continue
            if value.op == "contract" and free_unbacked_symbols(value.shape) - of_data:
                continue  # a projection of rows of one expert
            experts = self._experts_of(value)
            if experts and is_part(experts, whole.chosen):
                yield node

    @cached_property
    def _behind(self) -> dict[fx.Node, int]:
        """The nodes at which a sum can end that each node depends on."""
        return reached(self.view, self._combining)

    def _is_behind(self, inner: MoEMatch | Decline, outer: MoEMatch | Decline) -> bool:
        """Whether a result depends on that of another."""
        return inner.root is not outer.root and self._behind[outer.root] >> self._combining[inner.root] & 1 == 1

    def _experts_of(self, value: Value) -> Counter:
        known = self._counted.get(value)
        if known is None:
            known = self._counted[value] = self._experts(self._terms(value), self._indices(value)[1])
        return known

    def _experts(self, terms: Sequence[Expr], feature: Expr) -> Counter:
        return self._chosen((t for t in terms if self._is_expert(t, feature) or is_scored_term(t, feature)), feature)

    def _attempt(self, root: fx.Node, *, onto_base: bool = False) -> MoEMatch | Decline | None:
        try:
            return self.match(root, onto_base=onto_base)
        except Exception as error:
            return Decline(root, root, Reason.INTERNAL, tolerate(error))

    def match(self, root: fx.Node, *, onto_base: bool = False) -> MoEMatch | Decline | None:
        """The layer whose output ``root`` completes, or adds to something else if ``onto_base``; None when it is not like one."""
        value = self._result(root)
        if value is None:
            return None
        tokens, feature = self._indices(value)
        terms = self._terms(value)
        experts = [term for term in terms if self._is_expert(term, feature)] or self._scored(terms, feature)
        ids = frozenset(values_of(self._chosen(terms, feature)))
        if not experts:
            rows = {leaf.args[0] for term in terms for leaf in subexpressions(term, _is_row_product)}
            if rows:
                ends = min(rows, key=lambda row: self.view.position[row.node]).args[2].node
                detail = f"the groups of '{ends.name}' are {_NO_COUNTS}"
                return Decline(root, ends, Reason.SAME_PERMUTATION, detail, frozenset(rows), rows=frozenset(rows))
            masked = [term for term in terms if _is_masked(term) and _is_vector(term, feature)]
            if len(masked) < 2:
                return None
            counts = self._chosen(masked, feature)
            detail = describe(masked[0], feature)
            return Decline(root, root, Reason.NOT_TWO_PROJECTIONS, detail, ids, counts, has_experts=False)
        others = list((Counter(terms) - Counter(experts)).elements())
        try:
            written = fake_of(self.view.writes.get(root, root))
            prove(not (self.view.numbers_only and written.requires_grad), Reason.CONTEXT, "what is written to keeps its gradient")
            base, own = None, experts
            if others and onto_base:
                base, own, others = self._onto_base(root, value, terms, experts, feature)
            prove(all(is_routed(term, feature) for term in others), Reason.OTHER_TERMS)
            added = [part for term in others for part in read_terms(self._algebra, term, feature, value.dtype)]
            return self._prove(root, value, tokens, feature, own, base, added)
        except TooLarge:
            return Decline(root, root, Reason.OTHER_TERMS, "too many of them", ids, self._chosen(experts, feature))
        except Declined as declined:
            chosen = self._chosen(experts, feature)
            decline = Decline(root, declined.node or root, declined.reason, declined.detail, ids, chosen)
        if decline.reason not in _OF_TERMS or not (onto_base or all(is_routed(term, feature) for term in others)):
            return decline
        again = self._with_whole_tokens(root, value, tokens, feature, experts, onto_base)
        if isinstance(again, Decline) and decline.reason is Reason.OTHER_TERMS:
            return replace(decline, reason=again.reason, detail=again.detail or decline.detail, node=again.node)
        return again if isinstance(again, MoEMatch) else decline

    def _with_whole_tokens(
        self, root: fx.Node, value: Value, tokens: tuple[Expr, ...], feature: Expr, experts: Sequence[Expr], onto_base: bool
    ) -> MoEMatch | Decline | None:
        """The layer, if it is one as soon as what its experts are given is not looked into, where their sum adds that itself.

            x = h * torch.rsqrt(h.square().mean(-1, keepdim=True)) * gain
            for e in range(6): out = out + (experts[e](x) if e < 4 else x) * share(e)
        """
        x = None if self._opaque else self._given(root, value, tokens, feature, experts)
        if x is None or not adds(value, x):
            return None
        apart = copy(self)
        apart._evaluate(frozenset((x,)))
        return apart.match(root, onto_base=onto_base)

    def _given(
        self, root: fx.Node, value: Value, tokens: tuple[Expr, ...], feature: Expr, experts: Sequence[Expr]
    ) -> Value | None:
        """What experts are given, the latest if some of the terms are no experts of this layer."""
        finder = Finder(self.view, self._evaluator, root, tokens, value.shape[:-1])
        found: dict[Value, int] = {}
        for term in experts:
            try:
                expert = with_scaled_x(self._algebra, finder, read_expert(self._algebra, self._formulas, term, feature))
                node = find_x(finder, [expert]).node
            except (Declined, TooLarge):
                continue
            found[self._unshaped(node, root)] = self.view.position[node]
        return max(found, key=found.__getitem__, default=None)

    def _unshaped(self, node: fx.Node, root: fx.Node) -> Value:
        """What a node holds at ``root``, in the shape in which it was made."""
        value = self.view.value_at(node, self.view.position[root])
        while value.op in ("reshape", "cast"):
            value = value.args[0]
        return value

    def _onto_base(self, root: fx.Node, value: Value, terms: Sequence[Expr], experts: Sequence[Expr], feature: Expr) -> Sum:
        """What the sum of a layer starts from, which may hold layers before it, and none of its own experts; before any zeros.

            out = shared(x); for e in range(E): out = out + experts[e](x) * share(e)
            out = odd(x) * share(0); for e in range(1, E): ...          not from the first expert: what it does is no layer's
        """
        found: Sum | None = None
        for node, base in bases(self.view, root, value):
            below = Counter(self._terms(base))
            added = list((Counter(terms) - below).elements())
            own = [term for term in added if term in experts]
            others = [term for term in added if term not in own]
            before = self._experts(list(below), feature) + self._chosen((t for t in below if is_routed(t, feature)), feature)
            apart = values_of(self._chosen(own, feature)).isdisjoint(values_of(before))
            same = found is None or found[1:] == (own, others)
            if own and apart and same and below <= Counter(terms) and all(is_routed(term, feature) for term in others):
                found = node, own, others
        prove(found is not None, Reason.OTHER_TERMS)
        return found

    def _result(self, root: fx.Node) -> Value | None:
        target = self.view.writes.get(root, root)
        value = self.view.value_at(target, self.view.position[root])
        fits = isinstance(value, Value) and len(value.shape) >= 2 and value.dtype.is_floating_point
        return value if fits else None

    def _indices(self, value: Value) -> tuple[tuple[Expr, ...], Expr]:
        """A symbolic token and feature."""
        *sizes, width = value.shape
        tokens = tuple(self._algebra.zero if n == 1 else self._algebra.var(i, n, "t") for i, n in enumerate(sizes))
        return tokens, self._algebra.var(len(sizes), width, "d")

    def _terms(self, value: Value) -> tuple[Expr, ...]:
        tokens, feature = self._indices(value)
        try:
            element = self._evaluator.element(value, (*tokens, feature))
            terms = tuple(islice(self._distributed(element), MAX_OPERANDS + 1))
        except (Unroll, TooLarge):
            return ()
        if len(terms) > MAX_OPERANDS:
            return ()
        experts = [term for term in terms if self._is_expert(term, feature)]
        # The bias of an expert that is not weighted, or weighted on its input, is a term of its own.
        biases = [term for term in terms if is_chosen_bias(term)]
        if len(experts) != 1 or not biases:
            return terms
        others = [term for term in terms if term not in (*experts, *biases)]
        return self._algebra.add(*experts, *biases), *others

    def _distributed(self, e: Expr) -> Iterator[Expr]:
        """Terms of a sum; what is around a sum of several experts is multiplied out, or summed term by term."""
        if e.kind == "add":
            for term in e.args:
                yield from self._distributed(term)
        elif e.kind == "sum" and _sums_experts(e):
            var, body = self._algebra.open(e)
            for term in self._distributed(body):
                yield self._algebra.sum(var, term)
        elif (
            e.kind == "mul"
            and len(inner := [f for f in e.args if _sums_experts(f)]) == 1
            and (terms := list(self._distributed(inner[0]))) != inner
        ):
            others = [f for f in e.args if f is not inner[0]]
            for term in terms:
                yield from self._distributed(self._algebra.mul(term, *others))
        elif e.kind == "mul" and e.has_dot and (choices := next(filter(_adds_choices, e.args), None)) is not None:
            others = [f for f in e.args if f is not choices]
            for term in choices.args:
                yield from self._distributed(self._algebra.mul(term, *others))
        else:
            yield e

    def _is_expert(self, term: Expr, feature: Expr) -> bool:
        known = self._expert_terms.get(term)
        if known is None:
            known = self._expert_terms[term] = is_expert_term(term, feature)
        return known

    def _chosen(self, terms: Iterable[Expr], feature: Expr) -> Counter:
        """How often each expert is chosen."""
        return Counter(self._choice(term, feature) for term in terms)

    def _scored(self, terms: Sequence[Expr], feature: Expr) -> list[Expr]:
        """Terms that are experts beside scores that leave tokens out, of which one alone may be any gated block."""
        found = [term for term in terms if is_scored_term(term, feature)]
        return found if len(found) > 1 else []

    def _choice(self, term: Expr, feature: Expr) -> Chosen:
        known = self._choices.get((term, feature))
        if known is None:
            known = self._choices[term, feature] = chosen_by(term, feature)
        return known

    def _prove(
        self, root: fx.Node, value: Value, tokens: tuple[Expr, ...], feature: Expr, terms: Sequence[Expr], base: fx.Node | None,
        added: Sequence[ZeroComputationTerm],
    ) -> MoEMatch:  # fmt: skip
        experts = [read_expert(self._algebra, self._formulas, term, feature) for term in terms]
        if not has_low_rank(experts):
            return self._prove_experts(root, value, tokens, feature, terms, experts, base, added)
        try:
            return self._prove_experts(root, value, tokens, feature, terms, experts, base, added, split=True)
        except Declined as declined:
            try:
                return self._prove_experts(root, value, tokens, feature, terms, experts, base, added)
            except Declined:
                raise declined from None

    def _prove_experts(
        self, root: fx.Node, value: Value, tokens: tuple[Expr, ...], feature: Expr, terms: Sequence[Expr],
        experts: Sequence[ExpertTerm], base: fx.Node | None, added: Sequence[ZeroComputationTerm], split: bool = False,
    ) -> MoEMatch:  # fmt: skip
        """The layer, its low-rank factors apart from the weights where they are ``split``."""
        finder = Finder(self.view, self._evaluator, root, tokens, value.shape[:-1])
        experts = [with_scaled_x(self._algebra, finder, expert) for expert in experts]
        experts = [without_input_mask(self._algebra, expert, feature) for expert in experts]
        experts = [without_padding(self._algebra, expert, finder.token) for expert in experts]
        scored = [self._scored_routing(expert, feature, finder.token) for expert in experts]
        named, ids = None, None
        if all(scored):
            experts, routings = [expert for expert, _ in scored], [routing for _, routing in scored]
            routings, found = find_scored(self._algebra, finder, routings)
            order, numbers = expert_order(routings)
            weights, scales, top_k, kept, named = found.weights, found.masks, routings[0].ids.args[1], None, found.named
        else:
            routings = [self._routing(expert, feature) for expert in experts]
            order, numbers = expert_order(routings)
            depth = MAX_PROJECTIONS if experts[0].scale else 0
            ids, weights, top_k, scales = find_scaled_routing(self._algebra, finder, routings, depth)
            kept = find_kept(self._algebra, finder, routings)
        x = find_x(finder, experts)
        prove(len({(e.activation, bool(e.scale)) for e in experts}) == 1, Reason.DIFFERENT_ACTIVATIONS)
        lead = experts[0]
        prove_shared_weights(self._algebra, routings, experts)
        of_up: list[Additions] = []
        of_down: list[Additions] = []
        sums: frozenset[fx.Node] = frozenset()
        if split:
            sums = sums_of(self.view, experts, self.view.position[root])
            parts = [split_expert(self._evaluator, expert, feature) for expert in experts]
            experts, of_up, of_down = (list(part) for part in zip(*parts, strict=True))
        chosen = [experts[i] for i in order]
        indices = [weight_index(routings[i]) for i in order]
        num_experts = extent(routings[order[0]].expert, len(order))

        def views(leaves: list[list[Expr]], features: list[tuple[Expr, ...]], halves: bool):
            return weight_views(self._algebra, leaves, features, indices, num_experts, halves_axis=halves)

        parameters = find_parameters(self._algebra, finder, [routings[i].expert for i in order], chosen)
        w_up, E = views([[u.weight for u in e.up] for e in chosen], [(e.width, e.feature_in) for e in chosen], True)
        num_experts = E
        (w_down,), _ = views([[e.down.weight] for e in chosen], [(e.width, feature) for e in chosen], False)
        low_rank_up: tuple[tuple[Factors, ...], ...] = ()
        low_rank_down: tuple[Factors, ...] = ()
        if split:
            widths, inputs, outputs = [e.width for e in chosen], [e.feature_in for e in chosen], [feature] * len(chosen)
            up, down = [of_up[i] for i in order], [of_down[i] for i in order]
            low_rank_up = factor_views(self._evaluator, up, widths, inputs, indices, E)
            (low_rank_down,) = factor_views(self._evaluator, down, outputs, widths, indices, E)
        b_up: tuple[WeightView, ...] = ()
        if _all_or_none([u.bias for e in chosen for u in e.up]):
            b_up, _ = views([[u.bias for u in e.up] for e in chosen], [(e.width,) for e in chosen], True)
        b_down = None
        if _all_or_none([e.down.bias for e in chosen]):
            (b_down,), _ = views([[e.down.bias] for e in chosen], [(feature,) for _ in chosen], False)
        if fake_of(self.view.writes.get(root, root)).requires_grad:
            _prove_reached(lead.activation, x, w_up, b_up, low_rank_up, parameters)
        on_input = bool(lead.scale)
        by_number = not (kept or all(scored)) and all(scale.width is not None for scale in scales)
        in_order = numbers in ((), tuple(range(len(numbers))))
        prove(in_order or by_number, Reason.EXPERT_COVERAGE, f"experts {list(numbers)}, of which some have numbers of their own")
        prove(not added or by_number, Reason.ROUTING, "experts that are routed otherwise than those without projections")
        x_value = self._unshaped(x.node, root)
        plain = find_zero_computation(
            self._algebra, finder, added, feature, routings, None if scales else (ids, weights, top_k),
            is_x=lambda operand: self._unshaped(operand.node, root) is x_value,
        )  # fmt: skip
        dense = routings[0].expert is not None
        of_zeros = on_input and dense and not all(routing.selects_output for routing in routings)
        prove(not (of_zeros and (b_up or b_down)), Reason.ROUTING, "a bias is added for unselected experts")
        prove(not of_zeros or is_zero_at_zero(lead.activation), Reason.ACTIVATION, "of a zero input, is not zero")
        gathered = weights is not None and weights.gathered
        prove(not (plain and gathered), Reason.SLOT_WEIGHTS, "no weights of slots for experts without projections")
        prove_distinct(self._algebra, routings, of_all=gathered and top_k > 1)
        prove(dense or all(never_negative(r.ids) for r in routings), Reason.SLOT_WEIGHTS, "ids that may be negative")
        bounds = [self._algebra.extent(routing.ids) for routing in routings]
        bounded = all(isinstance(bound, int) and bound <= E for bound in bounds)
        prove(bounded or not gathered, Reason.SLOT_WEIGHTS, "ids that may be no expert's")
        prove(top_k <= E, Reason.EXPERT_COVERAGE, f"{top_k} slots for {E} experts")
        dtype = w_down.dtype
        b_up = tuple(_in_dtype(view, dtype) for view in b_up)
        b_down = b_down and _in_dtype(b_down, dtype)
        same = all(view.dtype == dtype for view in w_up)
        prove(same and x.dtype == dtype, Reason.DTYPE_PATH, "tokens and weights of several dtypes")
        weights, named = unrounded_weights(usable_weights(weights, dtype)), named and usable_named(named, dtype)
        scales = tuple(usable_scale(scale, dtype) for scale in scales)
        D = value.shape[-1]
        prove(lead.feature_in.args[1] == D, Reason.WEIGHT_LAYOUT, "output width differs from input width")
        factors = [view for group in (*low_rank_up, low_rank_down) for added in group for view in added.views]
        views_used = (*w_up, *b_up, w_down, *([b_down] if b_down else []), *factors)
        position = self.view.position[root]
        for stored in (v for view in views_used for v in view.values):
            prove(self.view.value_at(stored.node, position) is stored, Reason.OPERAND_CHANGED, node=stored.node)
        parameters = tuple(replace(operand, dtype=at_least_fp32(dtype)) for operand in parameters)
        of_plain = (operand for own in plain for operand in (own.vector, own.of_token))
        optional = (ids, weights, kept, *of_plain, *((named.tokens, named.weights) if named else ()))
        of_tokens = (x, *parameters, *(s.operand for s in scales), *filter(None, optional))
        read, stored = ({node for tensor in tensors for node in tensor.nodes} for tensors in (of_tokens, views_used))
        region = self._region(root, frozenset(read | stored), sums, dtype, base)
        changed = written_before_backward(self.view, root, stored)
        prove(not changed, Reason.OPERAND_CHANGED, "written before the backward", next(iter(changed), None))
        return MoEMatch(
            root=root, region=region, x=x, experts=ids, weights=weights, scales=scales, weights_on_input=on_input,
            w_up=w_up, b_up=b_up, w_down=w_down, b_down=b_down,
            activation=lead.activation, spelling=_spelling(region, routings[0]), T=math.prod(value.shape[:-1]), K=top_k, E=E, D=D,
            F=lead.width.args[1], dtype=dtype, chosen=self._chosen(terms, feature), base=base, kept=kept,
            numbers=_numbers(numbers, E, bounds) if dense else (), zero_computation=plain,
            named=named, parameters=parameters, low_rank_up=low_rank_up, low_rank_down=low_rank_down,
            subscripts=not (dense or bounded or _has_row_groups(region)),
            copied=written_before_backward(self.view, root, read),
        )  # fmt: skip

    def _region(
        self, root: fx.Node, operands: frozenset[fx.Node], sums: frozenset[fx.Node], dtype: torch.dtype, base: fx.Node | None
    ) -> Region:
        """The nodes that go, among them ``sums``, if they can."""
        try:
            return prove_region(self.view, root, operands, dtype, base)
        except Declined:
            if not sums:
                raise
            return prove_region(self.view, root, operands | sums, dtype, base)

    def _scored_routing(self, expert: ExpertTerm, feature: Expr, token: Expr) -> tuple[ExpertTerm, Routing] | None:
        index = expert_index(self._algebra, expert, feature)
        by_number = index is None or index in expert.binders
        return read_scored(self._algebra, expert, index, token) if by_number else None

    def _routing(self, expert: ExpertTerm, feature: Expr) -> Routing:
        index = expert_index(self._algebra, expert, feature)
        if index is None or index in expert.binders:
            return read_compared(self._algebra, index, expert.binders, expert.routing, expert.scale)
        factors = (*expert.routing, *expert.scale)
        prove(not expert.scale or not expert.routing, Reason.ROUTING, "weights on input and output")
        permuted = index.kind == "group" or any(True for _ in subexpressions(index, is_permuted))
        prove(not permuted, Reason.SAME_PERMUTATION, f"the rows are in groups, {_NO_COUNTS}")
        return read_indexed(index, expert.binders, factors)


def _numbers(numbers: tuple[int, ...], E: int, bounds: list[Size | None]) -> tuple[int, ...]:
    """The ids of experts that ids are compared with, in order; none if there are no others than 0 to E-1, as far as is known."""
    all_of_them = not any(isinstance(bound, int) and bound > E for bound in bounds)
    in_order = numbers in ((), tuple(range(E)))
    return () if in_order and all_of_them else numbers or tuple(range(E))


def _sums_experts(e: Expr) -> bool:
    if e.kind == "sum" and e.args[0].args[2] == "r":
        body = e.args[1]
        return any(_sums_experts(f) or _adds_choices(f) for f in factors_of(body))
    return e.kind == "add" and sum(term.has_dot for term in e.args) > 1


def _adds_choices(e: Expr) -> bool:
    """A score as the sum of those of single slots."""
    return e.kind == "add" and not e.has_dot and all(map(_is_masked, e.args))


def _may_combine(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return (inplace_name(node) or target_name(node)) in _COMBINES


def _is_row_product(e: Expr) -> bool:
    return e.kind == "leaf" and e.args[0].op == "grouped_mm"


def _is_vector(term: Expr, feature: Expr) -> bool:
    """Whether features differ by more than by comparisons: a tensor of scores ``[T, E]`` compares ids with its last index."""
    return any(feature in f.free and f.kind not in ("eq", "any") for f in factors_of(term))


def _is_masked(term: Expr) -> bool:
    return next(iter(subexpressions(term, lambda e: e.kind in ("eq", "any"))), None) is not None


def _prove_reached(
    activation: str, x: Operand, w_up: Sequence[WeightView], b_up: Sequence[WeightView],
    low_rank_up: Sequence[tuple[Factors, ...]], parameters: Sequence[Operand],
) -> None:  # fmt: skip
    """Nothing would have a gradient of zeros that has none as written, since the activation only compares it.

        torch.where(gate > self.bound, gate, up)            but not where the bound is a parameter
    """
    if activation == IDENTITY or not (unreached := without_gradient(activation)):
        return
    halves = [
        (view, *b_up[i : i + 1], *(own for factors in low_rank_up[i : i + 1] for added in factors for own in added.views))
        for i, view in enumerate(w_up)
    ]
    names = GATED_SYMBOLS if len(halves) == 2 else UNGATED_SYMBOLS if unreached.issuperset(UNGATED_SYMBOLS) else ()
    of: list[tuple[str, Sequence[WeightView | Operand]]] = [*zip(names, halves, strict=False)]
    of += [(names[0], [x])] if names and unreached.issuperset(names) else []
    of += [(name, [own]) for name, own in zip(PARAMETER_SYMBOLS, parameters, strict=False)]
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


def _spelling(region: Region, routing: Routing) -> str:
    names = {target_name(node) for node in region.nodes}
    if not names.isdisjoint(_GROUPED):
        return "sorted grouped_mm"
    fakes = (fake_of(node) for node in region.nodes)
    if any(isinstance(fake, torch.Tensor) and free_unbacked_symbols(fake) for fake in fakes):
        return "loop over experts"
    if routing.expert is None:
        return "gathered weights"
    return "dense batched" if routing.expert.kind == "var" else "masked experts"


def _has_row_groups(region: Region) -> bool:
    return not {target_name(node) for node in region.nodes}.isdisjoint((*_GROUPED, "searchsorted", "bucketize"))
