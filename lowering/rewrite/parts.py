"""Parts of a buffer as tensors of their own while a program writes to them, for the search for layers to find each by itself.

    for b in range(B):                          part = out[b].clone()       for each b, before the first write
        for e in range(E):
            out[b].index_add_(0, token, rows)   part.index_add_(0, token, rows)
    return out                                  out[b].copy_(part)          for each b

So what a layer's experts are added to is seen by nobody else, and is stored before somebody reads the buffer in another way.
"""

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.graph.fake_values import fake_mode_of, fake_of, fake_result, needs_gradient, storage_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, inplace_name, target_name
from moeblaze_ops.lowering.graph.sizes import same_shape, size_of
from moeblaze_ops.lowering.match.matcher import view_of
from moeblaze_ops.lowering.match.region import reads_size
from moeblaze_ops.lowering.match.residual import STORED
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.rewrite.memory import Memory, are_apart, memory_of
from moeblaze_ops.lowering.undoable_edits import Edits

_STORES = frozenset((
    "add", "sub", "mul", "div", "addcmul", "index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce",
    "setitem", "__setitem__", "copy", "zero", "fill", "masked_fill",
))  # fmt: skip
"""What writes elements alone; others may give a tensor another shape."""


@dataclass(frozen=True)
class _Access:
    """What a node reads or writes by one of its operands: all of it, or what the first numbers of its subscript select.

        out[b, token] = rows                    out, the part ``out[b]``, and [token] of it
    """

    node: fx.Node
    operand: fx.Node
    fake: torch.Tensor
    numbers: tuple = ()
    others: tuple = ()

    @property
    def memory(self) -> Memory:
        return memory_of(self.fake)

    def view(self, insert: Inserter) -> fx.Node:
        return insert.call(operator.getitem, self.operand, self.numbers) if self.numbers else self.operand


_Parts: TypeAlias = dict[Memory, list[_Access]]


def hold_parts(edits: Edits, buffers: Collection[int | None]) -> dict[int | None, int | None]:
    """Insert tensors for the parts of ``buffers``, which their storages name, and give the buffer of each by its own storage."""
    view, held = view_of(edits.graph), dict[int | None, int | None]()
    targets = {storage: node for node in view.position if (storage := storage_of(node)) in buffers}
    for buffer, target in targets.items():
        for write in view.aliases(target):
            if (alias := _viewed(view, write)) is not write:
                edits.replace(list(write.users), write, alias)
        for parts, behind in list(_windows(view, target)):
            for accesses in parts.values():
                held[storage_of(_hold(edits, view, accesses, behind))] = buffer
    return held


def _hold(edits: Edits, view: GraphView, accesses: list[_Access], behind: fx.Node) -> fx.Node:
    """Insert a tensor for a part before its first access, and store it ``behind`` the last one.

    It is dense: what may be a view of it, and is none of a part that has gaps, as ``out[:, 0].contiguous()``, is one of a copy.
    """
    insert = Inserter(edits, accesses[0].node.prev)
    alias = accesses[0].view(insert)
    part = insert.call("clone", alias)
    for access in accesses:
        insert, read, node = Inserter(edits, access.node.prev), part, access.node
        if not _are_same(fake_of(part).shape, access.fake.shape):
            read = insert.call("view_as", part, access.view(insert))
        if not _is_written(view, access) and not _are_same(fake_of(read).stride(), access.fake.stride()):
            read = insert.call("clone", read)
        if access.numbers:
            edits.call_with(node, (read, access.others, *node.args[2:]))
        else:
            edits.replace([node], access.operand, read)
    insert = Inserter(edits, behind.prev)
    insert.call("copy_", _viewed_again(insert, alias, storage_of(alias)), part).meta[STORED] = True
    return part


def has_parts(view: GraphView, target: fx.Node) -> bool:
    """True if a buffer of the graph's own has parts, and it is known what writes to it, which autograd sees.

    A caller's buffer may be seen by another of its tensors. Torch 2.11 cannot store a part of as many rows as the data tell.
    """
    if free_unbacked_symbols(fake_of(target).shape):
        return False
    aliases = view.aliases(target)
    writes = [(node, to) for node, to in view.all_writes() if to in aliases]
    known = all((inplace_name(node) or "") in _STORES and target_name(node) for node, _ in writes)
    if any(_is_view(of, storage_of(target)) and not _is_tensor(of) for alias in aliases for of in alias.all_input_nodes):
        return False  # out.unbind(0): autograd lets none of several views be written
    if not known or not view.detached.isdisjoint(aliases) or not view.inputs.isdisjoint(aliases):
        return False
    read = [access.fake for node in _users(view, target) for access in _accesses(view, node, storage_of(target))]
    return len({(fake.dim(), memory_of(fake)) for fake in (*map(fake_of, aliases), *read)}) > 1


