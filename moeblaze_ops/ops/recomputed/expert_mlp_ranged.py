"""``moeblaze::expert_mlp_ranged`` and its backward: ``expert_mlp`` with all gradients taken range of rows by range of rows.

What backward allocates beside its results is that of one range, see ``row_ranges`` and ``ranged_backward``.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._guards import TracingContext

from moeblaze_ops.arguments.separate_experts import num_joined
from moeblaze_ops.arguments.validation import check_expert_mlp, check_expert_mlp_backward, check_needs, require
from moeblaze_ops.arguments.validation_gradients import check_sums_like
from moeblaze_ops.arguments.weight_storage import up_shape
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.memory.row_ranges import capped, range_sizes, routing_bytes
from moeblaze_ops.ops.expert_up import routing_gradient_like
from moeblaze_ops.ops.recomputed.expert_mlp import (
    ARGUMENTS,
    expert_mlp_forward_mode,
    expert_mlp_gradient,
    mlp_backward_flops,
    mlp_flops,
    setup_context,
    split_groups,
)
from moeblaze_ops.ops.recomputed.expert_mlp_chunked import gradients_of
from moeblaze_ops.ops.recomputed.ranged_backward import Backward, Device, cpu_device, gpu_device, gradients_in_ranges
from moeblaze_ops.ops.register import register_op

_ARGUMENTS = f"{ARGUMENTS}, int max_bytes"
_NUM_GIVEN = 15
"""Arguments of backward in front of what gradients are added to."""


def _check(op: str, x_TD: Tensor, *rest) -> None:
    *arguments, max_bytes = rest
    check_expert_mlp(op, x_TD, *arguments)
    require(max_bytes >= 1, op, "max_bytes", "be at least 1", max_bytes)


def _fake(x_TD, w_up, b_up, w_down, *rest) -> Tensor:
    _check("expert_mlp_ranged", x_TD, w_up, b_up, w_down, *rest)
    return x_TD.new_empty((x_TD.shape[0], w_down[0].shape[2]))


def _forward_cpu(*args) -> Tensor:
    _check("expert_mlp_ranged", *args)
    return cpu.expert_mlp(*args[:-1])


def forward_launcher() -> Callable:
    from moeblaze_ops.kernels.experts.expert_mlp import launch_expert_mlp
    from moeblaze_ops.kernels.launch import size_hint

    def launch(*args) -> Tensor:
        _check("expert_mlp_ranged", *args)
        x_TD, w_up, *rest, max_bytes = args
        E, G, F, D = up_shape(w_up)
        sizes = range_sizes(D, F, E, x_TD.dtype, G == 2)
        column_bytes = capped(sizes.forward_column_bytes(max_bytes, size_hint(args[6].shape[0])))
        return launch_expert_mlp(x_TD, w_up, *rest, column_bytes)  # type: ignore[call-arg]

    return launch


def _setup_context(ctx, inputs, output) -> None:
    *arguments, ctx.max_bytes = inputs
    setup_context(ctx, arguments, output)


def _gradient(ctx, dout_TD):
    none_for_the_rest = (None,) * 7
    if dout_TD is None:
        return None, *([None] * count for count in ctx.counts), None, *none_for_the_rest
    x_TD, weights_TK, *routing = ctx.saved_tensors[:6]
    parameters = ctx.saved_tensors[6:]
    groups = split_groups(parameters, ctx.counts)
    num_experts = routing[1].shape[0] - 1
    needs_w = any(ctx.needs_input_grad[1]), any(ctx.needs_input_grad[3])
    column_bytes = _traced_column_bytes(groups[0], x_TD, routing[0].shape[0], num_experts, needs_w, ctx.max_bytes)
    if column_bytes is not None:
        return *expert_mlp_gradient(ctx, dout_TD, column_bytes), None
    layer = (weights_TK, *routing, ctx.activation, ctx.weight_on_input, ctx.max_bytes)

    def take(needs: list[bool], buffers: list[list[Tensor] | None]) -> tuple[Tensor, Tensor, list[Tensor]]:
        arguments = (dout_TD, x_TD, *groups, *layer, needs)
        if any(buffers):
            return expert_mlp_ranged_backward_add(*arguments, buffers[0] or [], buffers[2] or [])
        return expert_mlp_ranged_backward(*arguments)

    return *gradients_of(ctx, groups, num_experts, take), *none_for_the_rest


def _traced_column_bytes(
    w_up: list[Tensor], x_TD: Tensor, num_rows: int, num_experts: int, needs_w: tuple[bool, bool], max_bytes: int
) -> int | None:
    """What the rows of dx may take in a graph where the ops of ``expert_mlp`` hold the limit, else None.

    Those are inlined in the code that Inductor generates, while a loop over ranges is called; eagerly one op is faster.
    """
    if TracingContext.try_get() is None or not isinstance(num_rows, int):
        return None
    _, G, F, D = w_up[0].shape
    gated = G == 2 or num_joined(w_up, num_experts) == 2
    sizes = range_sizes(D, F, num_experts, x_TD.dtype, gated, *needs_w)
    left = sizes.whole_column_bytes(max_bytes - routing_bytes(num_rows, num_experts), num_rows)
    return None if left is None else capped(left)


def _checked(op: str, args: Sequence) -> tuple[Sequence, int, Sequence[bool], Sequence[list[Tensor]]]:
    """The arguments of ``expert_mlp_backward``, ``max_bytes``, ``needs``, and what gradients are added to."""
    *arguments, max_bytes, needs = args[:_NUM_GIVEN]
    buffers = args[_NUM_GIVEN:] or ([], [])
    check_expert_mlp_backward(op, *arguments)
    require(max_bytes >= 1, op, "max_bytes", "be at least 1", max_bytes)
    check_needs(op, needs)
    _, x_TD, w_up, _, w_down, *_ = arguments
    for name, sums, weights in (("dw_up", buffers[0], w_up), ("dw_down", buffers[1], w_down)):
        check_sums_like(op, name, sums, weights, x_TD)
    return arguments, max_bytes, needs, buffers


def _backward(op: str, device: Device, *args) -> tuple[Tensor, Tensor, list[Tensor]]:
    arguments, max_bytes, needs, buffers = _checked(op, args)
    dout_TD, x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, activation, weight_on_input = arguments
    settings = (activation, weight_on_input, needs, buffers, max_bytes)
    backward = Backward(device, dout_TD, x_TD, (w_up, b_up, w_down, b_down), weights_TK, routing, *settings)
    return gradients_in_ranges(op, backward)


def backward_launcher(op: str = "expert_mlp_ranged_backward") -> Callable:
    return lambda *args: _backward(op, gpu_device(), *args)


def _backward_fake(op: str, *args) -> tuple[Tensor, Tensor, list[Tensor]]:
    arguments, _, needs, buffers = _checked(op, args)
    _, x_TD, w_up, b_up, w_down, b_down, weights_TK, _, _, positions_TK, *_ = arguments
    needs_x, *needs_groups = needs
    added_up, added_down = map(bool, buffers)
    weights_alike, contiguous = torch.preserve_format, torch.contiguous_format
    forms = (weights_alike, contiguous, weights_alike, contiguous)
    groups = zip((w_up, b_up, w_down, b_down), needs_groups, (added_up, False, added_down, False), forms, strict=True)
    gradients = [
        torch.empty_like(parameter, memory_format=form)
        for group, is_needed, is_added, form in groups
        if is_needed and not is_added
        for parameter in group
    ]
    dx_TD = x_TD.new_empty((x_TD.shape[0] if needs_x else 0, x_TD.shape[1]))
    return dx_TD, routing_gradient_like(weights_TK, positions_TK), gradients


def _backward_flops(*shapes, **kwargs) -> int:
    return mlp_backward_flops(shapes[_NUM_GIVEN - 1], *shapes[2:])


expert_mlp_ranged_backward = register_op(
    "expert_mlp_ranged_backward",
    f"(Tensor dout_TD, {_ARGUMENTS}, bool[] needs) -> (Tensor, Tensor, Tensor[])",
    fake=partial(_backward_fake, "expert_mlp_ranged_backward"),
    cpu=lambda *args: _backward("expert_mlp_ranged_backward", cpu_device(), *args),
    launcher=backward_launcher,
    flops=_backward_flops,
    inline=False,
)
"""All gradients of ``expert_mlp_ranged``.

