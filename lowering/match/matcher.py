"""Which nodes of a graph are looked at as layers, and which of the proofs and reasons that come of it are about one layer.

A candidate is a node that may be the last step of a sum over experts. Its element is expanded by `evaluator` and taken apart into
terms, some of which are experts; `layer_proof` proves the rest. Nothing here changes the graph.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice

from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.dependencies import dependencies
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, inplace_name, target_name
from moeblaze_ops.lowering.graph.operators import operator_name, overloads_of
from moeblaze_ops.lowering.index_notation.distribution import terms_of
from moeblaze_ops.lowering.index_notation.expr import MAX_OPERANDS, Expr, TooLarge, subexpressions
from moeblaze_ops.lowering.match.internal_errors import tolerate
from moeblaze_ops.lowering.match.layer_proof import NO_COUNTS, Candidate, Refusal, prove_layer, unshaped
from moeblaze_ops.lowering.match.match_result import Decline, MoEMatch, furthest
from moeblaze_ops.lowering.match.operands.find_operands import Finder
from moeblaze_ops.lowering.match.operands.find_routing import find_x, with_scaled_x
from moeblaze_ops.lowering.match.operands.specialized_sizes import SymbolicSizes
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.residual import STAYS, STORED, adds, bases
from moeblaze_ops.lowering.match.same_layer import Chosen, Grouped, chosen_by, grouped, is_fewer, is_part, is_sum_of, values_of
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.expert_term import (
    MORE_PROJECTIONS,
    ONE_PROJECTION,
    are_stored_over,
    describe_last,
    has_more_projections,
    has_one_projection,
    holds_comparison,
    is_chosen_bias,
    is_expert_term,
    is_scored_term,
    made_by,
    read_expert,
    scored_terms,
    shared_projection,
)
from moeblaze_ops.lowering.match.terms.sums import sums_of_experts
from moeblaze_ops.lowering.match.zero_computation import is_routed, read_terms

_COMBINES = frozenset((
    "add", "sum", "index_add", "scatter_add", "scatter", "put", "setitem", "__setitem__", "index_put", "einsum", "bmm", "mm",
    "matmul", "index_copy", "copy", "addcmul", "scatter_reduce", "where", "tensordot",
))  # fmt: skip

Sum = tuple[fx.Node, list[Expr], list[Expr]]
"""What a sum starts from, the experts that it adds, and its other terms."""

_OF_TERMS = frozenset((
    Reason.OTHER_TERMS, Reason.ROUTING, Reason.SLOT_WEIGHTS, Reason.NOT_TWO_PROJECTIONS, Reason.DIFFERENT_INPUTS,
    Reason.EXPERT_COVERAGE,
))  # fmt: skip
"""Why a sum may be no layer whose terms are not told apart."""


def view_of(graph: fx.Graph) -> GraphView:
    """What layers are looked for in."""
    return GraphView(graph, TABLE)


class Matcher:
    """Finds the layers of one graph: those in blocks without gradients in a view of numbers only, and all others in another."""

    def __init__(self, view: GraphView, refusal: Refusal, elsewhere: Sequence[MoEMatch | Decline] = ()):
        """``refusal`` judges each match; ``elsewhere`` are the layers that were found in the other view of the graph."""
        self.view, self._refusal, self._elsewhere = view, refusal, elsewhere
        self._combining = {node: number for number, node in enumerate(filter(self._may_combine, view.position))}
        self._evaluate(frozenset())

    def _evaluate(self, opaque: frozenset[Value]) -> None:
        """Start over with what is known of elements, and do not look into ``opaque`` values."""
        self._opaque = opaque
        self._evaluator = Evaluator(opaque)
        self._algebra = self._evaluator.algebra
        self._formulas = Formulas(self._algebra)
        self._expert_terms: dict[Expr, bool] = {}
        self._counted: dict[Value, Grouped] = {}
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
        further: dict[fx.Node, Decline] = {}  # why a sum is no layer that is added to something else
        for decline in declined:
            if decline.reason is Reason.OTHER_TERMS and decline.root not in taken and not self._is_around(decline, found):
                result = self._attempt(decline.root, onto_base=True)
                if isinstance(result, MoEMatch) and not self._is_again(result, found) and not _is_inside(found, result):
                    found.append(result)
                    taken.update(result.region.nodes)
                elif isinstance(result, Decline) and result.progress > decline.progress:
                    further[decline.root] = result
        results: list[MoEMatch | Decline] = [*found, *(decline for decline in declined if decline.root not in taken)]
        declined = [r for r in results if isinstance(r, Decline) and not self._is_around(r, results, scores=False)]
        declined = furthest([r for r in declined if not any(self._is_beginning(r, whole) for whole in declined)])
        steps = [r for r in declined if any(r.reason is whole.reason and self._is_step(r, whole) for whole in declined)]
        declined = [further.get(r.root, r) for r in declined if r not in steps]
        return sorted([*found, *declined], key=lambda r: self.view.position[r.root])

    def _is_around(self, outer: Decline, results: Sequence[MoEMatch | Decline], *, scores: bool = True) -> bool:
        """True if all experts behind a candidate are those of other results that it depends on, as in ``x + layer(x)``.

        Behind others, one without projections needs two terms of its own to be like a layer. ``scores``: as ``is_sum_of`` has it.
        """
        inner = [result for result in (*results, *self._elsewhere) if self._is_behind(result, outer)]
        inner = [result for result in inner if isinstance(result, MoEMatch) or result.has_experts or not outer.has_experts]
        if outer.rows:
            nodes = set(dependencies(self.view, *(result.root for result in inner)))
            return all(row.node in nodes for row in outer.rows)
        if inner and not outer.has_experts:
            known = values_of(chosen for result in inner for chosen in result.chosen)
            return sum(n for chosen, n in outer.chosen.items() if not (chosen.ids and chosen.numbers <= known)) < 2
        if outer.reason is not Reason.OTHER_TERMS:  # with the same experts it may be the same layer, a step further
            inner = [result for result in inner if isinstance(result, MoEMatch) or result.chosen != outer.chosen]
        layers = [result for result in inner if not any(self._is_step(result, whole) for whole in inner)]
        return is_sum_of(outer.chosen, [layer.chosen for layer in layers], scores=scores)

    def _is_again(self, outer: MoEMatch, found: Sequence[MoEMatch]) -> bool:
        """True if a layer is one of those found, whose result it depends on: ``y`` and ``y + unknown(y)``, where y = layer(x)."""

        def operands(layer: MoEMatch) -> tuple:
            x = unshaped(self.view, layer.x.node, layer.root)
            return x, layer.chosen, layer.w_up, layer.w_down

        return any(self._is_behind(inner, outer) and operands(inner) == operands(outer) for inner in found)

    def _is_step(self, part: MoEMatch | Decline, whole: MoEMatch | Decline) -> bool:
        """True if a candidate is a step of the sum of another, which has more experts."""
        return self._is_behind(part, whole) and is_fewer(part.chosen, whole.chosen)

    def _is_beginning(self, part: Decline, whole: Decline) -> bool:
        """True if a candidate without experts is a step of the sum of another, to which experts with projections come later."""
        begins = not part.has_experts and whole.has_experts and part.ids <= whole.ids
        return begins and self._is_behind(part, whole)

    def _parts(self, whole: Decline, known: set[fx.Node]) -> Iterator[fx.Node]:
        """Nodes beside ``known`` ones that sum some of the experts of a declined candidate: none of them is a layer itself."""
        total = self._result(whole.root) if whole.has_experts else None
        if total is None:
            return
        of_data = free_unbacked_symbols(total.shape)
        behind, chosen = self._behind[whole.root], grouped(whole.chosen)
        for node, number in self._combining.items():
            if not behind >> number & 1 or node in known or (value := self._result(node)) is None:
                continue
            if value.op == "contract" and free_unbacked_symbols(value.shape) - of_data:
                continue  # a projection of rows of one expert
            if (experts := self._grouped(value)) and is_part(experts, chosen):
                yield node

    @cached_property
    def _behind(self) -> dict[fx.Node, int]:
        """The nodes at which a sum can end that each node depends on."""
        return reached(self.view, self._combining)

    def _is_behind(self, inner: MoEMatch | Decline, outer: MoEMatch | Decline) -> bool:
        """True if a result depends on that of another."""
        return inner.root is not outer.root and self._behind[outer.root] >> self._combining[inner.root] & 1 == 1

    def _grouped(self, value: Value) -> Grouped:
        known = self._counted.get(value)
        if known is None:
            known = self._counted[value] = grouped(self._experts_of(value))
        return known

    def _experts_of(self, value: Value | None) -> Counter:
        return Counter() if value is None else self._experts(self._terms(value), self._evaluator.of_token(value)[1])

    def _experts(self, terms: Sequence[Expr], feature: Expr) -> Counter:
        return self._chosen((t for t in terms if self._is_expert(t, feature) or is_scored_term(t, feature)), feature)

    def _attempt(self, root: fx.Node, *, onto_base: bool = False) -> MoEMatch | Decline | None:
        try:
            return self.match(root, onto_base=onto_base)
        except SymbolicSizes:
            raise
        except Exception as error:
            return Decline(root, root, Reason.INTERNAL, tolerate(error))

    def match(self, root: fx.Node, *, onto_base: bool = False) -> MoEMatch | Decline | None:
        """The layer whose output ``root`` completes, or adds to something else if ``onto_base``; None when it is not like one."""
        value = self._result(root)
        if value is None:
            return None
        tokens, feature = self._evaluator.of_token(value)
        terms = self._terms(value)
        experts = [term for term in terms if self._is_expert(term, feature)] or scored_terms(terms, feature)
        ids = frozenset(values_of(self._chosen(terms, feature)))
        if not experts and _is_foreign(root):
            given = sum((self._experts_of(self._result(operand)) for operand in root.all_input_nodes), Counter())
            operator = overloads_of(root.target)[0].name()
            detail = f"'{operator}' is no operator of torch: what it makes of the outputs of experts is not declared"
            return Decline(root, root, Reason.OTHER_TERMS, detail, frozenset(values_of(given)), given) if given else None
        if not experts:
            if (joined := self._dropped_together(terms, tokens)) is not None:
                chosen = self._experts_of(joined.args[0])
                return Decline(root, joined.node, Reason.NOT_TWO_PROJECTIONS, _DROPPED_TOGETHER, chosen=chosen)
            rows = {leaf.args[0] for term in terms for leaf in subexpressions(term, _is_row_product)}
            if rows:
                ends = min(rows, key=lambda row: self.view.position[row.node]).args[2].node
                detail = f"the groups of '{ends.name}' are {NO_COUNTS}"
                return Decline(root, ends, Reason.SAME_PERMUTATION, detail, frozenset(rows), rows=frozenset(rows))
            masked = [term for term in terms if holds_comparison(term) and _is_vector(term, feature)]
            if len(masked) < 2 or self._picks(root):
                return None
            counts = self._chosen(masked, feature)
            projects = has_one_projection(masked, feature)
            detail = ONE_PROJECTION if projects else describe_last(masked[0], feature)
            return Decline(root, root, Reason.NOT_TWO_PROJECTIONS, detail, ids, counts, has_experts=projects)
        others = list((Counter(terms) - Counter(experts)).elements())
        try:
            written = fake_of(self.view.writes.get(root, root))
            prove(not (self.view.numbers_only and written.requires_grad), Reason.CONTEXT, "what is written to keeps its gradient")
            base, own = None, experts
            if others and onto_base:
                base, own, others = self._onto_base(root, value, terms, experts, feature)
            odd = next((term for term in others if not is_routed(term, feature)), None)
            prove(odd is None, Reason.OTHER_TERMS, _added(odd, feature))
            added = [part for term in others for part in read_terms(self._algebra, term, feature, value.dtype)]
            candidate = Candidate(root, value, tokens, feature, own, self._chosen(own, feature), base, added)
            return prove_layer(self.view, self._evaluator, self._formulas, candidate, self._refusal)
        except (TooLarge, RecursionError):
            return Decline(root, root, Reason.OTHER_TERMS, "too many of them", ids, self._chosen(experts, feature))
        except Declined as declined:
            chosen = self._chosen(experts, feature)
            decline = Decline(root, declined.node or root, declined.reason, declined.detail, ids, chosen)
            if declined.reason is Reason.NOT_TWO_PROJECTIONS and has_one_projection(experts, feature):
                return replace(decline, detail=ONE_PROJECTION)
            if declined.reason is Reason.DIFFERENT_INPUTS and has_more_projections(experts, feature):
                return replace(decline, reason=Reason.NOT_TWO_PROJECTIONS, detail=MORE_PROJECTIONS)
            if declined.reason is Reason.STATEMENT and all(len(own.how) > 1 for own in chosen):
                numbers = frozenset.intersection(*(own.numbers for own in chosen))
                named = " and ".join(sorted(f"'{value.node.name}'" for value in numbers))
                return replace(decline, detail=f"{named} choose an expert together; take its ids and weights from one topk")
            if declined.reason in (Reason.NOT_TWO_PROJECTIONS, Reason.ACTIVATION, Reason.PROJECTION_WEIGHTS):
                decline = replace(decline, detail=shared_projection(experts, feature) or decline.detail)
            if over := declined.reason is not Reason.OTHER_TERMS and are_stored_over(experts):
                detail = "the output of a token's last expert takes the place of the others': add them, out[mask] += y"
                decline = replace(decline, reason=Reason.DISTINCT_EXPERTS, detail=detail)
        if not (over or decline.reason in _OF_TERMS) or not (onto_base or all(is_routed(term, feature) for term in others)):
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
            found[unshaped(self.view, node, root)] = self.view.position[node]
        return max(found, key=found.__getitem__, default=None)

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
            before = self._experts(list(below), feature)
            before += self._chosen((t for t in below if t in experts or is_routed(t, feature)), feature)
            apart = STAYS in node.meta or values_of(self._chosen(own, feature)).isdisjoint(values_of(before))
            same = found is None or found[1:] == (own, others)
            if own and apart and same and below <= Counter(terms) and all(is_routed(term, feature) for term in others):
                found = node, own, others
        odd = next((term for term in terms if term not in experts and not is_routed(term, feature)), None)
        prove(found is not None, Reason.OTHER_TERMS, _added(odd, feature))
        return found

    def _dropped_together(self, terms: Iterable[Expr], tokens: tuple[Expr, ...]) -> Value | None:
        """The dropout of rows that several experts made, as in a term: ``F.dropout(torch.cat(outputs))[order]``, or of places."""
        for term in terms:
            for leaf in subexpressions(term, lambda e: e.kind == "leaf" and e.args[0].op == "dropout"):
                of_places = len(leaf.args[1]) == 3 and leaf.free.isdisjoint(tokens) and holds_comparison(term)
                of_rows = len(leaf.args[1]) == 2 and leaf.args[1][:1] != tokens
                if of_places or (of_rows and self._experts_of(leaf.args[0].args[0])):
                    return leaf.args[0]
        return None

    def _may_combine(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or STORED in node.meta:
            return False
        return (inplace_name(node) or target_name(node)) in _COMBINES or _is_foreign(node) or self._picks(node)

    def _picks(self, node: fx.Node) -> bool:
        """True if a node gives each token its own one of several vectors, weighted or not: a sum over experts of one slot."""
        value = self._result(node)
        if value is None:
            return False
        factors = value.args[1] if value.op == "pointwise" and value.args[0] == "mul" else (value,)
        return any(_picks_one(factor) for factor in factors if factor.shape[-1:] == value.shape[-1:])  # no routing weight

    def _result(self, root: fx.Node) -> Value | None:
        value = self.view.result(root)
        fits = isinstance(value, Value) and len(value.shape) >= 2 and value.dtype.is_floating_point
        return value if fits else None

    def _terms(self, value: Value) -> tuple[Expr, ...]:
        tokens, feature = self._evaluator.of_token(value)
        try:
            element = self._evaluator.element(value, (*tokens, feature))
            terms = tuple(islice(terms_of(self._algebra, element, sums_of_experts), MAX_OPERANDS + 1))
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

    def _is_expert(self, term: Expr, feature: Expr) -> bool:
        known = self._expert_terms.get(term)
        if known is None:
            known = self._expert_terms[term] = is_expert_term(term, feature)
        return known

    def _chosen(self, terms: Iterable[Expr], feature: Expr) -> Counter:
        """How often each expert is chosen."""
        return Counter(self._choice(term, feature) for term in terms)

    def _choice(self, term: Expr, feature: Expr) -> Chosen:
        known = self._choices.get((term, feature))
        if known is None:
            known = self._choices[term, feature] = chosen_by(term, feature)
        return known


_DROPPED_TOGETHER = "dropout of rows of several experts that are joined already; drop each one's before, or the layer's output"


def _picks_one(value: Value) -> bool:
    """True if each token has its own one of several vectors.

        outputs.gather(1, ids[:, None, None].expand(-1, 1, D)).squeeze(1), torch.stack(outputs)[ids, torch.arange(T)]
    """
    while value.op in ("reshape", "cast", "select"):
        value = value.args[0]
    by_several = value.op == "take" or (value.op == "index" and sum(index is not None for index in value.args[1]) > 1)
    return by_several and len(value.args[0].shape) > 2


def _is_inside(found: Sequence[MoEMatch], outer: MoEMatch) -> bool:
    """True if another layer ends inside of one."""
    return any(layer.root in outer.region.nodes for layer in found)


def _added(term: Expr | None, feature: Expr) -> str:
    return "the sum starts from another one" if term is None else f"{made_by(term, feature)} is added to the outputs of experts"


def _is_row_product(e: Expr) -> bool:
    return e.kind == "leaf" and e.args[0].op == "grouped_mm"


def _is_vector(term: Expr, feature: Expr) -> bool:
    """True if features differ by more than by comparisons: a tensor of scores ``[T, E]`` compares ids with its last index.

    x * (ids == e)[:, None]      but not  score[:, None] * F.one_hot(ids, E) * (F.one_hot(ids, E).cumsum(0) < capacity)
    """
    found = subexpressions(term, lambda e: e is feature or e.kind in ("eq", "any"), over=feature)
    return any(each is feature for each in found)


def _is_foreign(node: fx.Node) -> bool:
    """True if a node calls an operator of a library that is neither torch's nor ours, of which nothing is known.

        torch.ops.mylib.add_rows(out, index, rows)      torch.ops.aten.add(a, b), torch.ops.moeblaze.route(logits, 2): no
    """
    return any(op.namespace not in ("aten", "prims", "moeblaze") for op in overloads_of(node.target)) and not operator_name(node)


def reached(view: GraphView, targets: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """For each node the ``targets`` that it depends on, or is, as a number with a bit for each."""
    own = {target: 1 << number for number, target in enumerate(targets)}
    found: dict[fx.Node, int] = {}
    for node, read in view.reads.items():
        bits = own.get(node, 0)
        for operand in read:
            bits |= found[operand]
        found[node] = bits
    return found
