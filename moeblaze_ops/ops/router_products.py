"""``moeblaze::router_logits`` and ``moeblaze::router_weight_grad``: the products of a linear router.

Compiled code has them in place of a recognised router's products where matrix libraries are slow, and with
``config.batch_invariant``, where the bits of a logit may not depend on the number of tokens as theirs do: see
``lowering/inductor/router_products.py``.
"""

from torch import Tensor, nn

from moeblaze_ops import config
from moeblaze_ops.arguments.validation import check_like, require
from moeblaze_ops.arguments.validation_values import check_float_dtype
from moeblaze_ops.cpu.row_pieces import product_of_rows
from moeblaze_ops.cpu.rows import sum_dtype
from moeblaze_ops.ops.autodiff import carrying, parted
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.register import register_op

MOST_EXPERTS = 16


def _check(op: str, x_TD: Tensor, name: str, other: Tensor, experts_axis: int, most: int | None = None) -> None:
    """Check the tokens, and a tensor that has the experts, ``most`` at most, at one axis and the other axis of the tokens."""
    check_float_dtype(op, "x_TD", x_TD)
    require(x_TD.dim() == 2, op, "x_TD", "have 2 dimensions [T, D]", f"shape {list(x_TD.shape)}")
    shape, shared = list(other.shape), 1 - experts_axis
    fits = len(shape) == 2 and shape[shared] == x_TD.shape[shared] and shape[experts_axis] >= 1
    form = ", ".join("E" if axis == experts_axis else str(x_TD.shape[axis]) for axis in (0, 1))
    rule = "1 expert or more" if most is None else f"1 to {most} experts"
    fits = fits and (most is None or shape[experts_axis] <= most)
    require(fits, op, name, f"have shape [{form}] with {rule}", f"shape {shape}")
    check_like(op, name, other, x_TD)


def _logits_fake(x_TD: Tensor, w_ED: Tensor, wide: bool = False) -> Tensor:
    return x_TD.new_empty((x_TD.shape[0], w_ED.shape[0]), dtype=sum_dtype(x_TD) if wide else x_TD.dtype)


def _logits_cpu(x_TD: Tensor, w_ED: Tensor, wide: bool = False) -> Tensor:
    if wide:
        x_TD, w_ED = x_TD.to(sum_dtype(x_TD)), w_ED.to(sum_dtype(w_ED))
    return product_of_rows(x_TD, w_ED.mT)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradient(ctx, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_TD, w_ED = ctx.saved_tensors
    needs_x, needs_w, _ = ctx.needs_input_grad
    dx_TD = dw_ED = None
    if needs_x:
        right = w_ED.to(dlogits_TE.dtype)
        dx_TD = (router_logits(dlogits_TE, right.mT) if config.batch_invariant else dlogits_TE @ right).to(x_TD.dtype)
    if needs_w:
        left = x_TD.to(dlogits_TE.dtype)
        is_small = w_ED.shape[0] <= MOST_EXPERTS
        dw_ED = (router_weight_grad(dlogits_TE, left) if is_small else dlogits_TE.mT @ left).to(w_ED.dtype)
    return dx_TD, dw_ED, None


def _forward_mode(x_TD: Tensor, w_ED: Tensor, wide: bool = False) -> Tensor:
    (x_TD, w_ED), (dx_TD, dw_ED) = parted((x_TD, w_ED))
    terms = [(dx_TD, w_ED)] if dx_TD is not None else []
    terms += [(x_TD, dw_ED)] if dw_ED is not None else []
    return carrying(router_logits(x_TD, w_ED, wide), sum(router_logits(*term, wide) for term in terms))


router_weight_grad = register_op(
    "router_weight_grad",
    "(Tensor dlogits_TE, Tensor x_TD) -> Tensor",
    fake=lambda dlogits_TE, x_TD: x_TD.new_empty((dlogits_TE.shape[1], x_TD.shape[1])),
    cpu=lambda dlogits_TE, x_TD: dlogits_TE.mT @ x_TD,
    kernel="routing.router_products:launch_router_weight_grad",
    check=lambda op, dlogits_TE, x_TD: _check(op, x_TD, "dlogits_TE", dlogits_TE, 1, MOST_EXPERTS),
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
    "(Tensor x_TD, Tensor w_ED, bool wide=False) -> Tensor",
    fake=_logits_fake,
    cpu=_logits_cpu,
    kernel="routing.router_products:launch_router_logits",
    check=lambda op, x_TD, w_ED, wide=False: _check(op, x_TD, "w_ED", w_ED, 0),
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=_forward_mode,
    autocast=(0, 1),
    flops=lambda x_shape, w_shape, *wide, **kwargs: 2 * w_shape[0] * x_shape[0] * x_shape[1],
)
"""``x @ w.T``: the logits of a linear router.

Args:
    x_TD: tokens. Shape [T, D], bf16, fp16, fp32, or fp64 on CPU, any strides, T may be 0.
    w_ED: the router's weight. Shape [E, D], dtype of x, any strides.
    wide: give the sums as they are, in fp32 (fp64 for fp64).

Returns:
    logits_TE: shape [T, E], dtype of x unless ``wide``, contiguous. On CUDA with fp32 sums; two runs agree bit for bit. The bits
    of a token's logits depend on no other token: on CUDA always, on a CPU with ``config.batch_invariant``.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""


def logits_of(router: nn.Linear, x: Tensor) -> Tensor:
    """``router(x)``, of which no bit may depend on how many tokens there are where ``config.batch_invariant`` says so."""
    if not config.batch_invariant or type(router) is not nn.Linear:
        return router(x)
    logits_TE = call(router_logits, x.reshape(-1, x.shape[-1]), router.weight, False)
    logits_TE = logits_TE if router.bias is None else logits_TE + router.bias
    return logits_TE.view(*x.shape[:-1], logits_TE.shape[1])
