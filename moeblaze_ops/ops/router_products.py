"""``moeblaze::router_logits`` and ``moeblaze::router_weight_grad``: the products of a linear router with at most 16 experts.

The rewriter puts them in place of a recognised router's products where matrix libraries are slow, see
``lowering/inductor/router_products.py``.
"""

from torch import Tensor

from moeblaze_ops.arguments.validation import check_like, require
from moeblaze_ops.arguments.validation_values import check_float_dtype
from moeblaze_ops.ops.autodiff import carrying, parted
from moeblaze_ops.ops.register import register_op

MOST_EXPERTS = 16


def _check(op: str, x_TD: Tensor, name: str, other: Tensor, experts_axis: int) -> None:
    """Check the tokens, and a tensor that has the experts at one axis and the other axis of the tokens."""
    check_float_dtype(op, "x_TD", x_TD)
    require(x_TD.dim() == 2, op, "x_TD", "have 2 dimensions [T, D]", f"shape {list(x_TD.shape)}")
    shape, shared = list(other.shape), 1 - experts_axis
    fits = len(shape) == 2 and shape[shared] == x_TD.shape[shared] and 1 <= shape[experts_axis] <= MOST_EXPERTS
    form = ", ".join("E" if axis == experts_axis else str(x_TD.shape[axis]) for axis in (0, 1))
    require(fits, op, name, f"have shape [{form}] with 1 to {MOST_EXPERTS} experts", f"shape {shape}")
    check_like(op, name, other, x_TD)


def _check_logits(op: str, x_TD: Tensor, w_ED: Tensor) -> None:
    _check(op, x_TD, "w_ED", w_ED, 0)


def _check_weight_grad(op: str, dlogits_TE: Tensor, x_TD: Tensor) -> None:
    _check(op, x_TD, "dlogits_TE", dlogits_TE, 1)


def _logits_fake(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    return x_TD.new_empty((x_TD.shape[0], w_ED.shape[0]))


def _logits_cpu(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    return x_TD @ w_ED.mT


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_TD, w_ED = ctx.saved_tensors
    needs_x, needs_w = ctx.needs_input_grad
    return dlogits_TE @ w_ED if needs_x else None, router_weight_grad(dlogits_TE, x_TD) if needs_w else None


def _forward_mode(*args) -> Tensor:
    (x_TD, w_ED), (dx_TD, dw_ED) = parted(args)
    terms = [(dx_TD, w_ED)] if dx_TD is not None else []
    terms += [(x_TD, dw_ED)] if dw_ED is not None else []
    return carrying(router_logits(x_TD, w_ED), sum(router_logits(*term) for term in terms))


def _weight_grad_fake(dlogits_TE: Tensor, x_TD: Tensor) -> Tensor:
    return x_TD.new_empty((dlogits_TE.shape[1], x_TD.shape[1]))


def _weight_grad_cpu(dlogits_TE: Tensor, x_TD: Tensor) -> Tensor:
    return dlogits_TE.mT @ x_TD


router_weight_grad = register_op(
    "router_weight_grad",
    "(Tensor dlogits_TE, Tensor x_TD) -> Tensor",
    fake=_weight_grad_fake,
    cpu=_weight_grad_cpu,
    kernel="routing.router_products:launch_router_weight_grad",
    check=_check_weight_grad,
    flops=lambda dlogits_shape, x_shape, **kwargs: 2 * dlogits_shape[1] * x_shape[0] * x_shape[1],
)
"""``dlogits.T @ x``: the gradient of ``router_logits`` for its weight.

Args:
    dlogits_TE: gradient of the logits. Shape [T, E], any strides, E at most 16.
    x_TD: tokens. Shape [T, D], bf16, fp16, fp32, or fp64 on CPU, any strides, T may be 0.

Returns:
    dw_ED: shape [E, D], dtype of x, contiguous. On CUDA with fp32 sums; two runs agree bit for bit.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""

router_logits = register_op(
    "router_logits",
    "(Tensor x_TD, Tensor w_ED) -> Tensor",
    fake=_logits_fake,
    cpu=_logits_cpu,
    kernel="routing.router_products:launch_router_logits",
    check=_check_logits,
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=_forward_mode,
    autocast=(0, 1),
    flops=lambda x_shape, w_shape, **kwargs: 2 * w_shape[0] * x_shape[0] * x_shape[1],
)
"""``x @ w.T``: the logits of a linear router with few experts.

Args:
    x_TD: tokens. Shape [T, D], bf16, fp16, fp32, or fp64 on CPU, any strides, T may be 0.
    w_ED: the router's weight. Shape [E, D], dtype of x, any strides, E at most 16.

Returns:
    logits_TE: shape [T, E], dtype of x, contiguous. On CUDA with fp32 sums; two runs agree bit for bit.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
