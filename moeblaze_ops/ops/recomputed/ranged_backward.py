"""The gradients of an expert layer, range of rows by range of rows.

A range of rows in expert order is a routing of its own, with the same experts in fewer rows: the kernels are those of
``expert_mlp``. Of what is a sum over rows, a range writes the gradient of every expert that begins in it and adds to that of
the one it goes on with; the gradient of x is added up in its own dtype.

The first range is of a fixed number of rows. While the device works on it, the host waits to learn where each expert's rows
begin, and plans the ranges behind it; in a CUDA graph, where it cannot, they are of a fixed number of rows, too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import require
from moeblaze_ops.arguments.weight_storage import up_shape
from moeblaze_ops.cpu import dispatch as cpu_routing
from moeblaze_ops.cpu import experts as cpu
from moeblaze_ops.cpu import weight_grad as cpu_gradients
from moeblaze_ops.memory.range_plan import Plan, Planner, padded
from moeblaze_ops.memory.row_ranges import capped, range_sizes, routing_bytes, row_ranges
from moeblaze_ops.ops.expert_up import routing_gradient_like


class Device(NamedTuple):
    """What a device computes of all rows or of a range of them.

    ``read``: starts to bring a small tensor to the host; what it returns gives the numbers, and None where that is impossible.
    """

    read: Callable[[Tensor], Callable[[], list[int] | None]]
    range_routing: Callable
    expert_mlp_backward: Callable
    expert_up_backward_part: Callable
    expert_weight_grad: Callable
    expert_weight_grad_add: Callable
    expert_bias_grad: Callable
    expert_bias_grad_add: Callable


def cpu_device() -> Device:
    return Device(
        lambda tensor: tensor.tolist,
        cpu_routing.range_routing,
        cpu.expert_mlp_backward,
        cpu.expert_up_backward_part,
        cpu_gradients.expert_weight_grad,
        cpu_gradients.expert_weight_grad_add,
        cpu_gradients.expert_bias_grad,
        cpu_gradients.expert_bias_grad_add,
    )


@functools.cache
def gpu_device() -> Device:
    from moeblaze_ops.kernels.experts.bias_grad import launch_expert_bias_grad, launch_expert_bias_grad_add
    from moeblaze_ops.kernels.experts.expert_mlp import launch_expert_mlp_backward
    from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward_part
    from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad, launch_expert_weight_grad_add
    from moeblaze_ops.kernels.routing.range_routing import launch_range_routing

    return Device(
        _read,
        launch_range_routing,
        launch_expert_mlp_backward,
        launch_expert_up_backward_part,
        launch_expert_weight_grad,
        launch_expert_weight_grad_add,
        launch_expert_bias_grad,
        launch_expert_bias_grad_add,
    )


def _read(tensor: Tensor) -> Callable[[], list[int] | None]:
    if not tensor.is_cuda:
        return tensor.tolist
    if torch.cuda.is_current_stream_capturing():
        return lambda: None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def numbers() -> list[int]:
        arrived.synchronize()
        return host.tolist()

    return numbers


class _Range(NamedTuple):
    """A range of rows with its routing, ``fresh_E`` (1 for the experts whose rows begin in it, else 0) and ``order_E1``.

    Experts are in order of their rows, most first, and behind them is how many have rows or are fresh. A single range has
    neither mark nor order: all experts are fresh. There may be more slots than rows, -1 each.
    """

    rows: range
    slots_N: Tensor
    offsets_E1: Tensor
    blocks_B2: Tensor
    fresh_E: Tensor | None = None
    order_E1: Tensor | None = None


class Backward:
    """The gradients of a layer while its ranges are gone through, each allocated when it is first needed."""

    def __init__(
        self,
        device: Device,
        dout_TD: Tensor,
        x_TD: Tensor,
        parameters: Sequence[list[Tensor]],
        weights_TK: Tensor | None,
        routing: Sequence[Tensor],
        activation: str,
        weight_on_input: bool,
        needs: Sequence[bool],
        buffers: Sequence[list[Tensor]],
        max_bytes: int,
    ) -> None:
        self.device, self.dout_TD, self.x_TD = device, dout_TD.contiguous(), x_TD
        self.parameters, self.weights_TK = parameters, weights_TK
        self.slots_N, self.offsets_E1, self.positions_TK, self.blocks_B2 = routing
        self.top_k, self.num_experts = self.positions_TK.shape[1], self.offsets_E1.shape[0] - 1
        self.settings = activation, weight_on_input
        self.on_input = weights_TK if weight_on_input else None
        self.on_output = None if weight_on_input else weights_TK
        self.needs_x, self.needs_w_up, self.needs_b_up, self.needs_w_down, self.needs_b_down = needs
        self.added_up, self.added_down = buffers
        self.dw_up, self.dw_down = list(self.added_up), list(self.added_down)
        self.dx_TD: Tensor | None = None
        self.db_up_EC: Tensor | None = None
        self.dweights_TK = routing_gradient_like(weights_TK, self.positions_TK)
        # Of weights on the input, each slot's gradient is a sum over columns: in fp32 until all ranges are done.
        sums = torch.promote_types(x_TD.dtype, torch.float32)
        self.dscale_TK = None if self.on_input is None else torch.zeros_like(self.dweights_TK, dtype=sums)
        E, G, F, D = up_shape(parameters[0])
        allocated = self.needs_w_up and not self.added_up, self.needs_w_down and not self.added_down
        self.sizes = range_sizes(D, F, E, x_TD.dtype, G == 2, *allocated)
        self.max_bytes, self.limit = max_bytes, max_bytes - routing_bytes(self.slots_N.shape[0], E)

    def ranges(self) -> list[range] | None:
        """Ranges of a fixed number of rows each, but for the first and the last one; None if no range fits."""
        return row_ranges(self.slots_N.shape[0], self.num_experts, self.sizes, self.max_bytes)

    def take_all(self) -> None:
        """All gradients from one range."""
        rows = range(self.slots_N.shape[0])
        part = _Range(rows, self.slots_N, self.offsets_E1, self.blocks_B2)
        self._take(part, self.sizes.column_bytes(self.limit, rows))

    def take(self, rows: range, is_last: bool) -> None:
        """The share of a range of rows in every gradient."""
        routing = self.device.range_routing(self.offsets_E1, rows, is_last)
        part = _Range(rows, self.slots_N[rows.start : rows.stop], *routing)
        self._take(part, self.sizes.column_bytes(self.limit, rows))

    def take_planned(self, plan: Plan, is_last: bool) -> None:
        """``take`` with dh and the activation where the plan has them."""
        rows, (_, G, F, _) = plan.rows, up_shape(self.parameters[0])
        slots_N = self.slots_N.new_full((len(padded(rows)),), -1)
        slots_N[: len(rows)] = self.slots_N[rows.start : rows.stop]
        part = _Range(rows, slots_N, *self.device.range_routing(self.offsets_E1, rows, is_last))
        shapes = (slots_N.shape[0], G, F), (slots_N.shape[0], F)
        dh_NGF, wa_NF = (
            None if place is None else place[: math.prod(shape)].view(shape)
            for place, shape in zip((plan.dh, plan.wa), shapes, strict=True)
        )
        self._take(part, plan.column_bytes(self.sizes, self.limit), dh_NGF, wa_NF)

    def planner(self, offsets: list[int], start: int) -> Planner:
        """What plans the ranges from ``start`` on. Rows of unused slots, which come last, are left out, but for one at most."""
        fresh = [*([] if self.added_up else self.dw_up), *([] if self.added_down else self.dw_down)]
        return Planner(offsets, fresh, self.sizes, self.limit, max(offsets[-1], start + 1))

    def _take(self, part: _Range, column_bytes: int, dh_NGF: Tensor | None = None, wa_NF: Tensor | None = None) -> None:
        dh_NGF, _, wa_NF = self.device.expert_mlp_backward(
            self.dout_TD, self.x_TD, *self.parameters, self.weights_TK, *self._routing(part), *self.settings,
            self.dweights_TK, part.rows.start, dh_NGF, wa_NF,
        )  # fmt: skip
        takes_down_last, keeps_rows = self.sizes.takes_down_last(part.rows), self.sizes.keeps_rows(self.limit, part.rows)
        if not takes_down_last:
            self._add_w_down(wa_NF, part)
            wa_NF = None
        # Where the last products of one gradient leave multiprocessors without work, those of the next one begin.
        sum_last = self._add_x(dh_NGF, part, capped(column_bytes), early=self.needs_w_down and not takes_down_last)
        if keeps_rows:
            self._add_up(dh_NGF, part, early=self.needs_x)
        sum_last()
        del sum_last
        if not keeps_rows:
            self._add_up(dh_NGF, part)
        del dh_NGF
        if takes_down_last:
            self._add_w_down(wa_NF, part)

    def _routing(self, part: _Range) -> tuple[Tensor, ...]:
        return part.slots_N, part.offsets_E1, self.positions_TK, part.blocks_B2

    def _add_x(self, dh_NGF: Tensor, part: _Range, column_bytes: int, early: bool) -> Callable[[], None]:
        """Adds to the gradient of x all but what a call of the result adds."""
        if not self.needs_x and self.on_input is None:
            return lambda: None
        if self.dx_TD is None:
            self.dx_TD = torch.empty_like(self.x_TD, memory_format=torch.contiguous_format)
        x_or_none = None if self.on_input is None else self.x_TD
        dscale_TK = self.dweights_TK if self.dscale_TK is None else self.dscale_TK
        given = (dh_NGF, x_or_none, self.parameters[0], self.on_input, *self._routing(part))
        return self.device.expert_up_backward_part(*given, self.dx_TD, dscale_TK, part.rows, column_bytes, early=early)

    def _add_up(self, dh_NGF: Tensor, part: _Range, early: bool = False) -> None:
        if self.needs_w_up:
            given = (self.x_TD, dh_NGF, self.parameters[0], self.on_input, part)
            self.dw_up = self._weight_grad(*given, self.dw_up, bool(self.added_up), early)
        if self.needs_b_up:
            dh_NC = dh_NGF.flatten(1)
            if self.db_up_EC is None:
                sums = torch.promote_types(dh_NC.dtype, torch.float32)
                self.db_up_EC = dh_NC.new_zeros((self.num_experts, dh_NC.shape[1]), dtype=sums)
            self.device.expert_bias_grad_add(dh_NC, self.db_up_EC, None, part.slots_N, part.offsets_E1, self.top_k, False)

    def _add_w_down(self, wa_NF: Tensor, part: _Range) -> None:
        if self.needs_w_down:
            given = (self.dout_TD, wa_NF.unsqueeze(1), self.parameters[2], None, part)
            self.dw_down = self._weight_grad(*given, self.dw_down, bool(self.added_down))

    def _weight_grad(
        self, gathered_TD, grouped_NGF, weights, weights_TK, part: _Range, dw, is_added: bool, early: bool = False
    ) -> list[Tensor]:
        """The gradient of some weights so far, ``dw`` with the share of a range added to it.

        ``early``: it may begin before the kernel launched last has ended.
        """
        slots = (part.slots_N, part.offsets_E1, self.top_k)
        if part.fresh_E is None and not is_added:
            return self.device.expert_weight_grad(gathered_TD, grouped_NGF, weights, weights_TK, *slots)
        dw = dw or [torch.empty_like(w) for w in weights]
        fresh_E = None if is_added else part.fresh_E
        self.device.expert_weight_grad_add(gathered_TD, grouped_NGF, dw, weights_TK, *slots, fresh_E, part.order_E1, early)
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


def gradients_in_ranges(op: str, backward: Backward) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients that ``expert_mlp_ranged_backward`` returns, those of some weights added to its buffers instead.

    Raises:
        ValueError: ``max_bytes`` leaves no room for 128 rows.
    """
    ranges = backward.ranges()
    require(ranges is not None, op, "max_bytes", "leave room for 128 rows", backward.max_bytes)
    first, *others = ranges
    if not others:
        backward.take_all()
        return backward.results()
    read_offsets = backward.device.read(backward.offsets_E1)
    backward.take(first, is_last=False)
    offsets = read_offsets()
    if offsets is None:
        for rows in others:
            backward.take(rows, is_last=rows is others[-1])
        return backward.results()
    start, planner = first.stop, backward.planner(offsets, first.stop)
    while start < planner.end:
        plan = planner.take(start)
        start = plan.rows.stop
        backward.take_planned(plan, is_last=start == planner.end)
    return backward.results()
