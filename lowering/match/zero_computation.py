"""Zero-computation experts: ids whose experts give a token itself (LongCat-Flash), or one vector to all tokens (MoE++).

    out.index_add_(0, token, x[token] * weights[token, slot, None])         token, slot = where(ids == e): the token
    out += self.constant * (weights * (ids == e)).sum(-1, keepdim=True)     one vector for all tokens
    out += expert(x).cumsum(0) * (weights * (ids == e)).sum(-1, True)       neither: it is no term of these

All ids of one vector together add that vector times the sum of their weights. An expert that gives zeros adds nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moeblaze_ops.lowering.graph.stored_numbers import holds_all
from moeblaze_ops.lowering.index_notation.distribution import terms_of
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of, split_number, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import holds_comparison, made_by
from moeblaze_ops.lowering.match.terms.routing_term import Routing, read_compared
from moeblaze_ops.lowering.match.terms.sums import sums_of_vectors

_NO_PROJECTIONS = "an expert without projections"
_OTHER = "an expert gives {}, which is neither two projections of its tokens, nor the tokens, nor one vector"


@dataclass(frozen=True)
class ZeroComputation:
    """Experts ``numbers``: each gives a vector, ``[T, D]`` or ``[D]``, times ``factor`` and a number of a token, ``[T, 1]``."""

    numbers: tuple[int, ...]
    vector: Operand
    is_constant: bool
    factor: float = 1
    of_token: Operand | None = None


@dataclass(frozen=True)
class ZeroComputationTerm:
    """A term of the sum: what one expert gives, and the factors that all features share."""

    number: float
    vector: Expr
    routing: Routing


def is_routed(term: Expr, feature: Expr) -> bool:
    """A cheap look: whether a comparison decides which tokens get the term."""
    shared = (f for f in factors_of(term) if feature not in f.free or f.kind in ("add", "cast", "sum"))
    return any(map(holds_comparison, shared))


def read_terms(algebra: Algebra, term: Expr, feature: Expr, dtype: torch.dtype) -> Iterator[ZeroComputationTerm]:
    """What ``term`` adds to a result of ``dtype``, each product of a vector and a routing on its own."""
    for product in terms_of(algebra, _unrounded(algebra, term, feature, dtype), sums_of_vectors(feature)):
        number, factors = split_number(product)
        vectors, shared = ([f for f in factors if (feature in f.free) is own] for own in (True, False))
        prove(len(vectors) == 1, Reason.OTHER_TERMS, _OTHER.format(made_by(product, feature)))
        try:
            routing = read_compared(algebra, None, (), tuple(shared))
        except Declined as declined:
            raise Declined(Reason.OTHER_TERMS, _of_rows(product) or declined.detail) from None
        prove(routing.kept is None, Reason.OTHER_TERMS, f"{_NO_PROJECTIONS} drops tokens that chose it")
        yield ZeroComputationTerm(number, vectors[0], routing)


def _of_rows(product: Expr) -> str:
    """What is wrong if a factor is computed of selected rows; nothing if none is."""
    for leaf in subexpressions(product, lambda e: e.kind == "leaf" and e.args[0].dtype.is_floating_point):
        row = leaf.args[1][0] if leaf.args[1] else None
        if row is not None and row.kind == "var" and row.args[2] == "r":
            return f"{_NO_PROJECTIONS} multiplies by {made_by(leaf, leaf)} of selected rows, not of all tokens"
    return ""


def _unrounded(algebra: Algebra, e: Expr, feature: Expr, dtype: torch.dtype) -> Expr:
    """A term without the casts of what is added up, as far as they keep the precision of the result's ``dtype``.

        out.index_add_(0, token, (x[token] * weights[token, slot, None]).to(out.dtype))
    """
    if feature not in e.free:
        return e
    if e.kind == "cast" and e.args[1].kind in ("mul", "add", "sum", "cast"):
        kept = e.args[0].is_floating_point and holds_all(e.args[0], dtype)
        prove(kept, Reason.DTYPE_PATH, f"an expert's result is rounded to {e.args[0]}")
        return _unrounded(algebra, e.args[1], feature, dtype)
    if e.kind in ("mul", "add"):
        return getattr(algebra, e.kind)(*(_unrounded(algebra, part, feature, dtype) for part in e.args))
    if e.kind == "sum":
        var, body = algebra.open(e)
        return algebra.sum(var, _unrounded(algebra, body, feature, dtype))
    return e


def find_zero_computation(
    algebra: Algebra,
    finder: Finder,
    terms: Sequence[ZeroComputationTerm],
    feature: Expr,
    routings: Sequence[Routing],
    is_x: Callable[[Operand], bool],
) -> tuple[ZeroComputation, ...]:
    """The experts of ``terms``, by the ``routings`` of the others; ``is_x``: whether an operand is what those are given."""
    by_slot: dict[Expr, dict[tuple[Expr, Expr], dict[int, float]]]
    by_slot = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for term in terms:
        ids, factor, of_token = _beside(algebra, term.routing, routings)
        by_slot[ids][term.vector, of_token][term.routing.expert.args[0]] += term.number * factor
    lead = next(iter(by_slot.values()), {})
    return tuple(
        ZeroComputation(tuple(sorted(n for n in numbers if numbers[n] == factor)), *found, factor, scale)
        for (vector, of_token), numbers in lead.items()
        for found, scale in [(_vector(finder, vector, feature, is_x), _of_token(algebra, finder, of_token))]
        for factor in dict.fromkeys(numbers.values())
    )


def _beside(algebra: Algebra, routing: Routing, routings: Sequence[Routing]) -> tuple[Expr, float, Expr]:
    """The ids of other experts that choose a term, and what it multiplies their weights by: a number, and one of a token."""
    for other in routings:
        renamed = {routing.slot: other.slot} if routing.slot is not None and other.slot is not None else {}
        if algebra.substitute(routing.ids, renamed) is not other.ids or (routing.slot is None) != (other.slot is None):
            continue
        own_number, own_factors = split_number(algebra.substitute(algebra.mul(*routing.weights), renamed))
        number, factors = split_number(algebra.mul(*other.weights))
        own, weights = Counter(own_factors), Counter(factors)
        of_token = algebra.mul(*(own - weights).elements())
        if weights <= own and all(var.args[2] == "t" for var in of_token.free):
            return other.ids, own_number / number, of_token
        return other.ids, 1, algebra.one  # where those of the others' input are not looked into
    raise Declined(Reason.OTHER_TERMS, f"{_NO_PROJECTIONS} is chosen by other ids than the others")


def _vector(finder: Finder, vector: Expr, feature: Expr, is_x: Callable[[Operand], bool]) -> tuple[Operand, bool]:
    """What holds the vector, and whether it is the same for all tokens."""
    width = feature.args[1]
    if vector.free <= {feature} and (found := finder.find_table((vector,), (width, (feature,)))) is not None:
        return found, True
    found = finder.find((vector,), (feature,), width)
    prove(found is not None and is_x(found), Reason.OTHER_TERMS, _OTHER.format(made_by(vector, feature)))
    return found, False


def _of_token(algebra: Algebra, finder: Finder, factor: Expr) -> Operand | None:
    if factor is algebra.one:
        return None
    found = finder.find((factor,), (algebra.zero,), 1)
    detail = f"no tensor [T, 1] holds what {_NO_PROJECTIONS} multiplies its vector by"
    prove(found is not None, Reason.OTHER_TERMS, detail)
    return found
