"""Which sums are multiplied out to find experts as terms of their own; any others would give the same sum."""

from collections.abc import Callable, Iterator

from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of
from moeblaze_ops.lowering.match.terms.expert_term import holds_comparison


def sums_of_experts(e: Expr) -> Iterator[Expr]:
    """Sums of several experts, of which a product has one, and scores as the sums of those of single slots."""
    if e.kind == "sum" and _sums_experts(e):
        yield e
    elif e.kind == "mul":
        inner = list(filter(_sums_experts, e.args))
        yield from inner if len(inner) == 1 else ()
        yield from filter(_adds_choices, e.args) if e.has_dot else ()


def sums_of_vectors(feature: Expr) -> Callable[[Expr], Iterator[Expr]]:
    """Sums of what differs from feature to feature."""
    return lambda e: (f for f in factors_of(e) if f.kind == "add" and feature in f.free)


def _sums_experts(e: Expr) -> bool:
    if e.kind == "sum" and e.args[0].args[2] == "r":
        return any(_sums_experts(f) or _adds_choices(f) for f in factors_of(e.args[1]))
    return e.kind == "add" and sum(term.has_dot for term in e.args) > 1


def _adds_choices(e: Expr) -> bool:
    return e.kind == "add" and not e.has_dot and all(map(holds_comparison, e.args))
