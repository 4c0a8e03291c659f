"""Ids of which no token has one twice.

    ids = scores.topk(K, -1).indices                                    along its last axis no id is there twice
    ids = scores.topk(K, -1).indices.t()                                no: along its last axis lie the choices of several tokens
    ids = (rows[:, :, None] * n + columns[:, None]).flatten(1)          pairs that differ, if every column is below n
    ids = (rows[:, :, None] + columns[:, None]).flatten(1)              no: 1 + 2 is 2 + 1
"""

from collections.abc import Iterable

from torch import fx

from moeblaze_ops.lowering.facts.non_negative import never_negative
from moeblaze_ops.lowering.graph.functional_view import target_name
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


def are_distinct(algebra: Algebra, ids: Expr, slot: Expr) -> bool:
    """Whether ``ids`` differ for different values of the variable ``slot``, whatever the other variables are.

    They do if they tell the slot: as an index of a top-k tells its place in it, and this place whatever it is made of.
    """
    return tells(algebra, [ids], slot)


def tells(algebra: Algebra, numbers: Iterable[Expr], var: Expr) -> bool:
    """True if ``var`` is known when ``numbers`` and all other variables are."""
    told: set[Expr] = set()
    new = {number for number in numbers if var in number.free}
    while new and var not in told:
        told |= new
        found = {*_dividends(told)}.union(*(_told_by(algebra, number, told, var) for number in told))
        new = {number for number in found if var in number.free} - told
    return var in told


def _told_by(algebra: Algebra, number: Expr, told: set[Expr], var: Expr) -> Iterable[Expr]:
    """What is known when ``number`` is and what is ``told``."""
    match number.kind:
        case "leaf" if all(var not in index.free or index in told for index in number.args[1][:-1]):
            return number.args[1][-1:] if _is_choice(number) else ()
        case "linear":
            return _digits(algebra, [(c, atom) for c, atom in number.args[1] if var in atom.free and atom not in told])
        case "nonzero" if all(place in told or place.args[3] == 1 for place in algebra.true_place(*number.args[::2])):
            return number.args[2:3]
    return ()


def _digits(algebra: Algebra, terms: list[tuple[int, Expr]]) -> Iterable[Expr]:
    """The atoms of ``sum(coefficient * atom)``, if it has another value for all other values of them."""
    if not all(isinstance(coefficient, int) for coefficient, _ in terms):
        return ()
    terms.sort(key=lambda term: abs(term[0]))
    most = 0  # of the terms that come before
    for coefficient, atom in terms:
        if abs(coefficient) <= most or (len(terms) > 1 and not never_negative(atom)):
            return ()
        bound = algebra.extent(atom)
        most = most + abs(coefficient) * (bound - 1) if isinstance(bound, int) else float("inf")
    return [atom for _, atom in terms]


def _dividends(told: set[Expr]) -> Iterable[Expr]:
    """Numbers of which quotient and remainder by one size are known."""
    quotients, remainders = ({part.args for part in told if part.kind == kind} for kind in ("div", "mod"))
    return [number for number, _ in quotients & remainders]


_POSITIONS = {("topk", 1): 2, ("sort", 1): 1, ("argsort", None): 1}
"""What gives places of the elements of an axis, no place twice, by the number of its output; and where its ``dim`` stands."""


def _is_choice(ids: Expr) -> bool:
    """Whether ``ids`` is an element of what a top-k or a sort along its last axis has chosen."""
    if ids.args[0].op not in ("output", "opaque"):
        return ids.args[0].op == "argsort"
    made_by, which = ids.args[0].args[:2]
    name = target_name(made_by)
    return (name, which) in _POSITIONS and _dim(made_by, name) in (-1, len(ids.args[1]) - 1)


def _dim(made_by: fx.Node, name: str) -> int:
    at = next(at for (known, _), at in _POSITIONS.items() if known == name)
    return made_by.args[at] if len(made_by.args) > at else made_by.kwargs.get("dim", -1)
