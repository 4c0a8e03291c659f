"""From the factors beside an expert to its routing: which ids choose it, and with which weights."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from moeblaze_ops.kernels.formulas.named import is_zero_at_zero
from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, factors_of, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_indicator, is_order
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.terms.padding import reorders

_NOT_ONE_COMPARISON = "a mask that is not one comparison with an expert id"
_OF_SEVERAL_IDS = "one expert's weights are taken by different ids: up, down and their biases have to be those of one id"
_INPUT_SUMMED = "the result sums over places [E, C] or others that experts read rows from, and no expert id chooses from them"
_FROM_THE_END = "gathered by numbers that may be negative: they count from the end"


@dataclass(frozen=True)
class Routing:
    """One term's routing. ``ids`` and ``weights`` are elements at the term's token and ``slot``."""

    expert: Expr | None  # a constant or a bound variable that ids are compared with; None when ids index weights
    ids: Expr | None  # None where the score alone says who takes a token
    slot: Expr | None  # the variable over K, or None for one fixed slot
    weights: tuple[Expr, ...]
    kept: Expr | None = None  # 1 where ``expert`` takes a token that chose it, 0 where it drops it; None where it takes all
    score: Expr | None = None  # the weight of ``expert``, zero where no slot has it; None when ids index weights


def expert_index(algebra: Algebra, expert: ExpertTerm, feature: Expr) -> Expr | None:
    """The expert id that all weights are indexed by, None where each expert has tensors of its own."""
    leaves = [leaf for p in (*expert.up, expert.down) for leaf in (p.weight, p.bias) if leaf is not None]
    indices = _indices(algebra, leaves, (expert.width, expert.feature_in, feature))
    gathered = next((leaf.args[0].node for leaf in leaves if leaf.kind == "leaf" and leaf.args[0].op == "index"), None)
    detail = _OF_SEVERAL_IDS if gathered is None else _FROM_THE_END
    prove(len(indices) <= 1, Reason.PROJECTION_WEIGHTS, detail, gathered)
    return next(iter(indices), None)


def _indices(algebra: Algebra, weights: Iterable[Expr], features: tuple[Expr, ...]) -> set[Expr]:
    """What weights are indexed by that is no feature variable."""
    found: set[Expr] = set()
    for weight in weights:
        while weight.kind == "cast":
            weight = weight.args[1]
        prove(weight.kind == "leaf", Reason.PROJECTION_WEIGHTS, f"'{weight.kind}' of tensors")
        for index in weight.args[1]:
            terms = index.args[1] if index.kind == "linear" else ((1, index),)
            terms = [(c, atom) for c, atom in terms if atom.kind != "const" and atom not in features]
            if terms:
                found.add(_without_common_factor(algebra, terms))
    return found


def _without_common_factor(algebra: Algebra, terms: list[tuple[Size, Expr]]) -> Expr:
    """One atom, or what several add up to: an id of two digits is one id."""
    if len(terms) == 1:
        return terms[0][1]
    common = math.gcd(*(c for c, _ in terms)) if all(isinstance(c, int) for c, _ in terms) else 1
    return algebra.linear(0, [(c // common, atom) for c, atom in terms])


def read_indexed(ids: Expr, binders: tuple[Expr, ...], factors: tuple[Expr, ...]) -> Routing:
    """Weights are gathered by ``ids``: the term is one slot, or the sum over all slots."""
    return Routing(None, ids, binders[0] if binders else None, _without_markers(factors))


def read_compared(
    algebra: Algebra,
    expert: Expr | None,
    binders: tuple[Expr, ...],
    factors: tuple[Expr, ...],
    scale: tuple[Expr, ...] = (),
) -> Routing:
    """Ids are compared with one expert: ``sum over k of (ids == expert) * weight``, or one comparison.

    ``scale``: factors of the expert's input.
    """
    slot = next((binder for binder in binders if binder is not expert), None)
    selections: list[_Selection] = []
    plain: list[Expr] = []
    for factor in (*factors, *scale):
        selection = _selection(algebra, factor, expert)
        (plain.append(factor) if selection is None else selections.append(selection))
    prove(selections, Reason.ROUTING, "no comparison with an expert id")
    weighted = [s for s in selections if s.weights]
    summed = [s for s in selections if not s.once]
    chosen = (weighted or summed or selections)[0]
    factors = _without_markers(tuple(plain))
    beside = {chosen.factor: algebra.one}  # a count that is zero where the expert is not the slot's is the count
    keeping = [f for f in factors if _keeps(algebra.substitute(f, beside) if _counts(f) else f, chosen.ids)]
    for other in (s for s in weighted if s is not chosen and s.slot is not None and chosen.slot is not None):
        own = {other.slot: chosen.slot}  # of ids that differ: (sum_k [m_k] a_k) (sum_k [m_k] b_k) = sum_k [m_k] a_k b_k
        if algebra.substitute(other.ids, own) is chosen.ids:
            keeping += [algebra.substitute(weight, own) for weight in other.weights]
    factors = tuple(f for f in factors if f not in keeping)
    weights, score = (*chosen.weights, *factors), algebra.mul(chosen.factor, *factors)
    kept = algebra.mul(*keeping) if keeping else None
    return Routing(chosen.expert, chosen.ids, slot or chosen.slot, weights, kept, score)


def with_kept_apart(algebra: Algebra, routing: Routing) -> Routing:
    """A routing whose weights say which slots an expert keeps, with that among ``kept``: no tensor has to hold both.

        (mask * (rank < capacity) * scores).sum(0)              mask, rank: [K, T, E], scores: [T, E]
    """
    keeping = [w for w in routing.weights if routing.slot in w.free and _keeps(w, routing.ids)]
    if not keeping or routing.kept is not None:
        return routing
    weights = tuple(weight for weight in routing.weights if weight not in keeping)
    return replace(routing, weights=weights, kept=algebra.mul(*keeping), score=algebra.mul(*weights))


def read_scored(
    algebra: Algebra, expert: ExpertTerm, index: Expr | None, tokens: Indices, *, named: bool
) -> tuple[ExpertTerm, Routing] | None:
    """An expert that no id is compared with: its score is the whole product beside it, summed over all but the experts.

    Where a factor says that a place of the expert has the token, the expert's input is that token; where the expert names its
    tokens so (``named``), or a score that is not zero for others is made of who chose it, ids may be compared with it, too.
    """
    factors = expert.routing
    names = [f for f in factors if _names(f, index)]
    if named and (not any(map(_compares, names)) or any(_names_tokens(f, tokens) for f in factors)):
        names = []
    if expert.scale or names or any(_is_of_rows(f, tokens) for f in factors):
        return None
    hits = [(token, f) for token in tokens for f in factors if f.kind == "eq" and token in f.args]
    places = {side: token for token, f in hits for side in f.args if side.kind == "leaf"}
    x = algebra.substitute(expert.x, places)
    score = algebra.mul(*factors)
    for binder in expert.binders:
        if binder is not index:
            prove(binder not in x.free, Reason.ROUTING, _INPUT_SUMMED)
            score = algebra.sum(binder, score)
    return replace(expert, x=x), Routing(index, None, None, (), score=score)


def _names_tokens(factor: Expr, tokens: Indices) -> bool:
    """True if a factor is the number of places of an expert that have the token."""
    return factor.kind == "sum" and not factor.free.isdisjoint(tokens) and factor.args[1].kind == "eq"


def _is_of_rows(factor: Expr, tokens: Indices) -> bool:
    """True if a factor speaks of rows that were selected or sorted, of which nothing more is known than that each is a token."""
    rows = subexpressions(factor, lambda e: e.kind in ("nonzero", "group", "inverse") and not reorders(e, tokens[0]))
    return next(iter(rows), None) is not None


def _names(factor: Expr, expert: Expr | None) -> bool:
    """True if a factor compares something with an expert, and not a number of tokens that chose it with another."""
    named = (e for e in subexpressions(factor, lambda e: e.kind == "eq" and _expert_of(e, expert) is not None))
    return not is_order(factor) and next(named, None) is not None


def without_input_mask(algebra: Algebra, expert: ExpertTerm, feature: Expr) -> ExpertTerm:
    """An expert with the mask of its input among the weights of its output, where those are zero for what is masked.

    Or where the output is, as that of an expert without biases is for a token of zeros; a mask has no other numbers than 0
    and 1 there, while elsewhere its ids are proven to differ.
    """
    weight = algebra.mul(*expert.routing)
    masked = replace(expert, routing=factors_of(algebra.mul(weight, *expert.scale)), scale=())
    biased = not is_zero_at_zero(expert.activation) or any(p.bias is not None for p in (*expert.up, expert.down))
    if expert.scale and all(algebra.mul(weight, mark) is weight or (is_order(mark) and not biased) for mark in expert.scale):
        return masked
    index = expert_index(algebra, expert, feature) if expert.routing and expert.scale else None
    compares = any(map(_compares, expert.scale)) and index in (None, *expert.binders)
    if not expert.routing or not compares:
        return expert
    mask = read_compared(algebra, index, expert.binders, expert.scale)
    if mask.weights or mask.kept is not None or not (any(map(_compares, expert.routing)) or (mask.slot is None and not biased)):
        return expert
    return masked


@dataclass(frozen=True)
class _Selection:
    factor: Expr
    expert: Expr
    ids: Expr
    slot: Expr | None
    weights: tuple[Expr, ...]
    once: bool  # counts a token once however many of its ids match


def _selection(algebra: Algebra, factor: Expr, expert: Expr | None) -> _Selection | None:
    if not _compares(factor):
        return None
    core, around, dtype = _surroundings(factor)
    slot, body = algebra.open(core) if core.kind in ("sum", "any") else (None, core)
    parts = body.args if body.kind == "mul" and slot is not None else (body,)
    comparisons = [p for p in parts if p.kind == "eq" and _expert_of(p, expert) is not None]
    # One that decides what the ids of another are is a mask: torch.where(owner == 1, ids % E, E) == e
    comparisons = [p for p in comparisons if not any(p in _inside(other) for other in comparisons)]
    if not comparisons and is_indicator(factor):
        return None  # it says of another thing than ids whether a token is kept
    prove(len(comparisons) == 1, Reason.ROUTING, _NOT_ONE_COMPARISON)
    weights = (*around, *_without_markers(tuple(p for p in parts if p is not comparisons[0])))
    if dtype is not None and weights:
        # A cast of the sum is the cast of its one term.
        weights = (algebra.cast(dtype, algebra.mul(*weights)),)
    found, ids = _ids(comparisons[0], expert)
    return _Selection(factor, found, ids, slot, weights, core.kind == "any")


def _inside(comparison: Expr) -> Iterator[Expr]:
    """Comparisons that its sides are made of."""
    return (e for side in comparison.args for e in subexpressions(side, lambda e: e.kind == "eq"))


def _keeps(factor: Expr, ids: Expr) -> bool:
    """True if a factor is 0 or 1 by how often an expert was chosen, as where it has room for some tokens only.

    What is said of the expert that a slot has, whichever it is, or of what its id is made of, is part of the slot's weight.

        ids = chosen.masked_fill(chosen == E, 0), weights = scores.masked_fill(chosen == E, 0)          those of (chosen != E)
    """
    compares = next(iter(subexpressions(factor, lambda e: e.kind == "eq")), None) is not None
    made_of = {ids, *subexpressions(ids, lambda e: e.kind == "leaf")}
    return is_indicator(factor) and compares and next(iter(subexpressions(factor, made_of.__contains__)), None) is None


def _counts(factor: Expr) -> bool:
    """True if a running count is compared, and not a score."""
    return next(iter(subexpressions(factor, lambda e: e.kind == "prefix")), None) is not None


def _surroundings(factor: Expr) -> tuple[Expr, tuple[Expr, ...], torch.dtype | None]:
    """``cast(factors * selection)`` taken apart; a factor is the same for every slot and every expert."""
    dtype = None
    if factor.kind == "cast":
        dtype, factor = factor.args
    if factor.kind != "mul":
        return factor, (), dtype
    selecting = [f for f in factor.args if _compares(f)]
    prove(len(selecting) == 1, Reason.ROUTING, _NOT_ONE_COMPARISON)
    return selecting[0], tuple(f for f in factor.args if f is not selecting[0]), dtype


def _compares(e: Expr) -> bool:
    """True if comparisons decide if ``e`` is zero; those inside a function, as of another layer's output, do not."""
    if e.kind in ("mul", "cast", "any") or (e.kind == "sum" and e.args[0].args[2] == "r"):
        return any(_compares(part) for part in e.args if isinstance(part, Expr))
    return e.kind == "eq"


def _expert_of(comparison: Expr, expert: Expr | None) -> Expr | None:
    for side in comparison.args:
        if side is expert or (expert is None and side.kind == "const"):
            return side
    return None


def _ids(comparison: Expr, expert: Expr | None) -> tuple[Expr, Expr]:
    found = _expert_of(comparison, expert)
    a, b = comparison.args
    return found, b if a is found else a


def _without_markers(factors: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(f for f in factors if f.kind != "distinct")