def _users(view: GraphView, target: fx.Node) -> list[fx.Node]:
    """The nodes that read or write to a buffer by any alias."""
    users = {user for alias in view.aliases(target) for user in alias.users}
    return sorted(users, key=view.position.__getitem__)


def _viewed(view: GraphView, node: fx.Node) -> fx.Node:
    """What a node that writes to a tensor gives: the tensor."""
    while node in view.writes:
        node = view.writes[node]
    return node


def _are_same(*numbers: Sequence[int | torch.SymInt]) -> bool:
    return same_shape(*(tuple(map(size_of, each)) for each in numbers))


def _is_written(view: GraphView, access: _Access) -> bool:
    return _viewed(view, access.node) is _viewed(view, access.operand)


def _viewed_again(insert: Inserter, node: fx.Node, buffer: int | None) -> fx.Node:
    """A view made anew: autograd lets none write that were made before another write gave the buffer a gradient."""
    if not any(_is_view(of, buffer) for of in node.all_input_nodes):
        return node
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda of: _viewed_again(insert, of, buffer) if _is_view(of, buffer) else of
    )
    return insert.call(node.target, *args, **kwargs)


def _windows(view: GraphView, target: fx.Node) -> Iterator[tuple[_Parts, fx.Node]]:
    """Parts that are written between others reading the buffer, and the node before which they have to be there again.

    Somebody who learns reads the buffer afterwards: what was added to any part has a gradient, of zeros if it is not read.
    """
    parts: _Parts = {}
    users = _users(view, target)
    for number, node in enumerate(users):
        accesses = list(_accesses(view, node, storage_of(target)))
        memories = {access.memory for access in accesses}
        written = {access.memory for access in accesses if _is_written(view, access)}
        moved = bool(parts) and view.context[node] != view.context[next(iter(parts.values()))[0].node]
        if parts and (moved or node.op == "output" or not _fit(memories, {*parts, *written})):
            if any(later.op == "output" or needs_gradient(later) for later in users[number:]):
                yield parts, _behind(view, parts, node)
            parts = {}
        parts |= {memory: [] for memory in written if memory not in parts}
        for access in accesses:
            if access.memory in parts:
                parts[access.memory].append(access)


def _behind(view: GraphView, parts: _Parts, node: fx.Node) -> fx.Node:
    """A node, or one before it at which gradients are switched off or on behind the last access."""
    last = max(access.node for accesses in parts.values() for access in accesses)
    step = last.next
    while step is not node and view.context.get(step, view.context[last]) == view.context[last]:
        step = step.next
    return step


def _accesses(view: GraphView, node: fx.Node, buffer: int | None) -> Iterator[_Access]:
    """What a node reads or writes of a buffer: no sizes, and nothing where it gives a view."""
    if reads_size(node) or (_is_view(node, buffer) and target_name(node) and node not in view.writes):
        return
    for operand in node.all_input_nodes:
        if storage_of(operand) == buffer:
            yield _of_part(node, operand) or _Access(node, operand, fake_of(operand))


def _of_part(node: fx.Node, operand: fx.Node) -> _Access | None:
    """What a node reads or writes by a subscript without tensors, or by one that begins with numbers before a tensor.

        out[b] = y, out[:, 2:4] = y             out[b, token] += y
    """
    if (inplace_name(node) or target_name(node)) not in ("setitem", "__setitem__", "getitem", "__getitem__"):
        return None
    of, subscript, *values = node.args
    items = subscript if isinstance(subscript, tuple) else (subscript,)
    first = next((at for at, item in enumerate(items) if any(map(_is_tensor, _nodes_of(item)))), len(items))
    if of is not operand or operand in _nodes_of((subscript, values)) or not first:
        return None
    if first < len(items) and not all(isinstance(item, int) for item in items[:first]):
        return None  # out[:, token] is no subscript of out[:]
    part = fake_result(fake_mode_of(node.graph), operator.getitem, (operand, items[:first]), {})
    is_view = part.untyped_storage()._cdata == storage_of(operand)
    return _Access(node, operand, part, items[:first], items[first:] or (...,)) if is_view else None


def _nodes_of(argument: fx.node.Argument) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(argument, nodes.append)
    return nodes


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(fake_of(node), torch.Tensor)


def _fit(memories: set[Memory], parts: set[Memory]) -> bool:
    return all(memory == part or are_apart(memory, part) for memory in memories for part in parts)


def _is_view(node: fx.Node, buffer: int | None) -> bool:
    """True if a node gives views of a buffer alone."""
    given = [isinstance(fake, torch.Tensor) and fake.untyped_storage()._cdata == buffer for fake in tree_leaves(fake_of(node))]
    return bool(given) and all(given)
