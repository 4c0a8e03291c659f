"""The products of a recognised router whose number of experts no fast kernel of a matrix library takes.

Rows of E numbers in 16 bits are a multiple of 16 bytes only where E is one of 8. Elsewhere cuBLAS falls back to kernels that
take twice as long as reading the tokens does. On CUDA and up to 16 experts, the logits that ``route`` reads, and the gradient
for the router's weight that follows from ``route_backward``, come from kernels of their own.
"""

import torch
from torch import fx

from moeblaze_ops.ops.router_products import MOST_EXPERTS

_SCALED = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.prims.convert_element_type.default,
)
"""Another shape or type, or a scale."""
_SHIFTED = (*_SCALED, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
"""What may stand between a product and ``route``, or between ``route_backward`` and a product: losses have gradients, too."""
_ROUTES = (torch.ops.moeblaze.route.default, torch.ops.moeblaze.route_at.default)
_GRADIENTS = (torch.ops.moeblaze.route_backward.default, torch.ops.moeblaze.router_sums_backward.default)


def replace_router_product(mm: fx.Node) -> bool:
    """Replace ``mm`` if it is a product of such a router, and say whether it was."""
    left, right = mm.args
    if feeds_route(mm) and _is_transposed(right):
        op, args = torch.ops.moeblaze.router_logits.default, (left, right.args[0])
        num_experts = mm.meta["val"].shape[1]
    elif _is_transposed(left) and comes_from_route(left.args[0]):
        op, args = torch.ops.moeblaze.router_weight_grad.default, (left.args[0], right)
        num_experts = mm.meta["val"].shape[0]
    else:
        return False
    value = mm.meta["val"]
    if not (value.is_cuda and value.dtype.itemsize == 2 and isinstance(num_experts, int)):
        return False
    if num_experts > MOST_EXPERTS or num_experts % 8 == 0:
        return False
    with mm.graph.inserting_before(mm):
        product = mm.graph.call_function(op, args)
    product.meta = dict(mm.meta)
    # The strides that the op asks Inductor for.
    product.meta["eager_input_vals"] = tuple(node.meta["val"] for node in args), {}
    mm.replace_all_uses_with(product)
    mm.graph.erase_node(mm)
    return True


def _is_transposed(node: fx.Node) -> bool:
    return node.target == torch.ops.aten.permute.default and list(node.args[1]) == [1, 0]


def feeds_route(node: fx.Node) -> bool:
    """Whether a router's logits are made of this node."""
    for user in node.users:
        if user.target in _ROUTES and user.args[0] is node:
            return True
        if user.target in _SHIFTED and feeds_route(user):
            return True
    return False


def comes_from_route(node: fx.Node) -> bool:
    """Whether this is made of the gradient of a router's logits."""
    seen, left = {node}, [node]
    while left:
        node = left.pop()
        if node.target in _GRADIENTS:
            return True
        if node.target in _SHIFTED:
            left += [source for source in node.all_input_nodes if source not in seen]
            seen.update(left)
    return False
