"""``moeblaze::expert_mlp_chunked`` and its backward: ``expert_mlp`` on ranges of tokens, one after another.

Each range is dispatched on its own, so that no tensor but x, the output and their gradients grows with T: what a range
allocates is free again before the next one. Ranges are counted when the op runs, and one compiled graph serves every T.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.separate_experts import are_apart, num_joined, split_as_given
from moeblaze_ops.arguments.validation import check_expert_mlp_chunked, check_expert_mlp_chunked_backward, check_needs
from moeblaze_ops.memory.token_chunks import token_ranges
from moeblaze_ops.ops.accumulation import buffers_of
from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.expert_up import expert_up_backward, routing_gradient_like
from moeblaze_ops.ops.recomputed.expert_mlp import (
    expert_mlp,
    expert_mlp_backward,
    expert_mlp_forward_mode,
    mlp_backward_flops,
    mlp_flops,
    split_groups,
)
from moeblaze_ops.ops.register import register_op
from moeblaze_ops.ops.weight_grad import expert_bias_grad_add, expert_weight_grad_add

_ARGUMENTS = (
    "Tensor x_TD, Tensor[] w_up, Tensor[] b_up, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK, Tensor experts_TK,"
    " SymInt num_experts, int chunk_tokens, str activation, bool weight_on_input"
)


def _expert_mlp_chunked_fake(x_TD, w_up, b_up, w_down, *rest) -> Tensor:
    check_expert_mlp_chunked("expert_mlp_chunked", x_TD, w_up, b_up, w_down, *rest)
    return x_TD.new_empty((x_TD.shape[0], w_down[0].shape[2]))


def _expert_mlp_chunked(
    x_TD, w_up, b_up, w_down, b_down, weights_TK, experts_TK, num_experts, chunk_tokens, activation, weight_on_input
) -> Tensor:
    parameters = (w_up, b_up, w_down, b_down)
    rest = (weights_TK, experts_TK, num_experts, chunk_tokens, activation, weight_on_input)
    check_expert_mlp_chunked("expert_mlp_chunked", x_TD, *parameters, *rest)
    out_TD = x_TD.new_empty((x_TD.shape[0], w_down[0].shape[2]))
    for tokens in token_ranges(x_TD.shape[0], chunk_tokens):
        chunk = (x_TD[tokens], *parameters, _of(weights_TK, tokens), *dispatch(experts_TK[tokens], num_experts))
        out_TD[tokens] = expert_mlp(*chunk, activation, weight_on_input)
        del chunk
    return out_TD


def _setup_context(ctx, inputs, output) -> None:
    x_TD, w_up, b_up, w_down, b_down, weights_TK, experts_TK, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.counts = [len(tensors) for tensors in (w_up, b_up, w_down, b_down)]
    ctx.save_for_backward(x_TD, weights_TK, experts_TK, *w_up, *b_up, *w_down, *b_down)


def _gradient(ctx, dout_TD):
    none_for_the_rest = (None,) * 5
    if dout_TD is None:
        return None, *([None] * count for count in ctx.counts), None, *none_for_the_rest
    x_TD, weights_TK, experts_TK, *parameters = ctx.saved_tensors
    groups = split_groups(parameters, ctx.counts)
    routed = (weights_TK, experts_TK, *ctx.settings)

    def take(needs: list[bool], buffers: list[list[Tensor] | None]) -> tuple[Tensor, Tensor, list[Tensor]]:
        if not any(buffers):
            return expert_mlp_chunked_backward(dout_TD, x_TD, *groups, *routed, needs)
        sums = GradientSums(groups, needs[1:], buffers)
        return *_backward_in_chunks(sums, dout_TD, x_TD, groups, *routed, needs[0]), sums.rounded()

    return *gradients_of(ctx, groups, ctx.settings[0], take), *none_for_the_rest


def gradients_of(
    ctx: Any,
    groups: list[list[Tensor]],
    num_experts: int,
    take: Callable[[list[bool], list[list[Tensor] | None]], tuple[Tensor, Tensor, list[Tensor]]],
) -> tuple:
    """The gradients of x, of the groups of parameters and of the routing weights, each None where it is not needed.

    ``take(needs, buffers)`` computes them: of x and the groups those in ``needs``, of the groups those that are in no buffer.
    """
    needs_x, *needs_groups, needs_weights = ctx.needs_input_grad[:6]
    needs = list(map(any, needs_groups))
    buffers = _gradient_buffers(groups, needs, num_experts)
    dx_TD, dweights_TK, gradients = take([needs_x, *needs], buffers)
    wanted = [need and buffer is None for need, buffer in zip(needs, buffers, strict=True)]
    of_parameters = _as_given(gradients, groups, wanted, num_experts)
    return dx_TD if needs_x else None, *of_parameters, dweights_TK if needs_weights else None


def _gradient_buffers(groups: list[list[Tensor]], needs: list[bool], num_experts: int) -> list[list[Tensor] | None]:
    """What the gradients of w_up and w_down are added to, if ``accumulate_grad`` says so and no experts are stored apart."""
    if any(are_apart(group, num_experts) for group in groups):
        return [None] * len(groups)
    w_up, _, w_down, _ = (buffers_of(group, num_experts) if need else None for group, need in zip(groups, needs, strict=True))
    return [w_up, None, w_down, None]


def _as_given(gradients: list[Tensor], groups: list[list[Tensor]], needs: list[bool], num_experts: int) -> list[list]:
    """The gradients of each group of parameters, None for those that need none."""
    result, start = [], 0
    for group, need in zip(groups, needs, strict=True):
        end = start + (num_joined(group, num_experts) if need else 0)
        result.append(split_as_given(gradients[start:end], len(group)) if need else [None] * len(group))
        start = end
    return result


class GradientSums:
    """Sums of the gradients of w_up, b_up, w_down and b_down over chunks of tokens.

    Those of bf16 and fp16 parameters are taken in fp32 and rounded at the end: rounded after every chunk, a sum would stop
    to grow once a chunk adds less than half a unit in its last place.
    """

    def __init__(
        self,
        parameters: Sequence[list[Tensor]],
        needs: Sequence[bool],
        buffers: Sequence[list[Tensor] | None] = (None,) * 4,
    ) -> None:
        """Zeros for each of the four groups in ``needs``, an empty group otherwise, or buffers that are added to."""
        self.dtype = parameters[0][0].dtype
        sum_dtype = torch.promote_types(self.dtype, torch.float32)
        zeros = [
            [torch.zeros_like(p, dtype=sum_dtype) for p in group] if need and buffer is None else []
            for group, need, buffer in zip(parameters, needs, buffers, strict=True)
        ]
        # The columns of dh that belong to a bias are summed as one axis.
        zeros[1] = [b.contiguous() for b in zeros[1]]
        self.own = zeros
        self.w_up, self.b_up, self.w_down, self.b_down = (b or z for b, z in zip(buffers, zeros, strict=True))

    def rounded(self) -> list[Tensor]:
        """The gradients that are in no buffer, one group after another; each sum is freed before the next one is rounded."""
        sums = [s for group in self.own for s in group]
        self.own = []
        self.w_up = self.b_up = self.w_down = self.b_down = []
        for i in range(len(sums)):
            sums[i] = sums[i].to(self.dtype)
        return sums


def _add_chunk(
    sums: GradientSums, dout_TD, x_TD, parameters, weights_TK, experts_TK, num_experts, activation, weight_on_input, needs_x
) -> tuple[Tensor | None, Tensor]:
    """Backward of some tokens: their dx_TD if it is computed, and dweights_TK; the parameters' gradients go to ``sums``."""
    w_up = parameters[0]
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    routing = dispatch(experts_TK, num_experts)
    slots = (*routing[:2], experts_TK.shape[1])
    dh_NGF, dweights_TK, wa_NF = expert_mlp_backward(
        dout_TD, x_TD, *parameters, weights_TK, *routing, activation, weight_on_input
    )
    if sums.w_down:
        expert_weight_grad_add(dout_TD, wa_NF.unsqueeze(1), sums.w_down, None, *slots)
    del wa_NF
    for db_ED in sums.b_down:
        expert_bias_grad_add(dout_TD, db_ED, on_output, *slots, True)
    parts = dh_NGF.chunk(max(1, len(sums.b_up)), dim=1)
    for dh_part, db_EGF in zip(parts, sums.b_up, strict=False):
        expert_bias_grad_add(dh_part.flatten(1), db_EGF.flatten(1), None, *slots, False)
    if sums.w_up:
        expert_weight_grad_add(x_TD, dh_NGF, sums.w_up, on_input, *slots)
    if not needs_x and on_input is None:
        return None, dweights_TK
    dx_TD, dscale_TK = expert_up_backward(dh_NGF, None if on_input is None else x_TD, w_up, on_input, *routing)
    return dx_TD, dscale_TK if weight_on_input else dweights_TK


