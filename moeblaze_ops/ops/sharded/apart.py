"""Tensors that are sent apart although they are equal.

AOTAutograd computes once what a graph computes twice, collectives as well. Ranks that have other tokens, or whose graph ends in
between, would send twice then where others send once: ``torch.cat([x, y])`` is ``y`` where a rank has no token in ``x``.
"""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from moeblaze_ops.ops.register import register_plain_op


def told_apart(tensor: Tensor) -> Tensor:
    """``tensor``, which nothing else in the graph that is traced equals; it has no gradient."""
    mode = get_proxy_mode()
    if mode is None:
        return tensor.detach()
    earlier = mode.tracer.graph.find_nodes(op="call_function", target=apart, sort=False)
    return apart(tensor.detach(), len(earlier))


apart = register_plain_op("apart", "(Tensor x, int number) -> Tensor", lambda x, _: x.clone(), lambda x, _: torch.empty_like(x))
"""A copy of x, of which AOTAutograd does not know that it is one of x. Inductor takes x itself.

Args:
    number: how many stand before it in the graph.
"""
