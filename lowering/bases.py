"""What a layer's sum starts from, where that is not zeros: the output of shared experts, a residual."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from moeblaze_ops.lowering.elements import accumulators
from moeblaze_ops.lowering.expressions import Expr
from moeblaze_ops.lowering.values import GraphView, Value


def find_base(
    view: GraphView, root: fx.Node, value: Value, others: Sequence[Expr], terms: Callable[[Value], Sequence[Expr]]
) -> fx.Node | None:
    """The node whose elements are ``others``, the terms of ``value`` that are no experts.

    It is one that ``value`` adds to, and that holds them at ``root``, or will once the writes of the sum to it are gone.
    """
    buffer = view.aliases(view.writes[root]) if root in view.writes else []
    for base in _addends(value):
        node = base.node
        kept = view.value_at(node, view.position[root]) is base or node in buffer
        kept = kept and node not in view.writes and view.value(node) is base
        if kept and base.dtype == value.dtype and Counter(terms(base)) == Counter(others):
            return node
    return None


def _addends(value: Value) -> Iterator[Value]:
    stack, seen = accumulators(value), set()
    while stack:
        inner = stack.pop()
        if inner not in seen:
            seen.add(inner)
            yield inner
            stack += accumulators(inner)
