"""What a layer's sum starts from, where that is not zeros: the output of shared experts, a residual."""

from collections.abc import Iterator

from torch import fx
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.evaluate.depth import accumulators
from moeblaze_ops.lowering.evaluate.projections import projects
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value

STAYS = "moeblaze_stays"
"""In the metadata of a node right before a store: it holds what stays of the tensor, with zeros for what is stored there."""

STORED = "moeblaze_stored"
"""In the metadata of a node that stores a part of a buffer, which a layer may be added to, when it is done."""


def bases(view: GraphView, root: fx.Node, value: Value) -> Iterator[tuple[fx.Node, Value]]:
    """What ``value`` adds to, and the node that holds it at ``root``, or will once the writes of the sum are gone."""
    if STAYS in root.prev.meta:
        yield root.prev, view.value(root.prev)
    buffer = view.aliases(view.writes[root]) if root in view.writes else []
    for base in _addends(value):
        node = base.node
        kept = view.value_at(node, view.position[root]) is base or node in buffer
        if kept and node not in view.writes and view.value(node) is base and base.dtype == value.dtype:
            yield node, base


def _addends(value: Value) -> Iterator[Value]:
    stack, seen = accumulators(value), set()
    while stack:
        inner = stack.pop()
        if inner not in seen:
            seen.add(inner)
            yield inner
            stack += accumulators(inner)


def adds(total: Value, x: Value) -> bool:
    """True if a way leads from ``x`` to ``total`` on which no projection lies.

    out = out + expert(x) * share                   none, whatever ``share`` is projected from
    out = out + x * share                           one
    """
    stack, seen = [total], set()
    while stack:
        value = stack.pop()
        if value is x:
            return True
        if value in seen or projects(value) or not value.dtype.is_floating_point:
            continue
        seen.add(value)
        stack += (part for part in tree_leaves(value.args) if isinstance(part, Value))
    return False
