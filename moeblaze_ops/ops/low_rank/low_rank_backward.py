"""``moeblaze::low_rank_backward``: gradients of a low-rank part of a projection, for its rows and for their factor, together."""

import math

from moeblaze_ops.arguments.validation_gradients import check_low_rank_backward
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.ops.register import register_op

low_rank_backward = register_op(
    "low_rank_backward",
    "(Tensor dy, Tensor u_NR, Tensor b, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1, Tensor positions_TK,"
    " Tensor blocks_B2) -> (Tensor, Tensor)",
    fake=lambda dy, u_NR, b, *_: (dy.new_empty(u_NR.shape), b.new_empty(b.shape)),
    cpu=cpu.low_rank_backward,
    kernel="experts.low_rank_backward:launch_low_rank_backward",
    check=check_low_rank_backward,
    flops=lambda dy_shape, u_shape, b_shape, *_, **kwargs: 2 * 2 * u_shape[0] * math.prod(b_shape[1:]),
)
"""Both gradients of ``y[r] = s[r] * u[r] @ B[e]^T``, what a low-rank addition adds to a projection, in one pass over dy.

``du[r] = dy[r] @ B[e]``, without s, and ``dB[e] = sum_r dy[r]^T (s[r] * u[r])``.

Args:
    dy: gradient of y. Rows in expert order, [N, G, F], of an up projection, or tokens that rows are read of by index, [T, D],
        of a down projection; bf16, fp16, fp32, or fp64 on CPU, any strides; N may be 0.
    u_NR: the rows that were multiplied, in expert order, dtype of dy, any strides.
    b: the factor. Shape [E, G, F, R], or [E, D, R] where dy is in token order; dtype of dy, any strides.
    weights_TK: routing weights s, or None for 1.
    slots_N, offsets_E1, positions_TK, blocks_B2: from ``dispatch``.

Returns:
    du_NR: dtype of dy, contiguous. Rows of unused slots are zero on CPU, unspecified on CUDA.
    db: shape and dtype of b, contiguous; zero for an expert without tokens.
    Sums are taken in fp32 (fp64 for fp64) and agree bit for bit from run to run.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
