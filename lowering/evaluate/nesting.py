"""How many sums and products stand one inside the other: past a limit they are not looked into.

Matrices that are normalised, or multiplied, over and over are no layer, and expanding them has no end.
"""

from collections.abc import Callable, Container

from moeblaze_ops.lowering.evaluate.projections import projects
from moeblaze_ops.lowering.graph.functional_view import Value

_MAX_SUMS = 8
"""Sums inside sums, between two products."""
_MAX_PRODUCTS = 6
"""Products of computed matrices inside such products."""


class Nesting:
    """Of the values of one graph, seen through the operators ``looked_into``."""

    def __init__(self, looked_into: Container[str]) -> None:
        self._looked_into = looked_into
        self._sums: dict[Value, int] = {}
        self._products: dict[Value, int] = {}

    def is_deep(self, value: Value) -> bool:
        sums = self._count(value, self._sums, lambda v: v.op == "sum", lambda v: v.op in ("contract", "grouped_mm"))
        products = self._count(value, self._products, lambda v: v.op == "contract", projects)
        return sums > _MAX_SUMS or products > _MAX_PRODUCTS

    def _count(
        self, value: Value, known: dict[Value, int], counts: Callable[[Value], bool], ends: Callable[[Value], bool]
    ) -> int:
        """The most operators that count on a way down from ``value`` to those that end it."""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in known:
                stack.pop()
                continue
            below = [] if ends(top) or top.op not in self._looked_into else _operands(top)
            if unknown := [x for x in below if x not in known]:
                stack += unknown
                continue
            stack.pop()
            known[top] = max((known[x] for x in below), default=0) + counts(top)
        return known[value]


def _operands(value: Value) -> list[Value]:
    parts = [part for arg in value.args for part in (arg if isinstance(arg, tuple) else (arg,))]
    return [part for part in parts if isinstance(part, Value)]
