"""Several candidates over the same experts: which are parts of a layer, and which only add something around layers.

A sum over experts is built step by step, and what is built is added to other things: a residual, shared experts,
another layer. Each step may be taken for a layer. ``Chosen`` says of a term which expert it is; sums are compared by
counting what their terms chose.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import sympy

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of, subexpressions

_VARIABLE = "var"


class Chosen(NamedTuple):
    """An expert of a sum: the tensors of ids that choose it, and how, whatever the token."""

    ids: frozenset[Value]
    how: frozenset[Hashable]

    @property
    def numbers(self) -> frozenset[Value]:
        """Those of ``ids`` that hold numbers or truth values, and no scores."""
        return frozenset(value for value in self.ids if not value.dtype.is_floating_point)

    @property
    def layer(self) -> Hashable:
        """``ids``, and what is made of them before it is compared with numbers: ids // 2 may choose another layer's experts."""
        compared = (side for each in self.how if isinstance(each, frozenset) for side in each)
        return self.ids, frozenset(side for side in compared if isinstance(side, str))


def chosen_by(term: Expr, feature: Expr) -> Chosen:
    """What chooses the expert of a term: comparisons, or ids that its weights are indexed by, or else its score."""
    factors = list(_own_factors(term, feature))
    compared = {_anywhere(e) for factor in factors for e in subexpressions(factor, lambda e: e.kind == "eq")}
    indexed = () if compared else (_anywhere(e) for factor in factors for e in _indices(factor))
    how = frozenset(compared or indexed)
    if not how:
        beside = (factor for factor in factors_of(term) if feature not in factor.free)
        scores = [leaf for factor in beside for leaf in subexpressions(factor, lambda e: e.kind == "leaf")]
        return Chosen(frozenset(leaf.args[0] for leaf in scores), frozenset(map(_anywhere, scores)))
    return Chosen(frozenset(v for factor in factors for v in _routed_by(factor)), how)


Grouped: TypeAlias = dict[Hashable, dict[Chosen, int]]
"""How often each expert is chosen, by layer: the tensors of ids that choose it, and what is compared."""


def grouped(experts: Counter) -> Grouped:
    """The same counts, in groups."""
    found: Grouped = {}
    for chosen, count in experts.items():
        found.setdefault(chosen.layer, {})[chosen] = count
    return found


def is_part(sum_: Grouped, whole: Grouped) -> bool:
    """True if a sum has some of the experts of a layer in ``whole``, or some of them more often than others.

    ``whole`` may be the sum of several layers. What it has of a layer for other tokens is no sum of parts.

        out = out + experts[0](x) * share(0)        of out + experts[1](x) * share(1)
        x = x + layer(x)                            not of y + other(y), where y = x[1:]
    """
    if any(experts.keys().isdisjoint(whole.get(ids, ())) for ids, experts in sum_.items()):
        return False
    pairs = [(experts, whole[ids]) for ids, experts in sum_.items()]
    if any(experts.keys() != own.keys() for experts, own in pairs):
        return True
    shares = ({1.0} if experts == own else {own[chosen] / experts[chosen] for chosen in experts} for experts, own in pairs)
    return len(set().union(*shares)) > 1


def is_fewer(part: Counter, whole: Counter) -> bool:
    """True if ``whole`` has all experts of ``part``, which are some, and more."""
    return part.keys() <= whole.keys() and 0 < part.total() < whole.total() and (part.items() <= whole.items() or part <= whole)


def is_sum_of(whole: Counter, layers: Sequence[Counter], *, scores: bool = True) -> bool:
    """True if all experts of ``whole`` may be those of the layers; without ``scores`` only those count that ids choose.

        sum over s of gate(h)[s] * h[s], where h = layer(x) + mix @ x           the layer, and a gate's terms: hyper-connections
    """
    known = values_of(chosen for layer in layers for chosen in layer)
    if not scores and all(chosen.numbers <= known for chosen in whole):
        whole = Counter({chosen: n for chosen, n in whole.items() if chosen.ids and chosen.numbers == chosen.ids}) or whole
    enough = 0 < whole.total() <= sum(layer.total() for layer in layers)
    return enough and all(chosen.ids and chosen.ids <= known for chosen in whole)


def values_of(experts: Iterable[Chosen]) -> set[Value]:
    """The tensors of ids that choose any of the experts."""
    return set().union(*(chosen.ids for chosen in experts))


def _own_factors(term: Expr, feature: Expr) -> Iterator[Expr]:
    """The factors of a term but for what all features share and a product gave: it may come from other layers."""
    if term.kind == "mul" or (term.kind == "sum" and term.args[0].args[2] == "r"):
        for part in term.args if term.kind == "mul" else term.args[1:]:
            yield from _own_factors(part, feature)
    elif feature in term.free or not term.has_dot:
        yield term


def _routed_by(term: Expr) -> Iterator[Value]:
    """Integer tensors that a term compares with an expert or indexes weights by."""
    for e in subexpressions(term, lambda e: e.kind == "leaf"):
        if not e.args[0].dtype.is_floating_point:
            yield e.args[0]
        for index in e.args[1]:
            yield from (leaf.args[0] for leaf in subexpressions(index, lambda i: i.kind == "leaf"))


def _indices(term: Expr) -> Iterator[Expr]:
    """Leaves by which leaves are indexed."""
    for e in subexpressions(term, lambda e: e.kind == "leaf"):
        for index in e.args[1]:
            yield from subexpressions(index, lambda i: i.kind == "leaf")


def _anywhere(e: Expr) -> Hashable:
    """The structure of an expression with every variable alike, be it one or, as of tokens in several axes, made of several."""
    if e.kind == "const":
        return e.args[0]
    if e.kind == "leaf":
        return e.args[0], tuple(map(_anywhere, e.args[1]))
    if e.kind == "eq":
        return frozenset(map(_anywhere, e.args))
    if e.kind == "linear":
        constant, atoms = e.args[0], [(coefficient, _anywhere(atom)) for coefficient, atom in e.args[1]]
        others = frozenset((coefficient, atom) for coefficient, atom in atoms if atom != _VARIABLE)
        steps = [coefficient for coefficient, atom in atoms if atom == _VARIABLE]
        return (constant, others, reduce(sympy.gcd, steps, 0)) if constant or others else _VARIABLE
    if e.kind in ("div", "mod") and _anywhere(e.args[0]) == _VARIABLE:
        return _VARIABLE
    return e.kind
