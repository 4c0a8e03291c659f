"""How deep an element is looked into. Whatever is said here, an element that ends earlier or later is the same element.

Evaluation ends at what the model's state makes, and below the second projection, but for views, gathers, casts and products.
Past a limit of sums and products one inside the other it ends, too: matrices that are normalised, or multiplied, over and over
are no layer, and expanding them has no end.
"""

from collections.abc import Callable, Container

from moeblaze_ops.lowering.evaluate.projections import is_no_projection, projects
from moeblaze_ops.lowering.graph.computed_weights import is_computed_weight
from moeblaze_ops.lowering.graph.functional_view import Value

MAX_PROJECTIONS = 2
_SHALLOW = frozenset((
    "reshape", "permute", "slice", "select", "expand", "cast", "index", "take", "mul", "stack", "cat",
    "full", "arange", "inverse", "scatter", "sum", "any", "eq", "where", "lane", "lanes", "detach",
))  # fmt: skip
_MAX_SUMS = 8
"""Sums inside sums, between two products."""
_MAX_PRODUCTS = 6
"""Products of computed matrices inside such products."""


class Depth:
    """Of the values of one graph, seen through the operators ``looked_into``."""

    def __init__(self, looked_into: Container[str]) -> None:
        self._looked_into = looked_into
        self._sums: dict[Value, int] = {}
        self._products: dict[Value, int] = {}

    def ends(self, value: Value, depth: int) -> bool:
        """True if a value inside ``depth`` projections is not looked into."""
        kind = value.args[0] if value.op == "pointwise" else value.op
        integers = not value.dtype.is_floating_point
        changing = value.op == "pointwise" and any(x.op == "number" for x in value.args[1])
        shallow = integers or (kind in _SHALLOW and not changing) or (kind == "contract" and is_no_projection(value))
        shallow = shallow or (kind == "put" and len(value.args[1]) > 1)  # at places of experts, such as counts give
        return is_computed_weight(value) or (depth >= MAX_PROJECTIONS and not shallow) or self._is_nested(value)

    def _is_nested(self, value: Value) -> bool:
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


def partial_sums(value: Value, is_known: Callable[[Value], bool]) -> list[Value]:
    """Partial sums below ``value`` that are not known, innermost first, so that long chains need no deep recursion."""
    chain: dict[Value, None] = {}
    stack = [(inner, False) for inner in accumulators(value)]
    while stack:
        inner, finished = stack.pop()
        if finished:
            chain[inner] = None
        elif inner not in chain and not is_known(inner) and (below := accumulators(inner)):
            stack.append((inner, True))
            stack += [(part, False) for part in below]
    return list(chain)


def accumulators(value: Value) -> list[Value]:
    """Operands of the same shape that ``value`` adds something to."""
    inner: tuple[Value, ...] = ()
    if value.op in ("put", "scatter"):
        inner = value.args[:1]
    elif value.op == "pointwise" and value.args[0] == "add":
        inner = value.args[1]
    return [x for x in inner if x.shape == value.shape]
