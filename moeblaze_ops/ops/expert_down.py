"""``moeblaze::expert_down`` and its backward: back to the model width, summed over each token's experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.activations import activate
from moeblaze_ops.arguments.separate_experts import split_as_given
from moeblaze_ops.arguments.validation import check_expert_down, check_expert_down_backward
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.ops.autodiff import carrying, or_zeros, parted
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.expert_up import expert_up, low_rank_flops, refuse_tangents_with_parameters, routing_gradient_like
from moeblaze_ops.ops.low_rank.expert_rows import expert_rows
from moeblaze_ops.ops.low_rank.low_rank_backward import low_rank_backward
from moeblaze_ops.ops.register import register_op
from moeblaze_ops.ops.weight_grad import expert_bias_grad, expert_weight_grad, weight_gradients

_ROUTING = "Tensor slots_N, Tensor offsets_E1, Tensor positions_TK, Tensor blocks_B2"


def _expert_down_fake(h_NGF, a_NF, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, *rest):
    return h_NGF.new_empty((positions_TK.shape[0], w_down[0].shape[2]))


def _expert_down_setup_context(ctx, inputs, output) -> None:
    h_NGF, a_NF, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation, *optional, h8_NGB = inputs
    kept = h_NGF if h8_NGB is None else h8_NGB
    ctx.set_materialize_grads(False)
    ctx.activation = activation
    ctx.num_w_down, ctx.num_b_down = len(w_down), len(b_down)
    ctx.save_for_backward(kept, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, *optional, *w_down, *b_down)


def _expert_down_gradient(ctx, dout_TD):
    b_none = [None] * ctx.num_b_down
    if dout_TD is None:
        return None, None, [None] * ctx.num_w_down, b_none, *[None] * 11
    h_NGF, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, *optional_and_parameters = ctx.saved_tensors
    v_NR, lora_a, lora_b, params_EP, *parameters = optional_and_parameters
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    w_down, b_down = parameters[: ctx.num_w_down], parameters[ctx.num_w_down :]
    top_k = positions_TK.shape[1]
    dout_TD = dout_TD.contiguous()
    low_rank: tuple = ()
    q_NR, dlora_a, dlora_b, dparams_EP = None, None, None, None
    if ctx.needs_input_grad[12]:
        q_NR, dlora_b_EDR = call(low_rank_backward, dout_TD, v_NR, lora_b.mT, weights_TK, *routing)
        dlora_b = dlora_b_EDR.mT
    elif v_NR is not None:
        q_NR = call(expert_up, dout_TD, [lora_b.unsqueeze(1)], [], None, *routing, IDENTITY)[0].squeeze(1)
    if v_NR is not None:
        low_rank = (q_NR, lora_a)
    given = (dout_TD, h_NGF, w_down, b_down, weights_TK, *routing, ctx.activation)
    if params_EP is None:
        dh_NGF, dweights_TK, wa_NF = call(expert_down_backward, *given, *low_rank)
    else:
        given = (*given, *(low_rank or (None, None)), params_EP)
        dh_NGF, dweights_TK, wa_NF, dparams_EP = call(expert_down_backward_learned, *given)
    if ctx.needs_input_grad[11]:
        rows_N = torch.arange(wa_NF.shape[0], dtype=torch.int32, device=wa_NF.device)
        (dlora_a,) = call(expert_weight_grad, wa_NF, q_NR.unsqueeze(1), [lora_a], None, rows_N, offsets_E1, 1)
    dw_down: list = [None] * ctx.num_w_down
    db_down: list = b_none
    if any(ctx.needs_input_grad[2]):
        dw_down = weight_gradients(dout_TD, wa_NF.unsqueeze(1), w_down, None, slots_N, offsets_E1, top_k)
    if any(ctx.needs_input_grad[3]):
        db_down = [call(expert_bias_grad, dout_TD, weights_TK, slots_N, offsets_E1, top_k, True)]
    dw_down, db_down = split_as_given(dw_down, ctx.num_w_down), split_as_given(db_down, ctx.num_b_down)
    dweights_TK = None if weights_TK is None else dweights_TK
    return dh_NGF, None, dw_down, db_down, dweights_TK, None, None, None, None, None, None, dlora_a, dlora_b, dparams_EP, None


def _expert_down_forward_mode(h_NGF, a_NF, w_down, b_down, weights_TK, *rest) -> Tensor:
    """The output is linear in a, in the weights with their biases, in the routing weights and in each factor: five products at
    most."""
    a_and_tangent = activate(h_NGF, rest[4])
    primals, tangents = parted((h_NGF, a_NF, w_down, b_down, weights_TK, *rest))
    _, _, w_down, b_down, weights_TK, *routing, activation, v_NR, lora_a, lora_b, params_EP, _ = primals
    _, _, dw_down, db_down, dweights_TK, *_, dlora_a, dlora_b, _, _ = tangents
    refuse_tangents_with_parameters("expert_down", params_EP)
    out_TD = expert_down(*primals)
    (a_rows,), (da_rows,) = parted([a_and_tangent])

    def ranks(a: Tensor, lora_a: Tensor) -> Tensor:
        return expert_rows(a.unsqueeze(1), lora_a.transpose(1, 2).unsqueeze(1), routing[1], routing[3])

    terms: list[tuple] = []
    if da_rows is not None:
        low_rank = () if v_NR is None else (ranks(da_rows, lora_a), lora_a, lora_b)
        terms.append((da_rows, w_down, [], weights_TK, *low_rank))
    if any(tangent is not None for tangent in (*dw_down, *db_down)):
        terms.append((a_rows, or_zeros(dw_down, w_down), or_zeros(db_down, b_down), weights_TK))
    if dweights_TK is not None:
        terms.append((a_rows, w_down, b_down, dweights_TK, v_NR, lora_a, lora_b))
    if dlora_a is not None:
        terms.append((ranks(a_rows, dlora_a), [lora_b], [], weights_TK))
    if dlora_b is not None:
        terms.append((v_NR, [dlora_b], [], weights_TK))
    products = [expert_down(a.unsqueeze(1), None, w, b, s, *routing, IDENTITY, *own) for a, w, b, s, *own in terms]
    return carrying(out_TD, sum(products)) if products else out_TD


def _expert_down_backward_fake(
    dout_TD, h_NGF, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation, *low_rank
):
    N, G, F = h_NGF.shape[0], h_NGF.shape[1], w_down[0].shape[1]
    dh_NGF = dout_TD.new_empty((N, G, F))
    return dh_NGF, routing_gradient_like(weights_TK, positions_TK), dout_TD.new_empty((N, F))


def _expert_down_backward_learned_fake(*args):
    return *_expert_down_backward_fake(*args), torch.empty_like(args[-1], memory_format=torch.contiguous_format)


def _overwriting_launcher(name: str) -> Callable:
    from moeblaze_ops.kernels.experts import expert_down_backward as kernels

    def launch(dout_TD, h_NGF, *args: Any) -> tuple[Tensor, ...]:
        _, G, F = h_NGF.shape
        dense = isinstance(F, int) and h_NGF.stride() == (G * F, F, 1) and h_NGF.dtype == dout_TD.dtype
        return getattr(kernels, name)(dout_TD, h_NGF, *args, overwrite_h=dense)

    return launch


def _down_flops(h_shape, a_shape, w_down_shapes, *args, **kwargs) -> int:
    _, F, D = w_down_shapes[0]
    low_rank = low_rank_flops(args[7], args[9]) if len(args) > 7 else 0
    return 2 * h_shape[0] * F * D + low_rank


def _down_backward_flops(dout_shape, h_shape, w_down_shapes, *args, **kwargs) -> int:
    low_rank = low_rank_flops(*args[7:9]) if len(args) > 7 else 0
    return _down_flops(h_shape, None, w_down_shapes) + low_rank


expert_down_backward = register_op(
    "expert_down_backward",
    f"(Tensor dout_TD, Tensor h_NGF, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK, {_ROUTING}, str activation,"
    " Tensor? q_NR=None, Tensor? lora_a_ERF=None) -> (Tensor, Tensor, Tensor)",
    fake=_expert_down_backward_fake,
    cpu=cpu.expert_down_backward,
    kernel="experts.expert_down_backward:launch_expert_down_backward",
    check=check_expert_down_backward,
    overwriting=(1, partial(_overwriting_launcher, "launch_expert_down_backward")),
    flops=_down_backward_flops,
)
"""One GEMM and everything that hangs on it: gradients of h and of the routing weights, and the scaled activation.

