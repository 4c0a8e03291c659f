"""The gradient that reaches tokens through a linear router, added where the experts' gradient is summed over a token's rows.

Autograd gives ``expert_up_backward(...)[0] + dlogits @ W``. On CUDA the product is an extern kernel that reads and writes all of
dx once more, after a copy of it. Handed to the op, the product is part of the sum over a token's rows instead.
"""

import operator

import torch
from torch import fx

from moeblaze_ops.lowering.expressions import same_size, size_of

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
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
        if not _same_shape(experts, total):
            continue  # the product is broadcast against it
        moved = _later_ancestors(mm, dx.args[0], total)
        if moved is not None:
            _replace(total, experts, dx, mm, moved)
            return True
    return False


def _without_views(node) -> fx.Node | None:
    """What ``node`` is a view of, or None if anyone else reads either."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target not in _VIEWS:
            return node
        node = node.args[0]
    return None


def _fits(total: fx.Node, dx: fx.Node, mm: fx.Node) -> bool:
    if dx.target is not operator.getitem or dx.args[1] != 0 or mm.target != torch.ops.aten.mm.default:
        return False
    backward = dx.args[0]
    # With weights on the input their gradient comes out of the same op, and leads to the logits.
    given = backward.target == torch.ops.moeblaze.expert_up_backward.default and len(backward.args) == 8
    if not given or backward.args[3] is not None or len(backward.users) > 1 or "eager_input_vals" not in backward.meta:
        return False
    values = [node.meta["val"] for node in (dx, mm, *mm.args)]
    num_experts = values[2].shape[1]
    return (
        values[0].is_cuda
        and values[0].dtype in (torch.bfloat16, torch.float16)
        and len({value.dtype for value in (*values, total.meta["val"])}) == 1
        and _same_shape(dx, mm)
        and isinstance(num_experts, int)
        and num_experts <= _LARGEST_ROUTER
    )


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Without a guard: it is too late for one."""
    sizes, others = a.meta["val"].shape, b.meta["val"].shape
    return len(sizes) == len(others) and all(same_size(size_of(m), size_of(n)) for m, n in zip(sizes, others, strict=True))


def _later_ancestors(mm: fx.Node, backward: fx.Node, total: fx.Node) -> list[fx.Node] | None:
    """What the product needs that stands behind ``backward``, in order; None if something is written to in between."""
    nodes = list(backward.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    if any(node.is_impure() for node in nodes[order[backward] : order[total]]):
        return None
    later, pending = set(), list(mm.args)
    while pending:
        node = pending.pop()
        if order[node] > order[backward] and node not in later:
            later.add(node)
            pending += node.all_input_nodes
    return sorted(later, key=order.get)


def _replace(total: fx.Node, experts: fx.Node, dx: fx.Node, mm: fx.Node, moved: list[fx.Node]) -> None:
    """The op keeps its place, and what the product needs moves before it: later its rows would lie beside weight gradients."""
    backward, graph = dx.args[0], total.graph
    for node in moved:
        backward.prepend(node)
    with graph.inserting_before(backward):
        added = graph.call_function(backward.target, (*backward.args, *mm.args))
        result = graph.call_function(operator.getitem, (added, 0))
    added.meta, result.meta = dict(backward.meta), dict(dx.meta)
    # The strides that the op asks Inductor for.
    eager_args, eager_kwargs = backward.meta["eager_input_vals"]
    added.meta["eager_input_vals"] = ((*eager_args, *(node.meta["val"] for node in mm.args)), eager_kwargs)
    if experts is not dx:
        with graph.inserting_before(total):
            result = graph.call_function(torch.ops.aten.reshape.default, (result, experts.args[1]))
        result.meta = dict(total.meta)
    total.replace_all_uses_with(result)
    _erase(total)


def _erase(node: fx.Node) -> None:
    """Erase a node and what it alone used; neither writes to anything."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for used in inputs:
        if not used.users and used.op == "call_function":
            _erase(used)
