"""``moeblaze::sum_dropped`` and its backward: dropout of what experts give, in the sum over each token's slots."""

from torch import Tensor

from moeblaze_ops.arguments.draws import dropped_rows
from moeblaze_ops.arguments.validation import check_device, check_shape, require, require_dtype
from moeblaze_ops.arguments.validation_values import check_float_dtype
from moeblaze_ops.cpu.rows import sum_dtype
from moeblaze_ops.ops.autodiff import carrying, parted
from moeblaze_ops.ops.register import register_op


def _check(op: str, name: str, rows: Tensor, seed: Tensor, top_k: int, p: float) -> None:
    check_float_dtype(op, name, rows)
    require(rows.dim() == 2, op, name, "have 2 dimensions", f"shape {list(rows.shape)}")
    check_shape(op, "seed", seed, [1])
    require_dtype(seed.dtype == sum_dtype(rows), op, "seed", f"be {sum_dtype(rows)}", seed.dtype)
    check_device(op, "seed", seed, rows)
    require(top_k >= 1, op, "top_k", "be at least 1", top_k)
    require(0 <= p <= 1, op, "p", "be from 0 to 1", p)


def _check_sum(op: str, rows_ND: Tensor, seed: Tensor, top_k: int, p: float) -> None:
    _check(op, "rows_ND", rows_ND, seed, top_k, p)
    require(rows_ND.shape[0] % top_k == 0, op, "rows_ND", f"have a multiple of top_k = {top_k} rows", rows_ND.shape[0])


def _sum_cpu(rows_ND: Tensor, seed: Tensor, top_k: int, p: float) -> Tensor:
    dropped_ND = dropped_rows(rows_ND.to(sum_dtype(rows_ND)), seed, p)
    return dropped_ND.view(-1, top_k, rows_ND.shape[1]).sum(1).to(rows_ND.dtype)


def _gradient(ctx, dout_TD: Tensor) -> tuple[Tensor, None, None, None]:
    return sum_dropped_backward(dout_TD, *ctx.saved_tensors, ctx.top_k, ctx.p), None, None, None


def _gradient_of_gradient(ctx, ddrows_ND: Tensor) -> tuple[Tensor, None, None, None]:
    return sum_dropped(ddrows_ND, *ctx.saved_tensors, ctx.top_k, ctx.p), None, None, None


def _setup_context(ctx, inputs, output) -> None:
    _, seed, ctx.top_k, ctx.p = inputs
    ctx.save_for_backward(seed)


def _forward_mode(*args) -> Tensor:
    (rows_ND, *rest), (tangent_ND, *_) = parted(args)
    return carrying(sum_dropped(rows_ND, *rest), sum_dropped(tangent_ND, *rest))


def _backward_forward_mode(*args) -> Tensor:
    (dout_TD, *rest), (tangent_TD, *_) = parted(args)
    return carrying(sum_dropped_backward(dout_TD, *rest), sum_dropped_backward(tangent_TD, *rest))


sum_dropped_backward = register_op(
    "sum_dropped_backward",
    "(Tensor dout_TD, Tensor seed, SymInt top_k, float p) -> Tensor",
    fake=lambda dout_TD, seed, top_k, p: dout_TD.new_empty((dout_TD.shape[0] * top_k, dout_TD.shape[1])),
    cpu=lambda dout_TD, seed, top_k, p: dropped_rows(dout_TD.repeat_interleave(top_k, 0), seed, p),
    kernel="rows.sum_dropped:launch_sum_dropped_backward",
    check=lambda op, dout_TD, *rest: _check(op, "dout_TD", dout_TD, *rest),
    backward=_gradient_of_gradient,
    setup_context=_setup_context,
    forward_mode=_backward_forward_mode,
)
"""The gradient of the rows of ``sum_dropped``, shape [N, D]: the gradient of its result for each slot, dropped likewise."""

sum_dropped = register_op(
    "sum_dropped",
    "(Tensor rows_ND, Tensor seed, SymInt top_k, float p) -> Tensor",
    fake=lambda rows_ND, seed, top_k, p: rows_ND.new_empty((rows_ND.shape[0] // top_k, rows_ND.shape[1])),
    cpu=_sum_cpu,
    kernel="rows.sum_dropped:launch_sum_dropped",
    check=_check_sum,
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=_forward_mode,
)
"""The sum over each token's slots of rows of which each element is 0 with probability p, and else divided by ``1 - p``.

Args:
    rows_ND: a row for each slot, those of a token side by side. Shape [T * K, D], bf16, fp16, fp32, or fp64 on CPU, any strides.
    seed: a whole number below 2 ** 24, for this call alone. Shape [1], fp32 (fp64 for fp64).
    top_k: K. p: from 0 to 1.

Returns:
    out_TD: dtype of the rows, contiguous; differentiable in the rows, for which it keeps the seed alone. Sums in fp32 or fp64.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
