"""``moeblaze::expert_up`` and its backward: x to the experts' hidden width, rows of x read by index."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from moeblaze_ops.arguments.separate_experts import num_joined, split_as_given
from moeblaze_ops.arguments.validation import check_expert_up, check_expert_up_backward, check_expert_up_h8
from moeblaze_ops.arguments.weight_storage import up_shape
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.kernels.eight_bits import row_width, without_memory
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.ops.autodiff import carrying, or_zeros, parted
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.low_rank.expert_rows import expert_rows
from moeblaze_ops.ops.low_rank.low_rank_backward import low_rank_backward
from moeblaze_ops.ops.register import register_op
from moeblaze_ops.ops.weight_grad import expert_weight_grad, up_bias_gradients, weight_gradients

_ROUTING = "Tensor slots_N, Tensor offsets_E1, Tensor positions_TK, Tensor blocks_B2"


def _expert_up_fake(
    x_TD, w_up, b_up, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation, *rest
) -> tuple[Tensor, Tensor]:
    N, shape = slots_N.shape[0], up_shape(w_up)
    h_NGF = x_TD.new_empty((N, shape.G, shape.F))
    a_NF = x_TD.new_empty((0 if activation == IDENTITY else N, shape.F))
    return h_NGF, a_NF


def _expert_up_h8_fake(x_TD, w_up, b_up, weights_TK, slots_N, *rest) -> tuple[Tensor, Tensor, Tensor]:
    N, (_, G, F, _) = slots_N.shape[0], up_shape(w_up)
    return without_memory(x_TD, (N, G, F)), x_TD.new_empty((N, F)), x_TD.new_empty((N, G, row_width(F)), dtype=torch.int8)


def _expert_up_setup_context(ctx, inputs, output) -> None:
    x_TD, w_up, b_up, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation, *low_rank, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.num_w_up = len(w_up)
    ctx.num_b_up = len(b_up)
    ctx.num_joined_b_up = num_joined(b_up, offsets_E1.shape[0] - 1)
    ctx.save_for_backward(x_TD, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, *low_rank, *w_up)


def _expert_up_gradient(ctx, dh_NGF, *others):
    none_for_inputs = (None, [None] * ctx.num_w_up, [None] * ctx.num_b_up, *[None] * 10)
    if dh_NGF is None:
        return none_for_inputs
    x_TD, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, u_NR, lora_a, lora_b, *w_up = ctx.saved_tensors
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    top_k = positions_TK.shape[1]
    dh_NGF = dh_NGF.contiguous()
    dx_TD, dweights_TK, du_NR, dlora_a, dlora_b = None, None, None, None, None
    dw_up: list = [None] * ctx.num_w_up
    db_up: list = [None] * ctx.num_b_up
    needs_x = ctx.needs_input_grad[0] or ctx.needs_input_grad[3]
    if ctx.needs_input_grad[11]:
        du_NR, dlora_b = call(low_rank_backward, dh_NGF, u_NR, lora_b, weights_TK, *routing)
    elif u_NR is not None and (needs_x or ctx.needs_input_grad[10]):
        du_NR = call(expert_rows, dh_NGF, lora_b, offsets_E1, blocks_B2)
    if needs_x:
        x_or_none = None if weights_TK is None else x_TD
        low_rank = () if u_NR is None else (None, None, None, du_NR, lora_a)
        dx_TD, dscale_TK = call(expert_up_backward, dh_NGF, x_or_none, w_up, weights_TK, *routing, *low_rank)
        dweights_TK = None if weights_TK is None else dscale_TK
    if ctx.needs_input_grad[10]:
        like = [lora_a.unsqueeze(1)]
        given = (x_TD, du_NR.unsqueeze(1), like, weights_TK, slots_N, offsets_E1, top_k)
        dlora_a = call(expert_weight_grad, *given)[0].squeeze(1)
    if any(ctx.needs_input_grad[2]):
        db_up = up_bias_gradients(dh_NGF, slots_N, offsets_E1, top_k, ctx.num_joined_b_up)
    # Last: expert_up_backward needs room for [N, D], which the weight gradient would be allocated on top of.
    if any(ctx.needs_input_grad[1]):
        dw_up = weight_gradients(x_TD, dh_NGF, w_up, weights_TK, slots_N, offsets_E1, top_k)
    dw_up, db_up = split_as_given(dw_up, ctx.num_w_up), split_as_given(db_up, ctx.num_b_up)
    return dx_TD, dw_up, db_up, dweights_TK, None, None, None, None, None, None, dlora_a, dlora_b, None


def _weights_of_rows(weights_TK: Tensor | None, slots_N: Tensor) -> Tensor | None:
    """The routing weight of each row, [N, 1]; that of slot 0 for a row of an unused slot, which nobody reads."""
    return None if weights_TK is None else weights_TK.reshape(-1)[slots_N.clamp(min=0).long()].unsqueeze(1)


def _expert_up_forward_mode(*args) -> tuple[Tensor, Tensor]:
    """h is linear in x, in the weights with their biases, in the routing weights and in each factor: five products at most."""
    primals, tangents = parted(args)
    *given, u_NR, lora_a, lora_b, params_EP = primals
    refuse_tangents_with_parameters("expert_up", params_EP)
    x_TD, w_up, b_up, weights_TK, *routing, _ = given
    dx_TD, dw_up, db_up, dweights_TK, *_, dlora_a, dlora_b, _ = tangents
    h_NGF, a_NF = expert_up(*primals)

    def ranks(x: Tensor, lora_a: Tensor) -> Tensor:
        return expert_up(x, [lora_a.unsqueeze(1)], [], None, *routing, IDENTITY)[0].squeeze(1)

    terms: list[tuple] = []
    if dx_TD is not None:
        low_rank = () if u_NR is None else (ranks(dx_TD, lora_a), lora_a, lora_b)
        terms.append((dx_TD, w_up, [], weights_TK, *routing, IDENTITY, *low_rank))
    if any(tangent is not None for tangent in (*dw_up, *db_up)):
        terms.append((x_TD, or_zeros(dw_up, w_up), or_zeros(db_up, b_up), weights_TK, *routing, IDENTITY))
    if dweights_TK is not None:
        terms.append((x_TD, w_up, [], dweights_TK, *routing, IDENTITY, u_NR, lora_a, lora_b))
    products = [expert_up(*term)[0] for term in terms]
    if dlora_a is not None:
        products.append(_of_ranks(ranks(x_TD, dlora_a), lora_b, weights_TK, routing))
    if dlora_b is not None:
        products.append(_of_ranks(u_NR, dlora_b, weights_TK, routing))
    return (carrying(h_NGF, sum(products)) if products else h_NGF), a_NF


def _of_ranks(u_NR: Tensor, lora_b_EGFR: Tensor, weights_TK: Tensor | None, routing: Sequence[Tensor]) -> Tensor:
    """``s[r] * u[r] @ B[e]^T``, [N, G, F]: what a low-rank addition adds to h."""
    slots_N, offsets_E1, _, blocks_B2 = routing
    _, G, F, _ = lora_b_EGFR.shape
    h_NX = expert_rows(u_NR.unsqueeze(1), lora_b_EGFR.flatten(1, 2).transpose(1, 2).unsqueeze(1), offsets_E1, blocks_B2)
    s_N1 = _weights_of_rows(weights_TK, slots_N)
    return (h_NX if s_N1 is None else h_NX * s_N1).unflatten(1, (G, F))


def _expert_up_backward_fake(
    dh_NGF, x_TD, w_up, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, *rest
) -> tuple[Tensor, Tensor]:
    return dh_NGF.new_empty((positions_TK.shape[0], up_shape(w_up).D)), routing_gradient_like(weights_TK, positions_TK)


def refuse_tangents_with_parameters(op: str, params_EP: Tensor | None) -> None:
    """Refuse tangents of forward mode where the activation has parameters."""
    if params_EP is not None:
        way_round = "take the gradient in reverse mode, or write their numbers in the formula"
        raise NotImplementedError(f"{op}: forward-mode AD is not available with an activation's parameters, {way_round}")


def routing_gradient_like(weights_TK: Tensor | None, positions_TK: Tensor) -> Tensor:
    """An empty gradient of the routing weights: [T, K] of their dtype, or [0, K] fp32 where there are none."""
    if weights_TK is None:
        return positions_TK.new_empty((0, positions_TK.shape[1]), dtype=torch.float32)
    return positions_TK.new_empty(positions_TK.shape, dtype=weights_TK.dtype)


def low_rank_flops(rows_shape: Sequence[int] | None, factor_shape: Sequence[int]) -> int:
    """Of the product of rows [N, R] with a factor that has R on some axis, for each expert."""
    return 2 * rows_shape[0] * prod(factor_shape[1:]) if rows_shape else 0


def _up_flops(
    x_shape, w_up_shapes, b_up, weights, slots_shape, offsets, positions, blocks, activation, u=None, a=None, b=None, *rest, **_
) -> int:
    return sum(2 * slots_shape[0] * G * F * D for _, G, F, D in w_up_shapes) + low_rank_flops(u, b)


def _up_backward_flops(dh_shape, x_shape, w_up_shapes, *args, **kwargs) -> int:
    low_rank = low_rank_flops(*args[8:10]) if len(args) > 8 else 0
    return sum(2 * dh_shape[0] * G * F * D for _, G, F, D in w_up_shapes) + low_rank


expert_up_backward = register_op(
    "expert_up_backward",
    f"(Tensor dh_NGF, Tensor? x_TD, Tensor[] w_up, Tensor? weights_TK, {_ROUTING}, Tensor? dlogits_TE=None,"
    " Tensor? w_router_ED=None, int? max_bytes=None, Tensor? du_NR=None, Tensor? lora_a_ERD=None) -> (Tensor, Tensor)",
    fake=_expert_up_backward_fake,
    cpu=cpu.expert_up_backward,
    kernel="experts.expert_up_backward:launch_expert_up_backward",
    check=check_expert_up_backward,
    flops=_up_backward_flops,
)
"""Gradient of ``expert_up`` for x, summed over each token's K rows, and for weights on the input.

