"""Every expert is there once, with its own weights, and no token chooses one twice."""

from collections.abc import Sequence

from moeblaze_ops.lowering.facts.unique_ids import are_distinct
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.terms.routing_term import Routing

_TWICE = "adds two products to the sum, as where its width F is split; one product over all of its width is recognised"


def expert_order(routings: Sequence[Routing]) -> tuple[list[int], tuple[int, ...]]:
    """Indices of the terms that stand for the experts, once every slot is proven to have each of them once, and their numbers.

    Numbers that are left out have experts that give zeros. Where ids are no numbers of single terms there are no numbers.
    """
    lead = routings[0].expert
    if lead is None or lead.kind == "var":
        prove(len({r.ids for r in routings}) == len(routings), Reason.EXPERT_COVERAGE, "a slot is used twice")
        alike = all(r.expert is lead or (lead and r.expert and r.expert.args[1:] == lead.args[1:]) for r in routings)
        prove(alike, Reason.EXPERT_COVERAGE, "mixed forms")
        return [0], ()
    by_slot: dict[Expr, dict[int, int]] = {}
    for i, routing in enumerate(routings):
        prove(routing.expert is not None and routing.expert.kind == "const", Reason.EXPERT_COVERAGE, "mixed forms")
        own = by_slot.setdefault(routing.ids, {})
        number = routing.expert.args[0]
        prove(number not in own, Reason.EXPERT_COVERAGE, f"expert {number} {_TWICE}")
        own[number] = i
    first = next(iter(by_slot.values()))
    for own in by_slot.values():
        detail = f"experts {sorted(own)} of one slot, {sorted(first)} of another"
        prove(own.keys() == first.keys(), Reason.EXPERT_COVERAGE, detail)
    numbers = tuple(sorted(first))
    return [first[e] for e in numbers], numbers


def prove_shared_weights(algebra: Algebra, routings: Sequence[Routing], experts: Sequence[ExpertTerm]) -> None:
    """Slots written out one by one reach the same weights."""
    weights_of: dict[Expr | None, tuple] = {}
    for routing, expert in zip(routings, experts, strict=True):
        leaves = [leaf for p in (*expert.up, expert.down) for leaf in (p.weight, p.bias) if leaf is not None]
        leaves += expert.parameters
        number, index = routing.expert, weight_index(routing)
        if index is not None:
            number = algebra.var(-5, 0, "r")
            leaves = [algebra.substitute(leaf, {index: number}) for leaf in leaves]
        own = tuple(leaves)
        prove(weights_of.setdefault(number, own) == own, Reason.EXPERT_COVERAGE, "slots use different weights")


def weight_index(routing: Routing) -> Expr | None:
    if routing.expert is None:
        return routing.ids
    return routing.expert if routing.expert.kind == "var" else None


def extent(expert: Expr | None, count: int) -> int | None:
    if expert is None:
        return None
    if expert.kind == "var":
        prove(isinstance(expert.args[1], int), Reason.EXPERT_COVERAGE, "a symbolic number of experts")
        return expert.args[1]
    return count


def prove_distinct(algebra: Algebra, routings: Sequence[Routing], *, of_all: bool) -> None:
    """Ids of one token differ, as the indices of a top-k along their last axis do, or there is one."""
    pairs = [pair for r in routings for pair in (*r.distinct, *([(r.ids, r.slot)] if of_all else []))]
    for ids, slot in dict.fromkeys(pairs):
        prove(are_distinct(algebra, ids, slot), Reason.DISTINCT_EXPERTS)