Args:
    dout_TD: gradient of the output. Shape [T, D].
    Others: as for ``expert_mlp_ranged``. needs: whether x, w_up, b_up, w_down and b_down want gradients.

Returns:
    dx_TD ([0, D] if not needed), dweights_TK (dtype of the weights, [0, K] fp32 without them), and one list with the gradients
    of w_up, b_up, w_down and b_down that are needed, in the parameters' shapes and dtype, with the weights' dense strides.
    Sums over the rows of a range are taken in fp32 (fp64 for fp64). The weight gradient of an expert is rounded once for
    each range that has rows of it, the gradient of a token's x once for each range that has rows of the token, at most K
    times; biases and routing weights once. Two runs agree bit for bit.
"""

expert_mlp_ranged_backward_add = register_op(
    "expert_mlp_ranged_backward_add",
    f"(Tensor dout_TD, {_ARGUMENTS}, bool[] needs, Tensor(a!)[] dw_up, Tensor(b!)[] dw_down) -> (Tensor, Tensor, Tensor[])",
    fake=partial(_backward_fake, "expert_mlp_ranged_backward_add"),
    cpu=lambda *args: _backward("expert_mlp_ranged_backward_add", cpu_device(), *args),
    launcher=partial(backward_launcher, "expert_mlp_ranged_backward_add"),
    flops=_backward_flops,
    inline=False,
)
"""``expert_mlp_ranged_backward`` with the gradients of some weights added to tensors, as ``expert_weight_grad_add`` does it.

Args:
    dw_up, dw_down: what is added to, in the form of the weights and their dtype or fp32; empty for gradients that are
        returned.
    Others: as for ``expert_mlp_ranged_backward``. Eager only, like all that ``accumulate_grad`` sets up.
"""

expert_mlp_ranged = register_op(
    "expert_mlp_ranged",
    f"({_ARGUMENTS}) -> Tensor",
    fake=_fake,
    cpu=_forward_cpu,
    launcher=forward_launcher,
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=lambda *args: expert_mlp_forward_mode(*args[:-1]),
    autocast=(0, 1, 2, 3, 4),
    flops=mlp_flops,
)
"""``expert_mlp`` whose backward allocates at most ``max_bytes`` beside its results.

Args:
    max_bytes: what backward may allocate beside the gradients. The routing and the experts' biases are small and not counted.
    Others: as for ``expert_mlp``.

Returns:
    out_TD as ``expert_mlp`` returns it. The gradients round where ranges of rows meet, see ``expert_mlp_ranged_backward``.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above, or backward finds no room for 128 rows.
"""
