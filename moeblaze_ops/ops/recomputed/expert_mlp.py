"""``moeblaze::expert_mlp`` and its backward: both projections in one op, which keeps x instead of x and h.

The forward is ``expert_up`` and ``expert_down`` without an h that outlives, or is ever written to, memory. The backward
repeats the up projection, never the down projection, and writes the gradient of h over h.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor

from moeblaze_ops.arguments.separate_experts import num_joined, split_as_given
from moeblaze_ops.arguments.validation import check_expert_mlp, check_expert_mlp_backward
from moeblaze_ops.arguments.weight_storage import up_shape
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.expert_down import expert_down
from moeblaze_ops.ops.expert_up import expert_up, expert_up_backward, routing_gradient_like
from moeblaze_ops.ops.register import register_op
from moeblaze_ops.ops.weight_grad import expert_bias_grad, up_bias_gradients, weight_gradients

ARGUMENTS = (
    "Tensor x_TD, Tensor[] w_up, Tensor[] b_up, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK, Tensor slots_N,"
    " Tensor offsets_E1, Tensor positions_TK, Tensor blocks_B2, str activation, bool weight_on_input"
)


def _expert_mlp_fake(x_TD, w_up, b_up, w_down, *rest) -> Tensor:
    return x_TD.new_empty((x_TD.shape[0], w_down[0].shape[2]))


def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, activation, weight_on_input = inputs
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.weight_on_input = activation, weight_on_input
    ctx.counts = [len(tensors) for tensors in (w_up, b_up, w_down, b_down)]
    ctx.num_joined_b_up = num_joined(b_up, routing[1].shape[0] - 1)
    ctx.save_for_backward(x_TD, weights_TK, *routing, *w_up, *b_up, *w_down, *b_down)


def expert_mlp_gradient(ctx: Any, dout_TD: Tensor | None, max_bytes: int | None = None) -> tuple:
    """The gradients of the arguments; ``max_bytes`` as for ``expert_up_backward``."""
    dx_TD, dscale_TK = None, None
    nothing: Iterator[list] = ([None] * count for count in ctx.counts)
    dw_up, db_up, dw_down, db_down = nothing
    if dout_TD is None:
        return dx_TD, dw_up, db_up, dw_down, db_down, None, None, None, None, None, None, None
    x_TD, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, *parameters = ctx.saved_tensors
    w_up, b_up, w_down, b_down = split_groups(parameters, ctx.counts)
    needs_x, needs_w_up, needs_b_up, needs_w_down, needs_b_down, needs_weights = ctx.needs_input_grad[:6]
    on_input, on_output = (weights_TK, None) if ctx.weight_on_input else (None, weights_TK)
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    top_k = positions_TK.shape[1]
    dout_TD = dout_TD.contiguous()

    # Each gradient is taken where its operands die, the large ones of the weights after the scratch of the others.
    given = (x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, ctx.activation, ctx.weight_on_input)
    dh_NGF, dweights_TK, wa_NF = call(expert_mlp_backward, dout_TD, *given)
    if any(needs_w_down):
        dw_down = weight_gradients(dout_TD, wa_NF.unsqueeze(1), w_down, None, slots_N, offsets_E1, top_k)
    del wa_NF
    if any(needs_b_down):
        db_down = [call(expert_bias_grad, dout_TD, on_output, slots_N, offsets_E1, top_k, True)]
    if needs_x or (ctx.weight_on_input and needs_weights):
        x_or_none = None if on_input is None else x_TD
        dx_TD, dscale_TK = call(expert_up_backward, dh_NGF, x_or_none, w_up, on_input, *routing, None, None, max_bytes)
    if any(needs_b_up):
        db_up = up_bias_gradients(dh_NGF, slots_N, offsets_E1, top_k, ctx.num_joined_b_up)
    if any(needs_w_up):
        dw_up = weight_gradients(x_TD, dh_NGF, w_up, on_input, slots_N, offsets_E1, top_k)
    dweights_TK = None if weights_TK is None else dscale_TK if ctx.weight_on_input else dweights_TK
    gradients = zip((dw_up, db_up, dw_down, db_down), ctx.counts, strict=True)
    dw_up, db_up, dw_down, db_down = (split_as_given(joined, count) for joined, count in gradients)
    return dx_TD, dw_up, db_up, dw_down, db_down, dweights_TK, None, None, None, None, None, None


def expert_mlp_forward_mode(*args: Any) -> Tensor:
    """The two projections as ops of their own, which have rules for tangents."""
    x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, activation, weight_on_input = args
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    h_NGF, a_NF = expert_up(x_TD, w_up, b_up, on_input, *routing, activation)
    return expert_down(h_NGF, None if activation == IDENTITY else a_NF, w_down, b_down, on_output, *routing, activation)


def split_groups(tensors: list[Tensor], counts: list[int]) -> list[list[Tensor]]:
    """Consecutive groups of so many tensors each."""
    groups, start = [], 0
    for count in counts:
        groups.append(tensors[start : start + count])
        start += count
    return groups


def _expert_mlp_backward_fake(dout_TD, x_TD, w_up, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *_, weights_TK, slots_N, _, positions_TK, _, _, weight_on_input = rest
    N, shape = slots_N.shape[0], up_shape(w_up)
    dh_NGF = x_TD.new_empty((N, shape.G, shape.F))
    on_output = None if weight_on_input else weights_TK
    return dh_NGF, routing_gradient_like(on_output, positions_TK), x_TD.new_empty((N, shape.F))


def mlp_flops(x_shape: Sequence[int], w_up_shapes: list[Sequence[int]], *rest: Any, **kwargs: Any) -> int:
    """Of all slots, from the shapes of the arguments: behind the parameters and the weights come the slots, or the ids."""
    _, ((_, F, D),), _, _, slots_shape, *_ = rest
    return prod(slots_shape) * (sum(2 * G * F * D for _, G, F, D in w_up_shapes) + 2 * F * D)


def mlp_backward_flops(needs: Sequence[bool], w_up_shapes: list[Sequence[int]], *rest: Any) -> int:
    """h again, dA, and as much as forward for each of what is needed: dX and the weight gradients."""
    needs_x, needs_w_up, _, needs_w_down, _ = needs
    _, ((_, F, D),), _, _, slots_shape, *_ = rest
    up, down = sum(2 * G * F * D for _, G, F, D in w_up_shapes), 2 * F * D
    return prod(slots_shape) * (up * (1 + needs_x + needs_w_up) + down * (1 + needs_w_down))


expert_mlp_backward = register_op(
    "expert_mlp_backward",
    f"(Tensor dout_TD, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    fake=_expert_mlp_backward_fake,
    cpu=cpu.expert_mlp_backward,
    kernel="experts.expert_mlp:launch_expert_mlp_backward",
    check=check_expert_mlp_backward,
    flops=lambda dout_shape, *args, **kwargs: mlp_flops(*args, **kwargs),
)
"""``expert_down_backward`` on an h that is computed here and overwritten with its gradient.

