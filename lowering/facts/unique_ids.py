"""Ids of which no token has one twice.

    ids = scores.topk(K, -1).indices                                    along its last axis no id is there twice
    ids = scores.topk(K, -1).indices.t()                                no: along its last axis lie the choices of several tokens
    ids = (rows[:, :, None] * n + columns[:, None]).flatten(1)          pairs that differ, if every column is below n
    ids = (rows[:, :, None] + columns[:, None]).flatten(1)              no: 1 + 2 is 2 + 1
"""

from collections.abc import Iterable

from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative


def are_distinct(algebra: Algebra, ids: Expr, slot: Expr) -> bool:
    """True if ``ids`` differ for different values of the variable ``slot``, whatever the other variables are.

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
            return number.args[1][-1:] if number.args[0].choices_along == len(number.args[1]) - 1 else ()
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
