"""Which terms of a sum stand for its experts, and by what their weights are indexed."""

from collections.abc import Sequence

from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.routing_term import Routing

_TWICE = "adds two products to the sum, as where its width F is split; one product over all of its width is recognised"


def expert_order(routings: Sequence[Routing]) -> tuple[list[int], tuple[int, ...]]:
    """Indices of the terms that stand for the experts of one slot, and their numbers.

    Numbers that are left out have experts that give zeros. Where ids are no numbers of single terms there are no numbers.
    """
    lead = routings[0].expert
    if lead is None or lead.kind == "var":
        return [0], ()
    by_slot: dict[Expr, dict[int, int]] = {}
    for i, routing in enumerate(routings):
        prove(routing.expert is not None and routing.expert.kind == "const", Reason.EXPERT_COVERAGE, "mixed forms")
        own = by_slot.setdefault(routing.ids, {})
        number = routing.expert.args[0]
        prove(number not in own, Reason.EXPERT_COVERAGE, f"expert {number} {_TWICE}")
        own[number] = i
    first = next(iter(by_slot.values()))
    numbers = tuple(sorted(first))
    return [first[e] for e in numbers], numbers


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
