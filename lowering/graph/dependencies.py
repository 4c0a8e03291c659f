"""What nodes of a graph depend on: what they read, and what was written to it before.

    b = a.clone(); a.add_(1); c = a + b         c: all of these; b: a alone, whatever is written to it afterwards

Nodes only depend on those before them. So a walk from the last one backwards knows of each that it comes to whether something
depends on it, and what asks for few of them does not walk through the graph.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from torch import fx

from moeblaze_ops.lowering.graph.functional_view import GraphView


def dependencies(view: GraphView, *roots: fx.Node) -> Iterator[fx.Node]:
    """The roots and the nodes that any of them depends on, the latest first."""
    reached = set(roots)
    for node in _backwards(view, roots):
        if node in reached:
            reached.update(view.reads[node])
            yield node


def own_dependencies(
    view: GraphView, roots: Collection[fx.Node], others: Collection[fx.Node], without: Collection[fx.Node]
) -> set[fx.Node]:
    """The roots and the nodes that they depend on, but none of ``others`` does; ``without`` some, and what only they depend on.

        y = layer(x, weights), others = {x, weights}            the nodes of the layer
    """
    found: set[fx.Node] = set()
    of_others = set(others)
    ahead = {*roots} - of_others
    for node in _backwards(view, [*roots, *others]):
        if not ahead:
            break
        read = [operand for operand in view.reads[node] if operand not in without]
        if node in of_others:
            of_others.update(read)
            ahead.difference_update(read)
        elif node in ahead:
            ahead.remove(node)
            found.add(node)
            ahead.update(operand for operand in read if operand not in of_others)
    return found


def _backwards(view: GraphView, roots: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of a graph from the last of ``roots`` on."""
    last = max((view.position[root] for root in roots), default=-1)
    return islice(reversed(view.position), len(view.position) - 1 - last, None)
