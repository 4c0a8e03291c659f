"""``moeblaze::router_sums``, its backward, and ``moeblaze::expert_counts``: what the losses of a router are made of."""

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import check_dispatch, check_shape, require_dtype
from moeblaze_ops.arguments.validation_router import check_like_logits, check_logits
from moeblaze_ops.cpu.rows import sum_dtype
from moeblaze_ops.ops.autodiff import carrying, parted
from moeblaze_ops.ops.register import register_op


def _check(op: str, logits_TE: Tensor, kept_T: Tensor | None) -> None:
    check_logits(op, logits_TE)
    if kept_T is not None:
        check_shape(op, "kept_T", kept_T, [logits_TE.shape[0]], " (tokens of logits_TE)")
        require_dtype(kept_T.dtype == torch.bool, op, "kept_T", "be bool", kept_T.dtype)
        check_like_logits(op, "kept_T", kept_T, logits_TE)


def _check_backward(
    op: str,
    dsums_E: Tensor | None,
    dsquares: Tensor | None,
    logits_TE: Tensor,
    kept_T: Tensor | None,
    dlogits_TE: Tensor | None = None,
) -> None:
    _check(op, logits_TE, kept_T)
    if dlogits_TE is not None:
        check_shape(op, "dlogits_TE", dlogits_TE, list(logits_TE.shape), " (that of logits_TE)")
        require_dtype(dlogits_TE.dtype == logits_TE.dtype, op, "dlogits_TE", f"be {logits_TE.dtype}", dlogits_TE.dtype)
        check_like_logits(op, "dlogits_TE", dlogits_TE, logits_TE)
    wide = sum_dtype(logits_TE)
    for name, given, expected in (("dsums_E", dsums_E, [logits_TE.shape[1]]), ("dsquares", dsquares, [])):
        if given is not None:
            check_shape(op, name, given, expected)
            require_dtype(given.dtype == wide, op, name, f"be {wide}", given.dtype)
            check_like_logits(op, name, given, logits_TE)


def _fake(logits_TE, kept_T) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(logits_TE)
    return logits_TE.new_empty((logits_TE.shape[1],), dtype=wide), logits_TE.new_empty((), dtype=wide)


def _sums(logits_TE: Tensor, kept_T: Tensor | None) -> tuple[Tensor, Tensor]:
    wide_TE = logits_TE.to(sum_dtype(logits_TE))
    p_TE, squares_T = wide_TE.softmax(-1), wide_TE.logsumexp(-1).square()
    if kept_T is not None:
        p_TE, squares_T = torch.where(kept_T.unsqueeze(1), p_TE, 0), torch.where(kept_T, squares_T, 0)
    return p_TE.sum(0), squares_T.sum()


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _gradient(ctx, dsums_E, dsquares) -> tuple[Tensor | None, None]:
    if not ctx.needs_input_grad[0] or (dsums_E is None and dsquares is None):
        return None, None
    return router_sums_backward(dsums_E, dsquares, *ctx.saved_tensors), None


def _forward_mode(logits_TE, kept_T) -> tuple[Tensor, Tensor]:
    (primal_TE, kept_T), (dlogits_TE, _) = parted((logits_TE, kept_T))
    sums_E, squares = router_sums(primal_TE, kept_T)
    if dlogits_TE is None:
        return sums_E, squares
    _, (dsums_E, dsquares) = parted(_sums(logits_TE, kept_T))
    return carrying(sums_E, dsums_E), carrying(squares, dsquares)


def _backward_cpu(dsums_E, dsquares, logits_TE, kept_T, added_TE=None) -> Tensor:
    wide_TE = logits_TE.to(sum_dtype(logits_TE))
    p_TE = wide_TE.softmax(-1)
    slope_TE = torch.zeros_like(p_TE)
    if dsums_E is not None:
        slope_TE = slope_TE + dsums_E - (p_TE @ dsums_E).unsqueeze(1)
    if dsquares is not None:
        slope_TE = slope_TE + 2 * dsquares * wide_TE.logsumexp(-1, keepdim=True)
    dlogits_TE = p_TE * slope_TE
    if kept_T is not None:
        dlogits_TE = torch.where(kept_T.unsqueeze(1), dlogits_TE, 0)
    if added_TE is not None:
        dlogits_TE = dlogits_TE + added_TE
    return dlogits_TE.to(logits_TE.dtype).contiguous()


def _counts_cpu(experts_TK, num_experts) -> Tensor:
    ids_N = experts_TK.reshape(-1).long()
    used_N = (ids_N >= 0) & (ids_N < num_experts)
    return torch.bincount(torch.where(used_N, ids_N, num_experts), minlength=num_experts + 1)[:num_experts].int()


router_sums_backward = register_op(
    "router_sums_backward",
    "(Tensor? dsums_E, Tensor? dsquares, Tensor logits_TE, Tensor? kept_T, Tensor? dlogits_TE=None) -> Tensor",
    fake=lambda dsums_E, dsquares, logits_TE, *_: logits_TE.new_empty(logits_TE.shape),
    cpu=_backward_cpu,
    kernel="routing.router_sums:launch_router_sums_backward",
    check=_check_backward,
)
"""Gradient of ``router_sums`` for the logits, in their dtype and contiguous; None stands for zeros.

``dlogits[t] = p[t] * (dsums - <p[t], dsums> + 2 * logsumexp(logits[t]) * dsquares)`` with ``p = softmax(logits)``. Another
gradient of the logits, ``dlogits_TE`` in their shape and dtype and with any strides, is added in fp32 before the sum is rounded.
"""

router_sums = register_op(
    "router_sums",
    "(Tensor logits_TE, Tensor? kept_T) -> (Tensor, Tensor)",
    fake=_fake,
    cpu=_sums,
    kernel="routing.router_sums:launch_router_sums",
    check=_check,
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=_forward_mode,
)
"""``softmax(logits).sum(0)`` and ``logsumexp(logits)**2`` summed over tokens, from one pass over the logits.

Args:
    logits_TE: router logits. Shape [T, E], bf16, fp16, fp32, or fp64 on CPU, any strides, T may be 0.
    kept_T: the tokens that count, None for all. Shape [T], bool, any stride.

Returns:
    sums_E and squares, a scalar. fp32 (fp64 for fp64), differentiable in the logits. Two runs agree bit for bit.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""

expert_counts = register_op(
    "expert_counts",
    "(Tensor experts_TK, SymInt num_experts) -> Tensor",
    fake=lambda experts_TK, num_experts: experts_TK.new_empty((num_experts,), dtype=torch.int32),
    cpu=_counts_cpu,
    kernel="routing.dispatch:launch_expert_counts",
    check=check_dispatch,
    backward=lambda ctx, dcounts_E: (None, None),
)
"""How many slots each expert has, int32, shape [E]; arguments and errors are those of ``dispatch``, and so are its counts."""
