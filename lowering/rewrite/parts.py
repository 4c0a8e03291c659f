"""Parts of a buffer as tensors of their own while a program writes to them, for the search for layers to find each by itself.

    for b in range(B):                          part = out[b].clone()       for each b, before the first write
        for e in range(E):
            out[b].index_add_(0, token, rows)   part.index_add_(0, token, rows)
    return out                                  out[b].copy_(part)          for each b

So what a layer's experts are added to is seen by nobody else, and is stored before somebody reads the buffer in another way.
"""

from collections.abc import Collection, Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.graph.fake_values import fake_of, storage_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, inplace_name, target_name
from moeblaze_ops.lowering.match.matcher import view_of
from moeblaze_ops.lowering.match.region import reads_size
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.rewrite.memory import Memory, are_apart, memory_of
from moeblaze_ops.lowering.undoable_edits import Edits

_STORES = frozenset((
    "add", "sub", "mul", "div", "addcmul", "index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce",
    "setitem", "__setitem__", "copy", "zero", "fill", "masked_fill",
))  # fmt: skip
"""What writes elements alone; others may give a tensor another shape."""

Reads = list[tuple[fx.Node, fx.Node]]
"""Nodes that read or write memory, each with the alias by which it does."""


def hold_parts(edits: Edits, buffers: Collection[int | None]) -> dict[int | None, int | None]:
    """Insert tensors for the parts of ``buffers``, which their storages name, and give the buffer of each by its own storage."""
    view, held = view_of(edits.graph), dict[int | None, int | None]()
    for buffer in buffers:
        aliases = _aliases(view, buffer)
        for write in aliases:
            if (alias := _viewed(view, write)) is not write:
                edits.replace(list(write.users), write, alias)
        for parts, behind in list(_windows(view, buffer)):
            for memory, reads in parts.items():
                alias = next(node for node in aliases if node not in view.writes and memory_of(node) == memory)
                part = Inserter(edits, reads[0][0].prev).call("clone", alias)
                held[storage_of(part)] = buffer
                for reader, read in reads:
                    alike = fake_of(read).shape == fake_of(alias).shape
                    edits.replace([reader], read, part if alike else Inserter(edits, reader.prev).call("view_as", part, read))
                insert = Inserter(edits, behind.prev)
                insert.call("copy_", _viewed_again(insert, alias, buffer), part)
    return held


def has_parts(view: GraphView, buffer: int | None) -> bool:
    """True if it is known what writes to a buffer, which autograd sees, and there are parts of it, or a caller has it."""
    aliases = _aliases(view, buffer)
    writes = [(node, target) for node, target in view.all_writes() if target in aliases]
    seen = view.detached.isdisjoint(aliases) and all(view.writes[node] is target for node, target in writes)
    known = all((inplace_name(node) or "") in _STORES and target_name(node) for node, target in writes)
    return seen and known and (not view.inputs.isdisjoint(aliases) or len(set(map(memory_of, aliases))) > 1)


def _aliases(view: GraphView, buffer: int | None) -> list[fx.Node]:
    return [node for node in view.position if storage_of(node) == buffer]


def _viewed(view: GraphView, node: fx.Node) -> fx.Node:
    """What a node wrote to and gives."""
    while node in view.writes:
        node = view.writes[node]
    return node


def _viewed_again(insert: Inserter, node: fx.Node, buffer: int | None) -> fx.Node:
    """A view made anew: autograd lets none write that were made before another write gave the buffer a gradient."""
    if not any(_is_view(of, buffer) for of in node.all_input_nodes):
        return node
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda of: _viewed_again(insert, of, buffer) if _is_view(of, buffer) else of
    )
    return insert.call(node.target, *args, **kwargs)


def _windows(view: GraphView, buffer: int | None) -> Iterator[tuple[dict[Memory, Reads], fx.Node]]:
    """Parts that are written between others reading the buffer, and the node before which they have to be there again."""
    parts: dict[Memory, Reads] = {}
    for node in view.position:
        is_view = _is_view(node, buffer) and target_name(node) and node not in view.writes
        read = [] if is_view or reads_size(node) else [of for of in node.all_input_nodes if storage_of(of) == buffer]
        memories = set(map(memory_of, read))
        written = {memory_of(alias) for alias in read if _viewed(view, node) is _viewed(view, alias)}
        moved = bool(parts) and view.context[node] != view.context[next(iter(parts.values()))[0][0]]
        if parts and (moved or node.op == "output" or not _fit(memories, {*parts, *written})):
            yield parts, node
            parts = {}
        if _fit(memories, written):
            parts |= {memory: [] for memory in written if memory not in parts}
        for alias in read:
            if (reads := parts.get(memory_of(alias))) is not None:
                reads.append((node, alias))


def _fit(memories: set[Memory], parts: set[Memory]) -> bool:
    return all(memory == part or are_apart(memory, part) for memory in memories for part in parts)


def _is_view(node: fx.Node, buffer: int | None) -> bool:
    """True if a node gives views of a buffer alone."""
    given = [isinstance(fake, torch.Tensor) and fake.untyped_storage()._cdata == buffer for fake in tree_leaves(fake_of(node))]
    return bool(given) and all(given)