``dx_TD[t] = sum_k s[t, k] * rows[positions_TK[t, k]]`` with ``rows[r] = sum_gf dh[r, g, f] * W[e, g, f, :]``, and
``dweights_TK[t, k] = <rows[positions_TK[t, k]], x_TD[t]>``; without weights s is 1 and dweights is [0, K].
``dlogits_TE @ w_router_ED``, the gradient that reaches x through a linear router, is added to dx_TD if given (dtype of dh, any
strides, E any number): in the same fp32 sum, where a product of its own would read and write dx_TD once more. dlogits may be
several side by side, [T, P E], whose products are added: bf16 parts of wider numbers.
With a low-rank addition ``du_NR[r] @ lora_a_ERD[e]`` is added in the sum of ``rows[r]``; du is ``dh B``.
On CUDA ``rows`` takes at most max_bytes, or those of 256 columns; None: ``config.max_transient_bytes``.
Sums are taken in fp32 (fp64 for fp64) and agree bit for bit from run to run.
"""

_ARGUMENTS = (
    f"(Tensor x_TD, Tensor[] w_up, Tensor[] b_up, Tensor? weights_TK, {_ROUTING}, str activation, Tensor? u_NR=None,"
    " Tensor? lora_a_ERD=None, Tensor? lora_b_EGFR=None, Tensor? params_EP=None)"
)

expert_up = register_op(
    "expert_up",
    f"{_ARGUMENTS} -> (Tensor, Tensor)",
    fake=_expert_up_fake,
    cpu=cpu.expert_up,
    kernel="experts.expert_up:launch_expert_up",
    check=check_expert_up,
    backward=_expert_up_gradient,
    setup_context=_expert_up_setup_context,
    forward_mode=_expert_up_forward_mode,
    autocast=(0, 1, 2, 9, 10, 11),
    flops=_up_flops,
)
"""Project every routed token to its expert's hidden width and activate, without a routed copy of x.

