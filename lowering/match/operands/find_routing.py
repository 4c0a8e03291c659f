"""The tensors of a layer that depend on tokens: its input, the experts' ids and the routing weights."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NoReturn

from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.evaluate.depth import MAX_PROJECTIONS
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.sizes import Size, size_of
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand, by_number, joined
from moeblaze_ops.lowering.match.operands.specialized_sizes import SymbolicSizes, may_be_specialized
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.terms.routing_term import Routing


def is_permuted(e: Expr) -> bool:
    return e.kind in ("inverse", "group") or (e.kind == "leaf" and e.args[0].is_permutation)


def find_routing(
    algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int
) -> tuple[Operand, Operand | None, int]:
    """The nodes of ids and weights (whose elements were taken inside ``depth`` projections), and K.

    Those of slots of their own, ``[T]``, are in the order of ``routings``, as far as no tensor has all of them.
    """
    products_of: dict[Expr, dict[Expr, None]] = {}
    for routing in routings:
        products_of.setdefault(routing.ids, {})[algebra.mul(*routing.weights)] = None
    alike = all(len(products) == 1 for products in products_of.values())  # they are those of all experts
    slot = routings[0].slot
    slots = list(products_of) if slot is None else [routings[0].ids]
    top_k = len(slots) if slot is None else slot.args[1]
    if not isinstance(top_k, int):
        _ask_for_number(top_k, slots)
    columns = tuple(map(algebra.const, range(top_k))) if slot is None else (slot,)
    for ids in _orders(slots):
        if (found := finder.find(ids, columns, top_k, integers=True)) is not None:
            break
    else:
        ids = tuple(slots)
        found = joined([finder.find((own,), (algebra.zero,), 1, integers=True) for own in ids])
        prove(found is not None, *_unaligned(ids, "expert ids"))
    products = tuple(next(iter(products_of[own])) for own in ids)
    if alike and all(product is algebra.one for product in products):
        return found, None, top_k
    weights = finder.find_scaled(products, columns, top_k, depth) if alike else None
    if weights is None and alike and slot is None:
        weights = joined([finder.find_scaled((product,), (algebra.zero,), 1, depth) for product in products])
    weights = weights or _find_scores(algebra, finder, routings, depth)
    prove(weights is not None, *_unaligned(products, "routing weights"))
    return found, weights, top_k


def _find_scores(algebra: Algebra, finder: Finder, routings: Sequence[Routing], depth: int) -> Operand | None:
    """Scores of all experts, of which the layer uses those that the ids choose; the others are zero, or any numbers."""
    if any(r.expert is None for r in routings):
        return None
    own = [(r.expert, algebra.mul(*r.weights)) for r in routings]
    kept = [(r.expert, algebra.mul(r.score, *([] if r.kept is None else [r.kept]))) for r in routings]
    for scores in ([(r.expert, r.score) for r in routings], own, kept):
        if len(set(scores)) != len(dict(scores)):
            continue  # slots of one expert differ
        experts, targets, count = by_number(dict(scores))
        of_tokens = (finder.num_tokens, (finder.token,)), (count, experts)
        found = finder.find_scaled(targets, experts, count, depth) or finder.find_table(targets, *of_tokens, depth=depth)
        if found is not None:
            return replace(found, gathered=True)
    return None


def find_kept(algebra: Algebra, finder: Finder, routings: Sequence[Routing], ids: Operand) -> Operand | None:
    """What says of each token and expert whether it takes the token, or of each of its slots; None where all do."""
    kept: dict[Expr, dict[Expr | None, Expr | None]] = {}
    for routing in routings:
        kept.setdefault(routing.ids, {})[routing.expert] = routing.kept
    of_all, *others = kept.values()
    if all(set(own.values()) == {None} for own in kept.values()):
        return None
    known = all(None not in own and None not in own.values() for own in kept.values())
    prove(known, Reason.SLOT_WEIGHTS, "some experts keep all tokens")
    experts, targets, count = by_number(of_all)
    slot = routings[0].slot
    if any(own != of_all for own in others):
        alike = all(own.keys() == of_all.keys() for own in others)  # not so of two layers that store over one tensor
        found = joined([finder.find(by_number(own)[1], experts, count) for own in kept.values()]) if alike else None
        found = found and replace(found, of_slots=True)
    elif slot is not None and any(slot in target.free for target in targets):
        axes = (finder.num_tokens, (finder.token,)), (slot.args[1], (slot,)), (count, experts)
        found = finder.find_table(targets, *axes, reshaped=True)
        found = found and replace(found, of_slots=True)
    else:
        found = finder.find(targets, experts, count) or joined([finder.find((own,), (algebra.zero,), 1) for own in targets])
    prove(found is not None, Reason.SLOT_WEIGHTS, "no tensor [T, E] says which tokens an expert keeps")
    bounds = [algebra.extent(routing.ids) for routing in routings]
    prove(all(isinstance(bound, int) and bound <= count for bound in bounds), Reason.SLOT_WEIGHTS, "ids that may be no expert's")
    return found


def _ask_for_number(top_k: Size, found: Iterable[Expr]) -> NoReturn:
    """Raise for the number that K has in ids, if it may be one."""
    leaves = (leaf.args[0] for ids in found for leaf in subexpressions(ids, lambda e: e.kind == "leaf"))
    made = ((value.node.graph, fake) for value in leaves for fake in tree_leaves(fake_of(value.node)))
    sizes = ((graph, size) for graph, fake in made for size in getattr(fake, "shape", ()))
    graph, size = next(((graph, size) for graph, size in sizes if size_of(size) == top_k), (None, None))
    symbolic = "slots, or places [E, C], of a number that only a call tells"
    prove(graph is not None and may_be_specialized((size,), graph), Reason.SLOT_WEIGHTS, symbolic)
    raise SymbolicSizes((size,))


def _orders(ids: list[Expr]) -> list[tuple[Expr, ...]]:
    """Slots in the order of the graph, of the ids' constants, and reversed."""
    by_constant = sorted(ids, key=lambda e: [i.args[0] for i in e.args[1] if i.kind == "const"] if e.kind == "leaf" else [])
    return list(dict.fromkeys((tuple(ids), tuple(by_constant), tuple(by_constant[::-1]))))


def _unaligned(found: Indices, what: str) -> tuple[Reason, str]:
    if any(True for e in found for _ in subexpressions(e, is_permuted)):
        return Reason.SAME_PERMUTATION, f"{what} are still permuted"
    if all(e.kind == "const" for e in found):
        return Reason.SLOT_WEIGHTS, f"the {what} are the number {found[0].args[0]}; multiply the layer's output by it instead"
    if all(e.kind == "leaf" and e.args[0].op == "put" for e in found):
        return Reason.SLOT_WEIGHTS, f"{what} are stored at places [E, C] that are not proven to be one's own each"
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
        reason, detail = _unaligned((x,), "tokens")
        prove(operand is not None, Reason.DIFFERENT_INPUTS if reason is Reason.SLOT_WEIGHTS else reason, detail)
        found[operand] = None
    prove(len(found) == 1, Reason.DIFFERENT_INPUTS)
    return next(iter(found))