def _backward_in_chunks(
    sums: GradientSums, dout_TD, x_TD, parameters, weights_TK, experts_TK, num_experts, chunk_tokens, *layer
) -> tuple[Tensor, Tensor]:
    """dx_TD ([0, D] unless it is needed) and dweights_TK ([0, K] without weights); the other gradients go to ``sums``."""
    *_, needs_x = layer
    dx_TD = x_TD.new_empty((x_TD.shape[0] if needs_x else 0, x_TD.shape[1]))
    dweights_TK = routing_gradient_like(weights_TK, experts_TK)
    for tokens in token_ranges(x_TD.shape[0], chunk_tokens):
        # In a function, so that what one range allocates is gone when the next one allocates.
        routed = (_of(weights_TK, tokens), experts_TK[tokens], num_experts)
        dx_chunk, dweights_chunk = _add_chunk(sums, dout_TD[tokens].contiguous(), x_TD[tokens], parameters, *routed, *layer)
        if needs_x:
            dx_TD[tokens] = dx_chunk
        if weights_TK is not None:
            dweights_TK[tokens] = dweights_chunk
        del dx_chunk, dweights_chunk
    return dx_TD, dweights_TK


def _of(weights_TK: Tensor | None, tokens: slice) -> Tensor | None:
    return None if weights_TK is None else weights_TK[tokens]