Returns:
    dh_NGF, dweights_TK and wa_NF as ``expert_down_backward`` returns them; with ``weight_on_input`` dweights is
    [0, K] and ``expert_up_backward`` has the gradient of the routing weights. Two runs agree bit for bit.
"""

expert_mlp = register_op(
    "expert_mlp",
    f"({ARGUMENTS}) -> Tensor",
    fake=_expert_mlp_fake,
    cpu=cpu.expert_mlp,
    kernel="experts.expert_mlp:launch_expert_mlp",
    check=check_expert_mlp,
    backward=expert_mlp_gradient,
    setup_context=setup_context,
    forward_mode=expert_mlp_forward_mode,
    autocast=(0, 1, 2, 3, 4),
    flops=mlp_flops,
)
"""``expert_up`` and ``expert_down`` in one, for which backward needs x and the routing but no pre-activation.

``out[t] = sum_k s[t, k] * (act(x[t] @ W_up[e]^T + b_up[e]) @ W_down[e] + b_down[e])``, or with ``weight_on_input``
``out[t] = sum_k act(s[t, k] * x[t] @ W_up[e]^T + b_up[e]) @ W_down[e] + b_down[e]``. Rounds where the two ops round:
output and gradients equal theirs bit for bit in eager code on CPU.

Args:
    x_TD: tokens. Shape [T, D], bf16, fp16, fp32, or fp64 on CPU; T may be 0.
    w_up, b_up: as for ``expert_up``. w_down, b_down: as for ``expert_down``.
    weights_TK: routing weights, fp32 or dtype of x, or None for 1.
    slots_N, offsets_E1, positions_TK, blocks_B2: from ``dispatch``.
    activation: a name in ``activations.ACTIVATIONS``, or ``identity`` for an ungated pair.
    weight_on_input: the routing weights scale an expert's input instead of its output.

Returns:
    out_TD in token order, dtype of x. No [N, G, F] buffer exists in forward; on CPU one of a block of experts, at most some
    hundred thousand numbers unless they are of one expert. Two runs agree bit for bit.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
