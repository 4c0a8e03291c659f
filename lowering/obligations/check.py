"""Whether a graph, captured with what only a rewrite justifies, may be compiled: what is wrong, each with its line."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moeblaze_ops.capture import row_groups
from moeblaze_ops.lowering.graph.effects import ASSERTS, has_effect, writes_beside
from moeblaze_ops.lowering.graph.functional_view import fake_of, graphs_of, storage_of, target_name, written_nodes
from moeblaze_ops.lowering.obligations.ids_in_range import unknown_counted_ids, without_known_ids, without_known_masks
from moeblaze_ops.lowering.obligations.markers import shared_with_host
from moeblaze_ops.lowering.obligations.running_counts import without_running_counts
from moeblaze_ops.lowering.torch_internals import places
from moeblaze_ops.ops.sharded.collectives import used_slots


def unproven(gm: fx.GraphModule) -> str | None:
    """What keeps the functions of ``row_groups`` from being what they took the place of; their checks are removed otherwise."""
    if writes := writes_to_rows(gm):
        return f"{', '.join(writes)} would write to a copy of rows"
    if shared := [node for graph in graphs_of(gm) for node in _writes_to_shared(graph)]:
        return f"{', '.join(_named(shared))} writes to numbers that the host shares"
    if groups_that_overlap(gm):
        return "rows would be in groups that are no counts of ids"
    if unknown_ids(gm) or any(map(unknown_counted_ids, graphs_of(gm))):
        return "ids may be no numbers of experts"
    return "a mask of experts may have negative elements" if unknown_masks(gm) else None


def unjustified_effects(gm: fx.GraphModule, captured: set[fx.Node], regions: Sequence[Any]) -> list[str]:
    """The captured nodes from ``regions`` that are still there and do more than give a value, each with its line."""

    def inside(node: fx.Node) -> bool:
        return any(region.holds(*place) for place in places(node) for region in regions)

    nodes = [node for node in all_nodes(gm) if node in captured and has_effect(node) and inside(node)]
    return _named(nodes)


def remaining_effects(gm: fx.GraphModule, work: set[fx.Node]) -> list[str]:
    """The nodes of ``work`` that are still there and do more than give a value, or assert something, each with its line."""
    nodes = [node for node in all_nodes(gm) if node in work and (has_effect(node) or target_name(node) in ASSERTS)]
    return _named(nodes)


def writes_to_rows(gm: fx.GraphModule) -> list[str]:
    """What writes to rows that were a slice and are a copy now, or to counts that were on the host, each once with its line."""
    writes = [node for graph in graphs_of(gm) for node in writes_beside(graph, lambda n: _is_of_row_groups(n, "take", "kept"))]
    return _named(writes)


def _writes_to_shared(graph: fx.Graph) -> Iterator[fx.Node]:
    """What writes to numbers that an array on the host may share, after it was made.

        sizes = counts.numpy(); counts.zero_()      and not     sizes = counts.tolist(); counts.zero_()
    """
    shared: set[int] = set()
    for node in graph.nodes if any(node.target is shared_with_host for node in graph.nodes) else ():
        if node.op != "output" and any(storage_of(written) in shared for written in written_nodes(node)):
            yield node
        if node.target is shared_with_host and (storage := storage_of(node)) is not None:
            shared.add(storage)


def groups_that_overlap(gm: fx.GraphModule) -> bool:
    """Whether slices by numbers on the host, which may overlap or stand in any order, became groups of rows, which do not.

    Or whether slices of some rows only were concatenated: what took their place has all rows.
    """

    def searches(node: fx.Node) -> bool:
        return node.target is torch.searchsorted and _is_of_row_groups(node, "rows")

    def joined(graph: fx.Graph) -> bool:
        return any(_is_of_row_groups(node, "put") for node in graph.nodes)

    return any(without_running_counts(graph, searches, covering=joined(graph)) for graph in graphs_of(gm))


def unknown_ids(gm: fx.GraphModule) -> bool:
    """Whether a loop over the numbers among ids became one over all experts, of which some id may be none.

    Otherwise the checks of that are removed.
    """

    def checks(node: fx.Node) -> bool:
        return _is_of_row_groups(node, "numbers")

    return any(without_known_ids(graph, checks) for graph in graphs_of(gm))


def unknown_masks(gm: fx.GraphModule) -> bool:
    """Whether a loop over the experts that a mask hits became one over all, where an element of the mask may be negative.

    Otherwise the checks of that are removed.
    """

    def checks(node: fx.Node) -> bool:
        return _is_of_row_groups(node, "masked_numbers")

    return any(without_known_masks(graph, checks) for graph in graphs_of(gm))


_MADE = frozenset(("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "empty", "empty_like", "full"))


def rewritten_ids(gm: fx.GraphModule) -> list[str]:
    """What writes to ids, counts and masks that a part left out of the graph may have read before, each with its line.

    It accepts ``counts = ids.new_zeros(T, E); counts.scatter_(1, ids, 1)`` and refuses ``hit = ids.unique(); ids.copy_(other)``,
    through whatever alias the write is.
    """
    found = [write for graph in graphs_of(gm) for write in _writes_to_ids(graph)]
    return _named(found)


def _writes_to_ids(graph: fx.Graph) -> list[fx.Node]:
    aliases: dict[int, list[fx.Node]] = {}
    writes: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if (storage := storage_of(node)) is not None:
            aliases.setdefault(storage, []).append(node)
        for written in written_nodes(node):
            if (storage := storage_of(written)) is not None:
                writes.setdefault(storage, []).append(node)
    return [write for storage, found in writes.items() if _tells_experts(aliases[storage], found) for write in found]


def _tells_experts(aliases: list[fx.Node], writes: list[fx.Node]) -> bool:
    """Whether memory that is written holds ids or a mask that is read, or is compared; but for what is made and filled once."""
    readers = {user for alias in aliases for user in alias.users}.difference(aliases, writes)
    if not readers or (len(writes) == 1 and target_name(aliases[0]) in _MADE):
        return False
    return any(isinstance(fake := fake_of(n), torch.Tensor) and not fake.is_floating_point() for n in (aliases[0], *readers))


def drop_unread_copies(gm: fx.GraphModule) -> None:
    """Remove copies of numbers that would have been on the host, where nothing reads them, and what only they are made of."""
    for graph in graphs_of(gm):
        unread: set[fx.Node] = set()
        for node in reversed(list(graph.nodes)):
            copied = node.op in ("call_function", "call_method") and _is_of_row_groups(node, "kept")
            if not node.users and (copied or node in unread) and node.op != "placeholder" and not has_effect(node):
                unread.update(node.all_input_nodes)
                graph.erase_node(node)
        if unread:
            graph.owning_module.recompile()


def _is_of_row_groups(node: fx.Node, *functions: str) -> bool:
    return any(file == row_groups.__file__ and function in functions for file, _, function in places(node)[-1:])


def data_dependent_shapes(gm: fx.GraphModule, *, numbers: bool) -> list[str]:
    """The program's ops that make tensors of a size that only the data tell, or ``numbers`` on the host, each with its line."""

    def depends_on_data(node: fx.Node) -> bool:
        value = node.meta.get("example_value")
        tensors = [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)]
        return any(free_unbacked_symbols(tensor) for tensor in tensors)

    nodes = all_nodes(gm)
    dependent = {node for node in nodes if depends_on_data(node)}
    dependent |= {node for node in nodes if numbers and target_name(node) == "item"}
    sources = [node for node in nodes if node in dependent and dependent.isdisjoint(node.all_input_nodes)]
    return _named(node for node in sources if node.target is not used_slots)


def all_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """All nodes, those of bodies of higher-order operators included."""
    return [node for graph in graphs_of(gm) for node in graph.nodes]


def _named(nodes: Iterable[fx.Node]) -> list[str]:
    """Each node with its line, once."""
    return list(dict.fromkeys(f"{node.name.rstrip('_0123456789')} ({_line(node)})" for node in nodes))


def _line(node: fx.Node) -> str:
    stack = places(node)
    return f"{stack[-1][0]}:{stack[-1][1]}" if stack else "source unknown"