def _forward_mode(x_TD, w_up, b_up, w_down, b_down, weights_TK, experts_TK, num_experts, chunk_tokens, *settings) -> Tensor:
    """All tokens at once: tangents of chunks would be as large as those of the whole."""
    return expert_mlp_forward_mode(x_TD, w_up, b_up, w_down, b_down, weights_TK, *dispatch(experts_TK, num_experts), *settings)


def _expert_mlp_chunked_backward_fake(dout_TD, x_TD, *rest) -> tuple[Tensor, Tensor, list[Tensor]]:
    *forward, needs = rest
    check_expert_mlp_chunked_backward("expert_mlp_chunked_backward", dout_TD, x_TD, *forward)
    check_needs("expert_mlp_chunked_backward", needs)
    *parameters, weights_TK, experts_TK = forward[:6]
    needs_x, *needs_groups = needs
    dx_TD = x_TD.new_empty((x_TD.shape[0] if needs_x else 0, x_TD.shape[1]))
    return dx_TD, routing_gradient_like(weights_TK, experts_TK), GradientSums(parameters, needs_groups).rounded()


def _expert_mlp_chunked_backward(dout_TD, x_TD, *rest) -> tuple[Tensor, Tensor, list[Tensor]]:
    *forward, needs = rest
    check_expert_mlp_chunked_backward("expert_mlp_chunked_backward", dout_TD, x_TD, *forward)
    check_needs("expert_mlp_chunked_backward", needs)
    parameters, (weights_TK, experts_TK, *settings) = forward[:4], forward[4:]
    needs_x, *needs_groups = needs
    sums = GradientSums(parameters, needs_groups)
    routed = (dout_TD, x_TD, parameters, weights_TK, experts_TK, *settings)
    return *_backward_in_chunks(sums, *routed, needs_x), sums.rounded()


expert_mlp_chunked_backward = register_op(
    "expert_mlp_chunked_backward",
    f"(Tensor dout_TD, {_ARGUMENTS}, bool[] needs) -> (Tensor, Tensor, Tensor[])",
    fake=_expert_mlp_chunked_backward_fake,
    cpu=_expert_mlp_chunked_backward,
    launcher=lambda: _expert_mlp_chunked_backward,
    flops=lambda dout_shape, x_shape, *rest, **kwargs: mlp_backward_flops(rest[-1], *rest),
    inline=False,
)
"""All gradients of ``expert_mlp_chunked``.

Args:
    dout_TD: gradient of the output. Shape [T, D].
    Others: as for ``expert_mlp_chunked``. needs: whether x, w_up, b_up, w_down and b_down want gradients.

Returns:
    dx_TD ([0, D] if not needed), dweights_TK (dtype of the weights, [0, K] fp32 without them), and one list with the gradients
    of w_up, b_up, w_down and b_down that are needed, in the parameters' shapes and dtype, with the weights' dense strides.
    Sums over all tokens are taken in fp32 (fp64 for fp64) and rounded once: for half precision that takes 4 bytes for every
    parameter until the last chunk is done. Two runs agree bit for bit.
"""

expert_mlp_chunked = register_op(
    "expert_mlp_chunked",
    f"({_ARGUMENTS}) -> Tensor",
    fake=_expert_mlp_chunked_fake,
    cpu=_expert_mlp_chunked,
    launcher=lambda: _expert_mlp_chunked,
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=_forward_mode,
    autocast=(0, 1, 2, 3, 4),
    flops=mlp_flops,
    inline=False,
)
"""``dispatch`` and ``expert_mlp`` on at most ``chunk_tokens`` tokens at a time; backward keeps x and the expert ids.

A token's output and the gradient of its x depend on no other token. They equal those of ``expert_mlp`` bit for bit where the
same tiles serve a chunk and the whole: always with the Hopper kernels, from about a hundred rows an expert with the portable
ones, and on CPU where ``torch.mm`` sums a row alike whatever the number of rows. Weight and bias gradients are summed chunk
by chunk and differ by the order of fp32 sums.

Args:
    x_TD, w_up, b_up, w_down, b_down, weights_TK, activation, weight_on_input: as for ``expert_mlp``.
    experts_TK: expert ids as for ``dispatch``. Shape [T, K], int32 or int64.
    num_experts: E.
    chunk_tokens: tokens in a chunk at most.

Returns:
    out_TD in token order, dtype of x.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above.
"""
