"""``moeblaze::expert_rows``: rows in expert order times their expert's matrix.

A low-rank addition to a weight, ``W + B A``, is computed beside it: u = x A^T is R columns a row, and ``u B^T`` is added in the
sum of the product with W.
"""

from math import prod

from moeblaze_ops.arguments.validation import check_expert_rows
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.ops.register import register_op

expert_rows = register_op(
    "expert_rows",
    "(Tensor rows_NGF, Tensor w_EGFC, Tensor offsets_E1, Tensor blocks_B2) -> Tensor",
    fake=lambda rows_NGF, w_EGFC, *_: rows_NGF.new_empty((rows_NGF.shape[0], w_EGFC.shape[3])),
    cpu=cpu.expert_rows,
    kernel="experts.expert_up_backward:launch_expert_rows",
    check=check_expert_rows,
    autocast=(0, 1),
    flops=lambda rows_shape, w_shape, *_, **kwargs: 2 * prod(rows_shape) * w_shape[3],
)
"""The product of each row with its expert's matrix: ``y[r] = sum_gf rows[r, g, f] * w[e, g, f, :]``, in expert order.

Args:
    rows_NGF: rows in expert order. Shape [N, G, F], bf16, fp16, fp32, or fp64 on CPU, any strides; N may be 0.
    w_EGFC: one matrix an expert. Shape [E, G, F, C], dtype of the rows, any strides.
    offsets_E1, blocks_B2: from ``dispatch``.

Returns:
    y_NC: shape [N, C], dtype of the rows. Rows of unused slots are zero on CPU, unspecified on CUDA. Sums are taken in fp32 (fp64
    for fp64) and agree bit for bit from run to run. It has no gradient of its own: ops take what it gives to compute with.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
