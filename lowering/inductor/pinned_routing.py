"""Where activations are computed once more in backward, a layer's routing is kept instead.

Under activation checkpointing, its policies and ``activation_memory_budget`` the partitioner repeats what is cheap in place of
keeping it. Routing is cheap, and must not be repeated: a router with noise, or behind a sum in no fixed order, may choose other
experts the second time, and gradients would be those of another layer. So what has been chosen is marked to be kept: the ids,
every integer or truth value that they come from, the routing weights, and the outputs of ``dispatch`` and ``route``. That is a
few numbers a slot. Logits and probabilities are repeated, as the user asked for; gradients of the router read those.

Where tokens move between ranks, all of them have to repeat the same exchanges. Whether backward needs the result of a layer
depends on what else the partitioner keeps, which it chooses by the sizes of this rank. So what comes back of a layer is kept. And
what leaves checkpointed code in which weights have come is: layers behind it find it, and the code is repeated for itself alone.
"""

import operator
from functools import cache

import torch
from torch import Tensor, fx

from moeblaze_ops.lowering.torch_internals import graphs
from moeblaze_ops.ops.sharded.all_to_all import sum_rows
from moeblaze_ops.ops.sharded.by_rank import expert_mlp_by_rank
from moeblaze_ops.ops.sharded.collectives import arrived, met, sum_parts

_OPS = torch.ops.moeblaze
ROUTED = (
    _OPS.dispatch.default,
    _OPS.route.default,
    _OPS.expert_up.default,
    _OPS.expert_up_h8.default,
    _OPS.expert_down.default,
    _OPS.expert_mlp.default,
    _OPS.expert_mlp_ranged.default,
    _OPS.expert_mlp_chunked.default,
)
"""Forward operators of a layer that compute a routing, or take one."""
_ROUTERS = ROUTED[:2]
_OPERANDS = ("experts_TK", "weights_TK")

_FUNCTIONAL = torch.ops._c10d_functional
_GOES_BACK = (_FUNCTIONAL.reduce_scatter_tensor.default, _FUNCTIONAL.all_to_all_single.default, sum_parts)
_IS_BACK = (_FUNCTIONAL.wait_tensor.default, arrived, sum_rows)


@cache
def pin_before_partition() -> None:
    """Have all graphs of forward and backward looked through, of whatever backend."""
    graphs.before_partition(_pin)


def _pin(graph: fx.Graph, returned: list[fx.Node]) -> None:
    """Mark what may not be repeated in backward of the layers of a joint graph, as far as it could be.

    Args:
        returned: what forward returns.
    """
    _pin_behind_weights(graph, returned)
    for node in graph.nodes:
        if node.target in (*ROUTED, expert_mlp_by_rank) and graphs.may_be_repeated(node):
            _pin_returned(node)
            if node.target in ROUTED:
                _pin_routing(node)


def _pin_routing(node: fx.Node) -> None:
    """Mark the routing that ``node``, one of ``ROUTED``, computes or takes."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    chosen = [given[name] for name in _OPERANDS if isinstance(given.get(name), fx.Node)]
    for kept in dict.fromkeys((*graphs.made_of(chosen, _decides), *([node] if node.target in _ROUTERS else []))):
        graphs.keep_for_backward(kept)
        for item in kept.users:
            if _gives(kept, item):
                graphs.keep_for_backward(item)


def _pin_returned(node: fx.Node) -> None:
    """Mark the sums that come back to this rank of what ``node`` computes for all ranks."""
    left = [node]
    while left:
        step = left.pop()
        later = [user for user in step.users if user.target in (*_GOES_BACK, *_IS_BACK) or _gives(step, user) or _goes_on(user)]
        left += later
        if not later and step.target in _IS_BACK:
            graphs.keep_for_backward(step)


def _pin_behind_weights(graph: fx.Graph, returned: list[fx.Node]) -> None:
    """Mark what is computed from weights of other ranks in checkpointed code, and read in forward by other code.

        y = checkpoint(layer, x); z = y + other_layer(y)        the sum of the layer's experts, and no weight
    """
    repeated = [node for node in graph.nodes if graphs.is_repeated(node)]
    of_weights: set[fx.Node] = set()
    for node in repeated:
        if node.target is met or not of_weights.isdisjoint(node.all_input_nodes):
            of_weights.add(node)
    if not of_weights:
        return
    forward = set(graphs.made_of(returned, lambda node, source: True))
    for node in of_weights:
        if any(reader in forward and not graphs.is_marked(reader) for reader in node.users):
            graphs.keep_for_backward(node)


def _goes_on(rows: fx.Node) -> bool:
    """True if rows of what has come back to a host go on to another one."""
    return rows.target is torch.ops.aten.slice.Tensor and any(user.target in _GOES_BACK for user in rows.users)


def _decides(node: fx.Node, source: fx.Node) -> bool:
    """True if a node comes from integers or truth values, or is what chose them: ``topk`` or ``sort``, whose ids these are.

        ids = probabilities.topk(K).indices.to(torch.int32)     # the cast, the item and topk
        weights = ids * 0.5 + noise                             # the ids, not the noise
    """
    value = source.meta.get("val")
    is_discrete = isinstance(value, Tensor) and not value.is_floating_point() and source.op == "call_function"
    return is_discrete or _gives(source, node)


def _gives(source: fx.Node, item: fx.Node) -> bool:
    """True if ``item`` is one of several results of ``source``."""
    return item.target is operator.getitem and source.op == "call_function"
