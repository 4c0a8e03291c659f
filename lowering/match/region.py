"""The nodes that a match replaces, and why none of them is missed by anyone else."""

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.graph.dependencies import dependencies, own_dependencies
from moeblaze_ops.lowering.graph.effects import acts_beside_tensors
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.graph.operators import PROJECTIONS
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove


@dataclass(frozen=True)
class Region:
    """Nodes between the operands and the root, in graph order, and the nodes that hold the result afterwards.

    ``in_autocast``: autocast is on there. The operators get what it would cast in the dtype that it gives.
    """

    root: fx.Node
    nodes: tuple[fx.Node, ...]
    carriers: tuple[fx.Node, ...]
    in_autocast: bool


def prove_region(
    view: GraphView, root: fx.Node, operands: Set[fx.Node], dtype: torch.dtype, base: fx.Node | None, marks: Set[fx.Node]
) -> Region:
    """The region behind ``root``, which nobody misses. ``base``: its sum starts there; ``marks``: operands compared with zero."""
    buffer = set(view.aliases(view.writes[root])) if root in view.writes else set()
    filled = _writes_to(view, operands - buffer, root)
    read = {*operands, *filled} | ({base} if base else set())
    ends, nodes = _between(view, root, read, buffer)
    carriers = _carriers(view, root)
    _prove_gradients(view, root, ends, frozenset(carriers), read.difference(marks, _writes_to(view, marks - buffer, root)))
    computed = _computed(view, nodes)
    reader = partial(_reader, view, root, nodes, frozenset(carriers))
    kept = _kept(view, nodes, reader)
    _prove_alone(view, computed.difference(carriers), kept & computed, reader)
    for node in _in_order(view, nodes):
        prove(not _acts(view, node), Reason.EFFECT, node.name, node)
    prove(not view.has_tangents(root), Reason.CONTEXT, "derivatives are computed forward", root)
    for node in _in_order(view, computed):
        prove(view.context[node] == view.context[root], Reason.CONTEXT, node=node)
        _prove_dtype(node, dtype, fake_of(view.writes.get(root, root)))
        _prove_one_width(node)
    if base in buffer:
        between = [(w, to) for w, to in view.all_writes() if view.position[base] < view.position[w] <= view.position[root]]
        staying = [w for w, to in between if to in buffer and w not in nodes - kept]
        prove(not staying, Reason.BUFFER_ALIASED, "what the sum starts from is written to before", next(iter(staying), None))
    return Region(root, tuple(_in_order(view, nodes - kept)), carriers, _is_in_autocast(view, root))


def _in_order(view: GraphView, nodes: Set[fx.Node]) -> list[fx.Node]:
    return sorted(nodes, key=view.position.__getitem__)


