"""The gradient that reaches tokens through a linear router, added where the experts' gradient is summed over a token's rows.

Autograd gives ``expert_up_backward(...)[0] + dlogits @ W``. On CUDA the product is an extern kernel that reads and writes all of
dx once more, after a copy of it. Handed to the op, the product is part of the sum over a token's rows instead.

A layer that goes by ranges of rows or of tokens gives dx and the gradient of the routing weights at once, so there the product
can only follow: it is added in place, since a second dx would not fit into what such a layer is limited to. So it is where
experts are spread over ranks: dx is the sum of what they computed.
"""

import operator
from collections.abc import Sequence

import torch
from torch import fx

from moeblaze_ops import config
from moeblaze_ops.lowering.inductor.graph_writer import VIEWS, is_like
from moeblaze_ops.lowering.torch_internals.graphs import made_of
from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks_backward

_REPEATING = (torch.ops.aten.clone.default, torch.ops.aten.expand.default, torch.ops.aten.unsqueeze.default)
_ROUTER = slice(8, 10)
"""Where ``expert_up_backward`` takes the factors of the product."""
_IN_PARTS = (
    torch.ops.moeblaze.expert_mlp_ranged_backward.default,
    torch.ops.moeblaze.expert_mlp_chunked_backward.default,
    experts_over_ranks_backward,
)
"""What gives dx first, and is done with the routing weights at the same time."""
_LARGEST_ROUTER = 1024
"""Experts up to which the product is small beside what the sum reads."""


def add_router_gradient(total: fx.Node) -> bool:
    """Replace ``total`` if it is the gradient of a layer's tokens plus a product, and say whether it was."""
    if total.kwargs:
        return False  # a multiple of one of them
    for experts, product in (total.args[:2], total.args[1::-1]):
        dx, mm = _without_views(experts), _without_views(product)
        if dx is None or mm is None or not _fits(total, dx, mm):
            continue
        if not is_like(experts, total):
            continue  # the product is broadcast against it
        if dx.args[0].target in _IN_PARTS:
            if config.batch_invariant:
                return False
            _add_in_place(total, experts, dx, mm)
            return True
        moved = _later_ancestors(mm, dx.args[0], total)
        if moved is not None:
            _replace(total, experts, dx, _factors(mm), moved)
            return True
    return False


def _without_views(node) -> fx.Node | None:
    """What ``node`` is a view of, or None if anyone else reads either."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target not in VIEWS:
            return node
        node = node.args[0]
    return None


def _fits(total: fx.Node, dx: fx.Node, mm: fx.Node) -> bool:
    if dx.target is not operator.getitem or dx.args[1] != 0 or mm.target != torch.ops.aten.mm.default:
        return False
    if not (dx.args[0].target in _IN_PARTS or _takes_product(dx.args[0])):
        return False
    values = [node.meta["val"] for node in (dx, mm, *mm.args)]
    num_experts = values[2].shape[1]
    return (
        values[0].is_cuda
        and values[0].dtype in (torch.bfloat16, torch.float16)
        and len({value.dtype for value in (*values, total.meta["val"])}) == 1
        and is_like(dx, mm)
        and isinstance(num_experts, int)
        and num_experts <= _LARGEST_ROUTER
    )


def _takes_product(backward: fx.Node) -> bool:
    if backward.target != torch.ops.moeblaze.expert_up_backward.default or len(backward.users) > 1:
        return False
    # With weights on the input their gradient comes out of the same op, and leads to the logits.
    is_free = backward.args[3] is None and all(given is None for given in backward.args[_ROUTER])
    if config.batch_invariant and backward.args[6].meta["val"].shape[1] == 1:
        return False  # rows of one expert a token are added to without tensor cores
    return is_free and "eager_input_vals" in backward.meta


def _later_ancestors(mm: fx.Node, backward: fx.Node, total: fx.Node) -> list[fx.Node] | None:
    """What the product needs that stands behind ``backward``, in order; None if something is written to in between."""
    nodes = list(backward.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    if any(node.is_impure() for node in nodes[order[backward] : order[total]]):
        return None

    def is_later(node: fx.Node, *_: fx.Node) -> bool:
        return order[node] > order[backward]

    return sorted(filter(is_later, made_of(mm.args, is_later)), key=order.get)


def _factors(mm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What is multiplied; of a right side that is one tensor several times, for as many left ones side by side, that tensor."""
    left, right = mm.args
    return left, _repeated(right) or right


