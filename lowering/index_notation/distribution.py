"""A sum as its terms, by the distributive law, and terms as a product."""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import reduce

from moeblaze_ops.lowering.index_notation.expr import Expr, factors_of
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


def terms_of(algebra: Algebra, e: Expr, sums_in: Callable[[Expr], Iterable[Expr]]) -> Iterator[Expr]:
    """The terms that add up to ``e``, whatever ``sums_in`` says.

        a (b + c)           a b, a c                            if b + c is among the sums in a (b + c)
        sum_e (b_e + c_e)   sum_e b_e, sum_e c_e                if it is itself among the sums in it
    """
    if e.kind == "add":
        for term in e.args:
            yield from terms_of(algebra, term, sums_in)
        return
    for whole in sums_in(e):
        if whole is e and e.kind == "sum":
            var, body = algebra.open(e)
            yield from (algebra.sum(var, term) for term in terms_of(algebra, body, sums_in))
            return
        if e.kind == "mul" and whole in e.args and (terms := list(terms_of(algebra, whole, sums_in))) != [whole]:
            others = [*e.args]
            others.remove(whole)  # once, of a square
            for term in terms:
                yield from terms_of(algebra, algebra.mul(term, *others), sums_in)
            return
    yield e


def factored(algebra: Algebra, e: Expr) -> Expr:
    """``e``; of a sum what all of its terms have as a factor, and the sum of what is left of them.

        w a + w b               w (a + b)
        w w a + w               w (w a + 1)
    """
    terms = [Counter(factors_of(term)) for term in e.args] if e.kind == "add" else [Counter[Expr]()]
    if not (shared := reduce(operator.and_, terms)):
        return e
    return algebra.mul(*shared.elements(), algebra.add(*(algebra.mul(*(term - shared).elements()) for term in terms)))
