"""The products of a recognised router that kernels of ours compute.

Rows of E numbers in 16 bits are a multiple of 16 bytes only where E is one of 8. Elsewhere cuBLAS falls back to kernels that
take twice as long as reading the tokens does. On CUDA and up to 16 experts, the logits that ``route`` reads, and the gradient
for the router's weight that follows from ``route_backward``, come from kernels of their own.

With ``config.batch_invariant`` all products whose rows are tokens do, on any device: of a matrix library the number of tokens
chooses the kernel, and with it the order in which a logit is summed.

    F.linear(x, w), F.linear(x, w, b)      the logits, with a bias the wide ones plus it
    dlogits @ w                            the gradient of the tokens, where it is not part of another sum
"""

import torch
from torch import fx

from moeblaze_ops import config
from moeblaze_ops.lowering.inductor.graph_writer import CAST, VIEWS, Writer
from moeblaze_ops.lowering.torch_internals.graphs import made_of
from moeblaze_ops.ops.router_products import MOST_EXPERTS

aten = torch.ops.aten
_SCALED = (*VIEWS, aten.mul.Tensor, aten.div.Tensor, CAST)
"""Another shape or type, or a scale."""
_SHIFTED = (*_SCALED, aten.add.Tensor, aten.sub.Tensor)
"""What may stand between a product and ``route``, or between ``route_backward`` and a product: losses have gradients, too."""
_ROUTES = (torch.ops.moeblaze.route.default, torch.ops.moeblaze.route_at.default)
_GRADIENTS = (torch.ops.moeblaze.route_backward.default, torch.ops.moeblaze.router_sums_backward.default)


def replace_router_product(mm: fx.Node) -> None:
    """Replace ``mm`` if it is a product of such a router."""
    left, right = mm.args
    if feeds_route(mm) and _is_transposed(right):
        op, args = torch.ops.moeblaze.router_logits.default, (left, right.args[0])
        num_experts = mm.meta["val"].shape[1]
    elif _is_transposed(left) and comes_from_route(left.args[0]):
        op, args = torch.ops.moeblaze.router_weight_grad.default, (left.args[0], right)
        num_experts = mm.meta["val"].shape[0]
    else:
        return
    value = mm.meta["val"]
    if not (value.is_cuda and value.dtype.itemsize == 2 and isinstance(num_experts, int)):
        return
    if num_experts > MOST_EXPERTS or num_experts % 8 == 0:
        return
    write = Writer(mm)
    write.instead(write.op(op, *args))


def replace_by_invariant_product(product: fx.Node) -> None:
    """Replace a product of tokens that a router makes, with ``config.batch_invariant``."""
    if not config.batch_invariant or product.kwargs or not (feeds_route(product) or _is_gradient_of_tokens(product)):
        return
    *bias, left, right = product.args[:2] if product.target != aten.addmm.default else product.args
    wide = product.target == aten.mm.dtype or bool(bias)
    write = Writer(product)
    result = write.op(torch.ops.moeblaze.router_logits.default, left, write(aten.permute.default, right, [1, 0]), wide)
    if bias:
        result = write(CAST, write(aten.add.Tensor, result, *bias), product.meta["val"].dtype)
    write.instead(result)


def _is_gradient_of_tokens(product: fx.Node) -> bool:
    """True for ``mm(route_backward(...), w)``, and not for ``mm(route_backward(...).t(), x)``."""
    left = product.args[-2] if product.target == aten.addmm.default else product.args[0]
    return not _is_transposed(left) and comes_from_route(left)


def _is_transposed(node: fx.Node) -> bool:
    return node.target == torch.ops.aten.permute.default and list(node.args[1]) == [1, 0]


def feeds_route(node: fx.Node) -> bool:
    """True if a router's logits are made of this node."""
    for user in node.users:
        if user.target in _ROUTES and user.args[0] is node:
            return True
        if user.target in (*_SHIFTED, aten.sum.dim_IntList) and feeds_route(user):
            return True
    return False


def comes_from_route(node: fx.Node) -> bool:
    """True if this is made of the gradient of a router's logits."""
    return any(source.target in _GRADIENTS for source in made_of([node], lambda reader, _: reader.target in _SHIFTED))
