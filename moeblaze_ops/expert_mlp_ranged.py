"""``moeblaze::expert_mlp_ranged`` and its backward: ``expert_mlp`` with all gradients taken range of rows by range of rows.

What backward allocates beside its results is that of one range, see ``row_ranges``. A range of rows in expert order is a
routing of its own, with the same experts in fewer rows: the kernels are those of ``expert_mlp``. Of what is a sum over
rows, a range writes the gradient of every expert that begins in it and adds to that of the one it goes on with; the
gradient of x is added up in its own dtype.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext

from moeblaze_ops import cpu, cpu_gradients, cpu_routing
from moeblaze_ops.expert_mlp import ARGUMENTS, expert_mlp_gradient, mlp_flops, setup_context, split_groups
from moeblaze_ops.expert_mlp_chunked import as_given, gradient_buffers
from moeblaze_ops.experts_up import routing_gradient_like
from moeblaze_ops.joining import num_joined
from moeblaze_ops.library import register_op
from moeblaze_ops.row_ranges import RangeSizes, capped, range_sizes, routing_bytes, row_ranges
from moeblaze_ops.validation import check_expert_mlp, check_expert_mlp_backward, require
from moeblaze_ops.weights import up_shape

_ARGUMENTS = f"{ARGUMENTS}, int max_bytes"


class _Device(NamedTuple):
    """What a device computes of all rows or of a range of them."""

    range_routing: Callable
    expert_mlp_backward: Callable
    expert_up_backward_part: Callable
    expert_weight_grad: Callable
    expert_weight_grad_add: Callable
    expert_bias_grad: Callable
    expert_bias_grad_add: Callable


def _cpu() -> _Device:
    return _Device(
        cpu_routing.range_routing,
        cpu.expert_mlp_backward,
        cpu.expert_up_backward_part,
        cpu_gradients.expert_weight_grad,
        cpu_gradients.expert_weight_grad_add,
        cpu_gradients.expert_bias_grad,
        cpu_gradients.expert_bias_grad_add,
    )


@functools.cache
def _gpu() -> _Device:
    from moeblaze_ops.kernels.bias_grad import launch_expert_bias_grad, launch_expert_bias_grad_add
    from moeblaze_ops.kernels.expert_mlp import launch_expert_mlp_backward
    from moeblaze_ops.kernels.expert_up_backward import launch_expert_up_backward_part
    from moeblaze_ops.kernels.range_routing import launch_range_routing
    from moeblaze_ops.kernels.weight_grad import launch_expert_weight_grad, launch_expert_weight_grad_add

    return _Device(
        launch_range_routing,
        launch_expert_mlp_backward,
        launch_expert_up_backward_part,
        launch_expert_weight_grad,
        launch_expert_weight_grad_add,
        launch_expert_bias_grad,
        launch_expert_bias_grad_add,
    )


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


def forward_launcher():
    from moeblaze_ops.kernels.expert_mlp import launch_expert_mlp
    from moeblaze_ops.kernels.launch import size_hint

    def launch(*args) -> Tensor:
        _check("expert_mlp_ranged", *args)
        x_TD, w_up, *rest, max_bytes = args
        E, G, F, D = up_shape(w_up)
        sizes = range_sizes(D, F, E, x_TD.dtype, G == 2)
        num_rows = size_hint(args[6].shape[0])
        return launch_expert_mlp(x_TD, w_up, *rest, capped(sizes.forward_column_bytes(max_bytes, num_rows)))

    return launch


def _setup_context(ctx, inputs, output) -> None:
    *arguments, ctx.max_bytes = inputs
    setup_context(ctx, arguments, output)


def _gradient(ctx, dout_TD):
    none_for_the_rest = (None,) * 7
    if dout_TD is None:
        return None, *([None] * count for count in ctx.counts), None, *none_for_the_rest
    x_TD, weights_TK, *routing, parameters = *ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    groups = split_groups(parameters, ctx.counts)
    needs_x, *needs_groups, _ = ctx.needs_input_grad[:6]
    needs = [needs_x, *(any(group) for group in needs_groups)]
    num_experts = routing[1].shape[0] - 1
    column_bytes = _traced_column_bytes(groups[0], x_TD, routing[0].shape[0], num_experts, needs, ctx.max_bytes)
    if column_bytes is not None:
        return *expert_mlp_gradient(ctx, dout_TD, column_bytes), None
    buffers = gradient_buffers(groups, needs[1:], num_experts)
    arguments = (dout_TD, x_TD, *groups, weights_TK, *routing, ctx.activation, ctx.weight_on_input, ctx.max_bytes, needs)
    if any(buffers):
        dx_TD, dweights_TK, gradients = expert_mlp_ranged_backward_add(*arguments, buffers[0] or [], buffers[2] or [])
    else:
        dx_TD, dweights_TK, gradients = expert_mlp_ranged_backward(*arguments)
    wanted = [need and buffer is None for need, buffer in zip(needs[1:], buffers, strict=True)]
    dx_TD = dx_TD if needs_x else None
    dweights_TK = None if weights_TK is None else dweights_TK
    return dx_TD, *as_given(gradients, groups, wanted, num_experts), dweights_TK, *none_for_the_rest


def _traced_column_bytes(
    w_up: list[Tensor], x_TD: Tensor, num_rows: int, num_experts: int, needs: Sequence[bool], max_bytes: int
) -> int | None:
    """What the rows of dx may take in a graph where the ops of ``expert_mlp`` hold the limit, else None.

    Those are inlined in the code that Inductor generates, while a loop over ranges is called; eagerly one op is faster.
    """
    if TracingContext.try_get() is None or not isinstance(num_rows, int):
        return None
    _, G, F, D = w_up[0].shape
    gated = G == 2 or num_joined(w_up, num_experts) == 2
    sizes = range_sizes(D, F, num_experts, x_TD.dtype, gated, needs[1], needs[3])
    left = sizes.whole_column_bytes(max_bytes - routing_bytes(num_rows, num_experts), num_rows)
    return None if left is None else capped(left)


class _Range(NamedTuple):
    """A range of rows with its routing, ``fresh_E`` (1 for the experts whose rows begin in it, else 0) and ``order_E``.

    Experts are in order of their rows, most first. A single range has neither: all experts are fresh.
    """

    rows: range
    slots_N: Tensor
    offsets_E1: Tensor
    blocks_B2: Tensor
    fresh_E: Tensor | None = None
    order_E: Tensor | None = None


class _Backward:
    """The gradients of a layer while its ranges are gone through, each allocated when it is first needed."""

    def __init__(
        self,
        device: _Device,
        dout_TD: Tensor,
        x_TD: Tensor,
        parameters: Sequence[list[Tensor]],
        weights_TK: Tensor | None,
        routing: Sequence[Tensor],
        activation: str,
        weight_on_input: bool,
        needs: Sequence[bool],
        buffers: Sequence[list[Tensor]],
    ) -> None:
        self.device, self.dout_TD, self.x_TD = device, dout_TD.contiguous(), x_TD
        self.parameters, self.weights_TK = parameters, weights_TK
        self.slots_N, self.offsets_E1, self.positions_TK, self.blocks_B2 = routing
        self.top_k, self.num_experts = self.positions_TK.shape[1], self.offsets_E1.shape[0] - 1
        self.settings = activation, weight_on_input
        self.on_input, self.on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
        self.needs_x, self.needs_w_up, self.needs_b_up, self.needs_w_down, self.needs_b_down = needs
        self.added_up, self.added_down = buffers
        self.dw_up, self.dw_down = list(self.added_up), list(self.added_down)
        self.dx_TD = self.db_up_EC = None
        self.dweights_TK = routing_gradient_like(weights_TK, self.positions_TK)
        # Of weights on the input, each slot's gradient is a sum over columns: in fp32 until all ranges are done.
        sums = torch.promote_types(x_TD.dtype, torch.float32)
        self.dscale_TK = None if self.on_input is None else torch.zeros_like(self.dweights_TK, dtype=sums)

    @property
    def sizes(self) -> RangeSizes:
        E, G, F, D = up_shape(self.parameters[0])
        dw_up, dw_down = self.needs_w_up and not self.added_up, self.needs_w_down and not self.added_down
        return range_sizes(D, F, E, self.x_TD.dtype, G == 2, dw_up, dw_down)

    def parts(self, ranges: list[range]) -> Iterator[_Range]:
        """The ranges with their routing."""
        if len(ranges) == 1:
            yield _Range(ranges[0], self.slots_N, self.offsets_E1, self.blocks_B2)
            return
        for rows, routing in zip(ranges, self.device.range_routing(self.offsets_E1, ranges), strict=True):
            yield _Range(rows, self.slots_N[rows.start : rows.stop], *routing)

    def take(self, part: _Range, sizes: RangeSizes, limit: int) -> None:
        """The share of a range of rows in every gradient."""
        dh_NGF, _, wa_NF = self.device.expert_mlp_backward(
            self.dout_TD, self.x_TD, *self.parameters, self.weights_TK, *self._routing(part), *self.settings,
            self.dweights_TK, part.rows.start,
        )  # fmt: skip
        column_bytes = capped(sizes.column_bytes(limit, part.rows))
        if sizes.takes_down_last(part.rows):
            self._add_x(dh_NGF, part, column_bytes)
            self._add_up(dh_NGF, part)
            del dh_NGF
            self._add_w_down(wa_NF, part)
        else:
            self._add_w_down(wa_NF, part)
            del wa_NF
            self._add_x(dh_NGF, part, column_bytes)
            self._add_up(dh_NGF, part)

    def _routing(self, part: _Range) -> tuple[Tensor, ...]:
        return part.slots_N, part.offsets_E1, self.positions_TK, part.blocks_B2

    def _add_x(self, dh_NGF: Tensor, part: _Range, column_bytes: int) -> None:
        if not self.needs_x and self.on_input is None:
            return
        if self.dx_TD is None:
            self.dx_TD = torch.empty_like(self.x_TD, memory_format=torch.contiguous_format)
        x_or_none = None if self.on_input is None else self.x_TD
        dscale_TK = self.dweights_TK if self.dscale_TK is None else self.dscale_TK
        given = (dh_NGF, x_or_none, self.parameters[0], self.on_input, *self._routing(part))
        self.device.expert_up_backward_part(*given, self.dx_TD, dscale_TK, part.rows.start, column_bytes)

    def _add_up(self, dh_NGF: Tensor, part: _Range) -> None:
        if self.needs_b_up:
            dh_NC = dh_NGF.flatten(1)
            if self.db_up_EC is None:
                sums = torch.promote_types(dh_NC.dtype, torch.float32)
                self.db_up_EC = dh_NC.new_zeros((self.num_experts, dh_NC.shape[1]), dtype=sums)
            self.device.expert_bias_grad_add(dh_NC, self.db_up_EC, None, part.slots_N, part.offsets_E1, self.top_k, False)
        if self.needs_w_up:
            given = (self.x_TD, dh_NGF, self.parameters[0], self.on_input, part)
            self.dw_up = self._weight_grad(*given, self.dw_up, bool(self.added_up))

    def _add_w_down(self, wa_NF: Tensor, part: _Range) -> None:
        if self.needs_w_down:
            given = (self.dout_TD, wa_NF.unsqueeze(1), self.parameters[2], None, part)
            self.dw_down = self._weight_grad(*given, self.dw_down, bool(self.added_down))

    def _weight_grad(self, gathered_TD, grouped_NGF, weights, weights_TK, part: _Range, dw, is_added: bool) -> list[Tensor]:
        """The gradient of some weights so far, ``dw`` with the share of a range added to it."""
        slots = (part.slots_N, part.offsets_E1, self.top_k)
        if part.fresh_E is None and not is_added:
            return self.device.expert_weight_grad(gathered_TD, grouped_NGF, weights, weights_TK, *slots)
        dw = dw or [torch.empty_like(w) for w in weights]
        fresh_E = None if is_added else part.fresh_E
        self.device.expert_weight_grad_add(gathered_TD, grouped_NGF, dw, weights_TK, *slots, fresh_E, part.order_E)
        return dw

    def results(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """dx_TD, dweights_TK and the gradients of the parameters that are in no buffer."""
        gradients = [] if self.added_up else self.dw_up
        if self.needs_b_up:
            _, G, F, _ = up_shape(self.parameters[0])
            db_EGF = self.db_up_EC.to(self.x_TD.dtype).view(-1, G, F)
            gradients = gradients + [db.contiguous() for db in db_EGF.chunk(len(self.parameters[1]), dim=1)]
        gradients = gradients + ([] if self.added_down else self.dw_down)
        if self.needs_b_down:
            slots = (self.slots_N, self.offsets_E1, self.top_k)
            gradients = [*gradients, self.device.expert_bias_grad(self.dout_TD, self.on_output, *slots, True)]
        dx_TD = self.dx_TD if self.needs_x else self.x_TD.new_empty((0, self.x_TD.shape[1]))
        dweights_TK = self.dweights_TK if self.dscale_TK is None else self.dscale_TK.to(self.weights_TK.dtype)
        return dx_TD, dweights_TK, gradients


def _run(op: str, device: _Device, args: Sequence, buffers: Sequence[list[Tensor]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    *arguments, max_bytes, needs = args
    check_expert_mlp_backward(op, *arguments)
    dout_TD, x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, activation, weight_on_input = arguments
    parameters = (w_up, b_up, w_down, b_down)
    backward = _Backward(device, dout_TD, x_TD, parameters, weights_TK, routing, activation, weight_on_input, needs, buffers)
    N, E, sizes = backward.slots_N.shape[0], backward.num_experts, backward.sizes
    ranges = row_ranges(N, E, sizes, max_bytes)
    require(ranges is not None, op, "max_bytes", "leave room for 128 rows", max_bytes)
    for part in backward.parts(ranges):
        backward.take(part, sizes, max_bytes - routing_bytes(N, E))
    return backward.results()


def _backward_cpu(*args) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _run("expert_mlp_ranged_backward", _cpu(), args, ([], []))


def backward_launcher():
    return lambda *args: _run("expert_mlp_ranged_backward", _gpu(), args, ([], []))


def _backward_add_cpu(*args) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _run("expert_mlp_ranged_backward_add", _cpu(), args[:-2], args[-2:])


def _backward_add_launcher():
    return lambda *args: _run("expert_mlp_ranged_backward_add", _gpu(), args[:-2], args[-2:])


def _backward_fake(*args) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _fake_gradients("expert_mlp_ranged_backward", args, ([], []))


def _backward_add_fake(*args) -> tuple[Tensor, Tensor, list[Tensor]]:
    return _fake_gradients("expert_mlp_ranged_backward_add", args[:-2], args[-2:])


def _fake_gradients(op: str, args: Sequence, buffers: Sequence[list[Tensor]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    *arguments, _, needs = args
    check_expert_mlp_backward(op, *arguments)
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


def _backward_flops(dout_shape, x_shape, w_up_shapes, b_up, w_down_shapes, b_down, weights, slots_shape, *rest, **kwargs) -> int:
    """h again, dA, and as much as forward for each of what is needed: dX and the weight gradients."""
    needs_x, needs_w_up, _, needs_w_down, _ = rest[6]
    _, F, D = w_down_shapes[0]
    up, down = sum(2 * G * F * D for _, G, F, D in w_up_shapes), 2 * F * D
    return slots_shape[0] * (up * (1 + needs_x + needs_w_up) + down * (1 + needs_w_down))


expert_mlp_ranged_backward = register_op(
    "expert_mlp_ranged_backward",
    f"(Tensor dout_TD, {_ARGUMENTS}, bool[] needs) -> (Tensor, Tensor, Tensor[])",
    fake=_backward_fake,
    cpu=_backward_cpu,
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
    fake=_backward_add_fake,
    cpu=_backward_add_cpu,
    launcher=_backward_add_launcher,
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
