"""The tensors of a layer that depend on tokens: its input, the experts' ids and the routing weights."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from moeblaze_ops.lowering.evaluate.evaluator import MAX_PROJECTIONS
from moeblaze_ops.lowering.index_notation.expr import Expr, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.terms.routing_term import Routing


def is_permuted(e: Expr) -> bool:
    return e.kind in ("inverse", "group") or (e.kind == "leaf" and e.args[0].is_permutation)


def find_routing(
    algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int
) -> tuple[Operand, Operand | None, int]:
    """The nodes of ids and weights (whose elements were taken inside ``depth`` projections), and K."""
    slots = {routing.slot is not None for routing in routings}
    prove(len(slots) == 1, Reason.SLOT_WEIGHTS, "some experts see one slot, some all")
    if True in slots:
        return _find_summed(algebra, finder, routings, depth)
    return _find_per_slot(algebra, finder, routings, depth)


def _find_summed(
    algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int
) -> tuple[Operand, Operand | None, int]:
    results: dict[tuple[Operand, Operand | None, int], None] = {}
    for ids, slot, weights in dict.fromkeys((r.ids, r.slot, r.weights) for r in routings):
        top_k = slot.args[1]
        prove(isinstance(top_k, int), Reason.SLOT_WEIGHTS, "a symbolic number of experts per token")
        found_ids = finder.find_ids((ids,), (slot,), top_k)
        prove(found_ids is not None, *_unaligned(ids, "expert ids"))
        product = algebra.mul(*weights)
        found_weights = None
        if product is not algebra.one:
            found_weights = finder.find_scaled((product,), (slot,), top_k, depth)
            found_weights = found_weights or _find_scores(algebra, finder, routings, depth)
            prove(found_weights is not None, *_unaligned(product, "routing weights"))
        results[found_ids, found_weights, top_k] = None
    return next(iter(results))


def _find_per_slot(
    algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int
) -> tuple[Operand, Operand | None, int]:
    weights_of: dict[Expr, Expr] = {}
    alike = True
    for routing in routings:
        product = algebra.mul(*routing.weights)
        alike &= weights_of.setdefault(routing.ids, product) is product
    top_k = len(weights_of)
    columns = tuple(algebra.const(k) for k in range(top_k))
    for ids in _orders(list(weights_of)):
        found_ids = finder.find_ids(ids, columns, top_k)
        if found_ids is None:
            continue
        products = tuple(weights_of[e] for e in ids)
        if alike and all(p is algebra.one for p in products):
            return found_ids, None, top_k
        found_weights = finder.find_scaled(products, columns, top_k, depth) if alike else None
        if found_weights is None and top_k == 1:
            found_weights = _find_scores(algebra, finder, routings, depth)
            prove(found_weights is not None, *_unaligned(algebra.add(*products), "routing weights"))
        return found_ids, found_weights or _find_weights_apart(algebra, finder, products, depth), top_k
    return _find_apart(algebra, finder, weights_of, depth)


def _find_apart(
    algebra: Algebra, finder: Finder, weights_of: dict[Expr, Expr], depth: int
) -> tuple[Operand, Operand | None, int]:
    """Ids and weights of which every slot has tensors ``[T]`` of its own."""
    found = []
    for own in weights_of:
        found.append(finder.find_ids((own,), (algebra.zero,), 1))
        prove(found[-1] is not None and found[-1].dtype == found[0].dtype, *_unaligned(own, "expert ids"))
    return _joined(found), _find_weights_apart(algebra, finder, list(weights_of.values()), depth), len(found)


def _find_weights_apart(algebra: Algebra, finder: Finder, products: Sequence[Expr], depth: int) -> Operand | None:
    """The weights of every slot in a tensor ``[T]`` of its own; None where there are none."""
    found = []
    for product in products:
        if product is not algebra.one:
            found.append(finder.find_scaled((product,), (algebra.zero,), 1, depth))
            prove(found[-1] is not None and found[-1].dtype == found[0].dtype, *_unaligned(product, "routing weights"))
    prove(len(found) in (0, len(products)), Reason.SLOT_WEIGHTS, "some slots have no weights")
    return _joined(found) if found else None


def _joined(slots: list[Operand]) -> Operand:
    return replace(slots[0], rest=tuple(slots[1:]))


def _find_scores(algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int) -> Operand | None:
    """Scores of all experts, of which the layer uses those that the ids choose; the others are zero, or any numbers."""
    experts = tuple(sorted({r.expert for r in routings if r.expert is not None}, key=lambda e: e.args[0]))
    if len(experts) < len(routings):
        return None
    count = experts[0].args[1] if experts[0].kind == "var" else len(experts)
    for scores in ({r.expert: r.score for r in routings}, {r.expert: algebra.mul(*r.weights) for r in routings}):
        targets = tuple(map(scores.get, experts))
        found = finder.find_scaled(targets, experts, count, depth) or finder.find_turned(targets, experts, count, depth)
        if found is not None:
            return replace(found, gathered=True)
    return None


def find_kept(algebra: Algebra, finder: Finder, routings: Sequence[Routing]) -> Operand | None:
    """What says of each token and expert whether it takes the token, None where all take all."""
    kept: dict[Expr | None, Expr | None] = {}
    for routing in routings:
        kept.setdefault(routing.expert, routing.kept)
    if set(kept.values()) == {None}:
        return None
    prove(None not in kept and None not in kept.values(), Reason.SLOT_WEIGHTS, "some experts keep all tokens")
    experts = tuple(sorted(kept, key=lambda e: e.args[0]))
    count = experts[0].args[1] if experts[0].kind == "var" else len(experts)
    found = finder.find(tuple(map(kept.get, experts)), experts, count)
    prove(found is not None, Reason.SLOT_WEIGHTS, "no tensor [T, E] says which tokens an expert keeps")
    bounds = [algebra.extent(routing.ids) for routing in routings]
    prove(all(isinstance(bound, int) and bound <= count for bound in bounds), Reason.SLOT_WEIGHTS, "ids that may be no expert's")
    return found


def _orders(ids: list[Expr]) -> list[tuple[Expr, ...]]:
    """Slots in the order of the graph, of the ids' constants, and reversed."""
    by_constant = sorted(ids, key=lambda e: [i.args[0] for i in e.args[1] if i.kind == "const"] if e.kind == "leaf" else [])
    return list(dict.fromkeys((tuple(ids), tuple(by_constant), tuple(by_constant[::-1]))))