``h[r] = s[r] * x[token(r)] @ W[e]^T + b[e]`` and ``a[r] = act(h[r])``, s the routing weight if it applies to the
expert's input, else 1. The activation reads h rounded to its dtype, so that backward sees what forward saw.

Args:
    x_TD: tokens. Shape [T, D], bf16, fp16, fp32, or fp64 on CPU; contiguous in D is fastest; T may be 0.
    w_up: [E, G, F, D] (G = 2: gate, up), or gate and up as two [E, 1, F, D]; dtype of x, any strides. With experts
        stored apart E tensors [1, G, F, D], or E gates and E ups [1, 1, F, D].
    b_up: biases in one of these forms without D, or empty.
    weights_TK: routing weights on the experts' input (fp32 or dtype of x), or None.
    slots_N, offsets_E1, positions_TK, blocks_B2: from ``dispatch``.
    activation: a name in ``activations.ACTIVATIONS``, a formula, or ``identity``.
    u_NR: with a low-rank addition to the weights, ``W + B A``: ``x[token(r)] @ A[e]^T`` in expert order, what is computed with
        and not differentiated, since the op differentiates x and A. None for none. ``ops.low_rank`` makes it.
    lora_a_ERD, lora_b_EGFR: the factors A [E, R, D] and B [E, G, F, R], dtype of x, any strides; what multiplies their product is
        in one of them. Given exactly when u is. ``x @ W^T + u @ B^T`` is one fp32 sum; nothing of the size of W is written,
        and W, if it needs no gradient, gets none.
    params_EP: what a formula reads as p0, p1 and so on, for each expert, fp32 (fp64 for fp64); None where it reads none. What is
        computed with and not differentiated: ``expert_down`` gives their gradient.