def _between(view: GraphView, root: fx.Node, read: set[fx.Node], buffer: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes that ``root`` needs and nothing in ``read`` does, after the last of them: it, and writes to them that nobody reads.

        h = up(x); a = F.silu(h); h.zero_(); out = down(a)          nothing reads the zeros: they go with the layer
    """
    ends: set[fx.Node] = set()
    nodes, unread = set[fx.Node](), {root}
    while unread:
        ends |= unread
        nodes = own_dependencies(view, ends, read, without=view.inputs)
        unread = set(_writes_to(view, nodes - buffer, root)) - nodes - ends
    return ends, nodes


def _acts(view: GraphView, node: fx.Node) -> bool:
    """True if an operator of which the value is not known, since nothing depends on it, does more than to give it.

        F.silu(g) * u + 0 * torch.rand_like(g)      draws numbers all the same
        F.silu(F.dropout(g, 0.0)) * u               is known to give g
        F.dropout(F.silu(g) * u, 0.1)               is known as dropout, which draws from one generator or another
    """
    if not acts_beside_tensors(node):
        return False
    values = tree_leaves(view.value(node))
    return any(isinstance(value, Value) and value.node is node and value.op != "dropout" for value in values)


def _prove_gradients(
    view: GraphView, root: fx.Node, ends: set[fx.Node], carriers: frozenset[fx.Node], read: set[fx.Node]
) -> None:
    """No input would be without a gradient that has one of zeros as written, where the layer learns by ``read`` in its place.

        for e in range(8): out += share(ids, e) * experts[e](x)         ids = scores.topk(2).indices, of 8 scores
        for e in range(9): out += share(ids, e) * experts[e](x)         nobody chooses the last one: not taken
        weights.fill_(1)                                                nor this: the router has gradients of zeros
        weights.fill_(1).mul_(kept)                                     nor this, of which only the zeros are read
    """
    constant = view.without_gradients
    if root in constant:
        return
    lost = own_dependencies(view, ends - constant, read - constant, without=constant)
    used = own_dependencies(view, [view.graph.output_node()], [], without=constant | carriers | {root}) if lost else set()
    for node in _in_order(view, lost & view.inputs - constant - used):
        raise Declined(Reason.GRADIENTS, f"nothing that the layer reads depends on '{node.name}'", node)


def _reader(
    view: GraphView, root: fx.Node, nodes: set[fx.Node], carriers: frozenset[fx.Node], node: fx.Node, since: int = -1
) -> fx.Node | None:
    """Who reads outside of a region what a node holds ``since`` a position: not the result behind the root, which is another."""
    last = view.position[root] if node in carriers else math.inf
    late = (user for user in node.users if since < view.position[user] <= last and user not in nodes)
    return next((user for user in late if not reads_size(user)), None) if view.position[node] <= view.position[root] else None


def _kept(view: GraphView, nodes: set[fx.Node], reader: Callable[..., fx.Node | None]) -> set[fx.Node]:
    """The writes of a region to what somebody else reads, or to what that is made of: those of inputs are seen by the caller.

        a = x.clone(); a.add_(1); b = a.clone(); out = torch.zeros_like(b)         for a reader of b, both a and its write stay
    """
    written = [(node, alias) for node, target in view.all_writes() if node in nodes for alias in view.aliases(target)]
    kept = {node for node, alias in written if alias in view.inputs or reader(alias, view.position[node]) is not None}
    read = {node for node in nodes if reader(node) is not None} if written else set()
    return nodes.intersection(view.writes).intersection(dependencies(view, *kept, *read)) if written else set()


def _prove_alone(view: GraphView, computed: set[fx.Node], kept: set[fx.Node], reader: Callable[..., fx.Node | None]) -> None:
    """Refuses what would be computed twice, for somebody else reads it: rewritten all the same, it would be right."""
    for node in _in_order(view, computed):
        prove((user := reader(node)) is None, Reason.EXTRA_USER, f"'{node.name}' is also used by '{user}'", user)
    prove(not kept, Reason.BUFFER_ALIASED, "what the layer writes to is read elsewhere", min(kept, default=None))


def _writes_to(view: GraphView, operands: Set[fx.Node], root: fx.Node) -> list[fx.Node]:
    """What writes to operands, by whatever alias, before ``root``, where they are read in its place.

        chosen = ids.clone(); chosen.view(-1)[0] = 1        the write stays
    """
    memory = {alias for node in operands for alias in view.aliases(node)}
    return [node for node, target in view.all_writes() if target in memory and view.position[node] < view.position[root]]


def _computed(view: GraphView, nodes: set[fx.Node]) -> set[fx.Node]:
    """Nodes that hold, or are computed from, what a projection gave."""
    computed: set[fx.Node] = set()
    buffers: set[fx.Node] = set()  # they hold it since a node before this one
    for node in _in_order(view, nodes):
        made = target_name(node) in PROJECTIONS
        if node.op != "output" and (made or any(n in computed or n in buffers for n in node.all_input_nodes)):
            computed.add(node)
            if (target := view.writes.get(node)) is not None and target not in buffers:
                buffers.update(view.aliases(target))
    return computed


def _carriers(view: GraphView, root: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes of the root's buffer: whoever reads them after the root reads the result."""
    target = view.writes.get(root)
    if target is None:
        return (root,)
    position = view.position[root]
    result = view.value_at(target, position)

    def is_whole(held: Value) -> bool:
        return held is result or (isinstance(held, Value) and held.op == "reshape" and held.args[0] is result)

    before = (alias for alias in view.aliases(target) if view.position[alias] <= position)
    return tuple(alias for alias in before if is_whole(view.value_at(alias, position)))


def written_before_backward(view: GraphView, root: fx.Node, operands: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The operands that are written after the layer: its ops save them for the backward, where eager may have saved copies.

        w = w / w.sum(-1, keepdim=True); out = layer(x, w, ids); w.mul_(2)      w: the layer has to read a copy
        def forward(self, x, w, ids): out = layer(x, w, ids); w.mul_(2)         raises: a caller's w may be saved in its place
    """
    written = set()
    late = [(node, target) for node, target in view.all_writes() if view.position[node] > view.position[root]]
    for operand in operands if late and root not in view.without_gradients else ():
        aliases = set(view.aliases(operand))
        for node, target in late:
            if target in aliases:
                given = any(alias.op in ("placeholder", "get_attr") for alias in aliases)
                learns = fake_of(operand).is_floating_point()
                prove(not (given and learns), Reason.OPERAND_CHANGED, "written before the backward", node)
                written.add(operand)
    return frozenset(written)


def reads_size(node: fx.Node) -> bool:
    fake = fake_of(node)
    return node.op != "output" and fake is not None and not isinstance(fake, (torch.Tensor, tuple, list))


def _is_in_autocast(view: GraphView, root: fx.Node) -> bool:
    device = fake_of(view.writes.get(root, root)).device.type
    if not torch.amp.is_autocast_available(device):
        return False
    inside = [args for name, args in view.context[root] if name == "_enter_autocast" and args[0] == device]
    return bool(inside[-1][2] if inside else torch.is_autocast_enabled(device))


def _prove_one_width(node: fx.Node) -> None:
    """Autocast casts no fp64, so that a product of fp64 and anything else raises an error."""
    fakes = [fake_of(operand) for operand in node.all_input_nodes] if target_name(node) in PROJECTIONS else []
    dtypes = {fake.dtype for fake in fakes if isinstance(fake, torch.Tensor) and fake.dtype.is_floating_point}
    prove(torch.float64 not in dtypes or len(dtypes) == 1, Reason.DTYPE_PATH, "a product of float64 and another dtype", node)


def _prove_dtype(node: fx.Node, dtype: torch.dtype, result: torch.Tensor) -> None:
    fake = fake_of(node)
    if not isinstance(fake, torch.Tensor) or not fake.dtype.is_floating_point:
        return
    allowed = {dtype, torch.float32, torch.float64} if dtype.itemsize < 4 else {dtype, torch.float64}
    if fake.dtype not in allowed and fake.dtype != result.dtype:
        raise Declined(Reason.DTYPE_PATH, f"{fake.dtype} inside a layer computed in {dtype}", node)