With ``dA'[r] = dout[token(r)] @ W[e]^T`` and a = act(h) recomputed: ``dweights[slot] = <dA'[r], a[r]> +
<dout[token(r)], b[e]>``, ``dh = act'(h) * s * dA'`` and ``wa = s * a`` (SonicMoE, arXiv 2512.14080, eq. 11-13). With a low-rank
addition ``q_NR[r] @ lora_a_ERF[e]`` is added in the sum of ``dA'[r]``; q is ``dout[token(r)] @ B[e]``. h may be in 8 bits, as
``expert_up_h8`` gives it.

Returns:
    dh_NGF, dweights_TK (zero at unused slots, in the dtype of the weights; [0, K] fp32 without weights), wa_NF.
    Sums are taken in fp32 (fp64 for fp64) and agree bit for bit from run to run; on CPU eager and compiled code, in which all
    between the products is Inductor's, may differ in the last bits.
"""

expert_down_backward_learned = register_op(
    "expert_down_backward_learned",
    f"(Tensor dout_TD, Tensor h_NGF, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK, {_ROUTING}, str activation,"
    " Tensor? q_NR, Tensor? lora_a_ERF, Tensor params_EP) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_expert_down_backward_learned_fake,
    cpu=cpu.expert_down_backward_learned,
    kernel="experts.expert_down_backward:launch_expert_down_backward_learned",
    check=check_expert_down_backward,
    overwriting=(1, partial(_overwriting_launcher, "launch_expert_down_backward_learned")),
    flops=_down_backward_flops,
)
"""``expert_down_backward`` of a formula that reads parameters, and their gradient.