Returns:
    h_NGF: pre-activation in expert order, differentiable. Rows of unused slots are zero on CPU, unspecified on CUDA.
    a_NF: activation in expert order, not differentiable (``expert_down`` takes h to differentiate); [0, F] for identity.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.

Numerics: accumulates in fp32 (fp64 for fp64); on CPU the product with W is rounded before that of a low-rank addition is added
to it. Two runs agree bit for bit; on CPU eager and compiled code, whose activation is Inductor's, may differ in the last bits
of a.
"""

expert_up_h8 = register_op(
    "expert_up_h8",
    f"{_ARGUMENTS} -> (Tensor, Tensor, Tensor)",
    fake=_expert_up_h8_fake,
    cpu=cpu.expert_up_h8,
    kernel="experts.expert_up:launch_expert_up_h8",
    check=check_expert_up_h8,
    backward=_expert_up_gradient,
    setup_context=_expert_up_setup_context,
    autocast=(0, 1, 2, 9, 10, 11),
    flops=_up_flops,
)
"""``expert_up`` of which backward finds h in 8 bits; not of ``identity``, where h is what ``expert_down`` computes with.

Returns:
    h_NGF: what is differentiated, and holds no numbers: all its elements are one in memory.
    a_NF: as ``expert_up`` gives it, bit for bit.
    h8_NGB: h as ``kernels/eight_bits.py`` has it, int8, not differentiable: ``expert_down`` takes it to keep.
"""


def up_that_keeps(keep: str, activation: str) -> torch._ops.OpOverload:
    """The op that leaves h as ``keep`` says: in 8 bits, but where forward reads it, having no activation."""
    return expert_up_h8 if keep == "h8" and activation != IDENTITY else expert_up