def _unaligned(e: Expr, what: str) -> tuple[Reason, str]:
    if any(True for _ in subexpressions(e, is_permuted)):
        return Reason.SAME_PERMUTATION, f"{what} are still permuted"
    return Reason.SLOT_WEIGHTS, f"no tensor [T, K] holds the {what}"


def with_scaled_x(algebra: Algebra, finder: Finder, expert: ExpertTerm) -> ExpertTerm:
    """An expert whose input's scale is part of its x as far as the graph holds x scaled by it, as a norm does."""
    own = tuple(f for f in expert.scale if _is_of_token(f))
    for count in range(len(own), 0, -1):
        for part in combinations(own, count):
            x = _scaled(algebra, expert.x, part)
            if finder.find((x,), (expert.feature_in,), expert.feature_in.args[1], MAX_PROJECTIONS) is not None:
                return replace(expert, x=x, scale=tuple(f for f in expert.scale if f not in part))
    return expert


def _scaled(algebra: Algebra, x: Expr, scale: tuple[Expr, ...]) -> Expr:
    if x.kind == "cast":
        return algebra.cast(x.args[0], algebra.mul(x.args[1], *scale))
    return algebra.mul(x, *scale)


def _is_of_token(e: Expr) -> bool:
    """A number for each token, the same for all of its slots and for all experts."""
    return all(var.args[2] == "t" for var in e.free) and not any(True for _ in subexpressions(e, lambda s: s.kind == "eq"))


def find_x(finder: Finder, experts: Sequence[ExpertTerm]) -> Operand:
    found: dict[Operand, None] = {}
    for x, feature in dict.fromkeys((e.x, e.feature_in) for e in experts):
        operand = finder.find_scaled((x,), (feature,), feature.args[1], MAX_PROJECTIONS)
        reason, detail = _unaligned(x, "tokens")
        prove(operand is not None, Reason.DIFFERENT_INPUTS if reason is Reason.SLOT_WEIGHTS else reason, detail)
        found[operand] = None
    prove(len(found) == 1, Reason.DIFFERENT_INPUTS)
    return next(iter(found))