``dparams[e, p] = sum over rows r of e and features f of s[r] * dA'[r, f] * d act(h[r, :, f]) / d p``. Each row's sums over the
features of a tile are summed over tiles and rows by ``expert_bias_grad``'s kernel, in a fixed order and without atomics.

Returns:
    dh_NGF, dweights_TK, wa_NF as ``expert_down_backward``; dparams_EP, dtype of the parameters, zero for an expert without rows.
    Two runs agree bit for bit.
"""

expert_down = register_op(
    "expert_down",
    f"(Tensor h_NGF, Tensor? a_NF, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK, {_ROUTING}, str activation,"
    " Tensor? v_NR=None, Tensor? lora_a_ERF=None, Tensor? lora_b_ERD=None,"
    " Tensor? params_EP=None, Tensor? h8_NGB=None) -> Tensor",
    fake=_expert_down_fake,
    cpu=cpu.expert_down,
    kernel="experts.expert_down:launch_expert_down",
    check=check_expert_down,
    backward=_expert_down_gradient,
    setup_context=_expert_down_setup_context,
    forward_mode=_expert_down_forward_mode,
    autocast=(0, 1, 2, 3, 10, 11, 12),
    flops=_down_flops,
)
"""Project each row back to the model width and sum each token's rows, weighted.

``out[t] = sum_k s[t, k] * (a[positions[t, k]] @ W[e] + b[e])``; unused slots add nothing.

Args:
    h_NGF: pre-activation from ``expert_up``: what is differentiated and kept for backward.
    a_NF: activation from ``expert_up``: what is computed with. None: computed from h.
    w_down: one [E, F, D] tensor, any strides (``nn.Linear`` storage [E, D, F] comes as ``.transpose(1, 2)``), or with
        experts stored apart E tensors [1, F, D].
    b_down: one [E, D] tensor, or E tensors [1, D], or empty.
    weights_TK: routing weights, fp32 or dtype of h, or None for 1.
    slots_N, offsets_E1, positions_TK, blocks_B2: from ``dispatch``.
    activation: the one of ``expert_up``.
    v_NR: with a low-rank addition to the weight, ``W + A^T B`` of [E, F, D]: ``a[r] @ A[e]^T`` in expert order, what is computed
        with and not differentiated. None for none. ``ops.low_rank`` makes it.
    lora_a_ERF, lora_b_ERD: the factors A [E, R, F] and B [E, R, D], dtype of h, any strides. Given exactly when v is.
        ``a @ W + v @ B`` is one fp32 sum (on CPU ``a @ W`` is rounded first); nothing of the size of W is written.
    params_EP: those of ``expert_up``; differentiable here.
    h8_NGB: what ``expert_up_h8`` gave beside this h and a, kept for backward in place of h.

Returns:
    out_TD in token order, dtype of h. Rows are rounded to that dtype before the sum over K, which is taken in fp32
    in a fixed order (fp64 for fp64): two runs agree bit for bit.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