def _repeated(node: fx.Node) -> fx.Node | None:
    """The matrix of which ``node`` has the rows several times, all of them one time after another; None if it is no such.

    torch.cat([w, w, w])                                      # as it is written
    w.unsqueeze(0).expand(3, *w.shape).clone().view(-1, D)    # as Inductor writes it since torch 2.13
    """
    if node.target == torch.ops.aten.cat.default and node.args[1:] in ((), (0,)):
        parts = set(node.all_input_nodes)
        return parts.pop() if len(parts) == 1 else None
    chain = []
    for targets in (VIEWS, *((op,) for op in _REPEATING)):
        if node.target not in targets or not node.all_input_nodes:
            return None
        chain.append(node)
        node = node.all_input_nodes[0]
    view, _, expand, unsqueeze = chain
    rows, columns = view.meta["val"].shape if view.meta["val"].dim() == 2 else (None, None)
    times, *repeated = expand.meta["val"].shape
    sizes = list(node.meta["val"].shape)
    if unsqueeze.args[1] != 0 or len(sizes) != 2 or not all(isinstance(size, int) for size in (rows, columns, times)):
        return None
    return node if repeated == sizes and [rows, columns] == [times * sizes[0], sizes[1]] else None


def _replace(total: fx.Node, experts: fx.Node, dx: fx.Node, factors: tuple[fx.Node, fx.Node], moved: list[fx.Node]) -> None:
    """The op keeps its place, and what the product needs moves before it: later its rows would lie beside weight gradients."""
    backward, graph = dx.args[0], total.graph
    for node in moved:
        backward.prepend(node)
    with graph.inserting_before(backward):
        added = graph.call_function(backward.target, _with_router(backward.args, factors))
        result = graph.call_function(operator.getitem, (added, 0))
    added.meta, result.meta = dict(backward.meta), dict(dx.meta)
    # The strides that the op asks Inductor for.
    eager_args, eager_kwargs = backward.meta["eager_input_vals"]
    added.meta["eager_input_vals"] = _with_router(eager_args, [node.meta["val"] for node in factors]), eager_kwargs
    _use_instead(result, total, experts if experts is not dx else None)


def _add_in_place(total: fx.Node, experts: fx.Node, dx: fx.Node, mm: fx.Node) -> None:
    """Nobody else reads dx, in front of the sum or behind it."""
    with total.graph.inserting_before(total):
        added = total.graph.call_function(torch.ops.aten.addmm_.default, (dx, *mm.args))
    added.meta = dict(dx.meta)
    _use_instead(dx, total, experts if experts is not dx else None)


def _use_instead(result: fx.Node, total: fx.Node, view: fx.Node | None) -> None:
    """Let the users of ``total`` read ``result``, in the shape of ``view`` if there is one."""
    if view is not None:
        with total.graph.inserting_before(total):
            result = total.graph.call_function(torch.ops.aten.reshape.default, (result, view.args[1]))
        result.meta = dict(total.meta)
    total.replace_all_uses_with(result)
    _erase(total)


def _with_router(args: tuple, factors: Sequence) -> tuple:
    return *args[: _ROUTER.start], *factors, *args[_ROUTER.stop :]


def _erase(node: fx.Node) -> None:
    """Erase a node and what it alone used; neither writes to anything."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for used in inputs:
        if not used.users and used.op == "call_function":
            _erase(used)
