"""The experts of a rank on tokens that copy engines bring, as these come, and sums that leave as they are computed.

    up              rows of this rank's tokens, then of one other rank's, of two, of four
    down            some columns of all sums; those of other ranks are fetched while the next columns are computed
    down backward   as up, on the gradients of the output
    up backward     sums that are written where other ranks fetch them, beside the weight gradients

The rows of some ranks are those of their tokens in the segments of all experts (``row_parts``), so what is computed stays in
expert order and has the bits of one launch for all.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import check_expert_down_backward, check_expert_mlp, check_expert_up_backward
from moeblaze_ops.arguments.weight_storage import up_shape
from moeblaze_ops.cpu import row_parts as cpu
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.expert_down import expert_down, expert_down_backward
from moeblaze_ops.ops.expert_up import expert_up_backward, routing_gradient_like, up_that_keeps
from moeblaze_ops.ops.recomputed.expert_mlp import expert_mlp
from moeblaze_ops.ops.register import register_plain_op
from moeblaze_ops.ops.sharded import peer_copies

LEAST_ROWS = 512
"""An expert has so many rows of each rank on average, or it takes all tokens at once: each part reads the weights once more."""
LEAST_BYTES_OF_HOST = 128 << 20
"""A rank's tokens have so many bytes, or a step waits for the host, which launches each part, unless a CUDA graph does that."""

_ROUTING = "Tensor slots_N, Tensor offsets_E1, Tensor positions_TK, Tensor blocks_B2"


def goes_by_rank(w_up: list[Tensor], w_down: list[Tensor], top_k: int) -> bool:
    """True if experts are stored in one tensor, tokens have several slots, and nothing is to be cast by autocast.

    Then sums leave by columns, and a rank may take tokens by rank, whatever others do.
    """
    is_stacked = len(w_down) == 1 and len(w_up) <= 2
    return is_stacked and top_k > 1 and not torch.is_autocast_enabled(w_down[0].device.type)


def is_long(x_TD: Tensor, exact: bool) -> bool:
    """True if what the ops here launch takes longer than to launch it, in a CUDA graph where the host reads no number of rows."""
    T, D = x_TD.shape
    tokens = T if isinstance(T, int) else T.node.hint or 0
    return tokens * D * x_TD.element_size() >= (LEAST_BYTES_OF_HOST if exact else peer_copies.LEAST_BYTES)


class _Device(NamedTuple):
    row_part: Callable
    expert_up: Callable
    expert_down: Callable
    expert_down_backward: Callable
    expert_up_backward: Callable


_CPU = _Device(cpu.row_part, cpu.expert_up, cpu.expert_down, cpu.expert_down_backward, cpu.expert_up_backward)


@functools.cache
def _gpu() -> _Device:
    from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
    from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward
    from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
    from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward_into
    from moeblaze_ops.kernels.rows.row_parts import launch_row_part

    of_rows = launch_expert_up, launch_expert_down, launch_expert_down_backward
    return _Device(launch_row_part, *of_rows, launch_expert_up_backward_into)


class _Tokens:
    """The tokens of all ranks, ``rows`` of each."""

    def __init__(self, like: Tensor, width: int, ranks: int, routing: tuple[Tensor, ...]) -> None:
        """Of tokens of some width, in the dtype and on the device of a tensor."""
        slots_N, offsets_E1, positions_TK, _ = routing
        T, top_k = positions_TK.shape
        self.device = _CPU if like.is_cpu else _gpu()
        self.rows = T // ranks
        rank_bytes = self.rows * width * like.element_size()
        is_captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
        self.at_once = rank_bytes < (peer_copies.LEAST_BYTES if is_captured else LEAST_BYTES_OF_HOST)
        self._slots, self._routing = self.rows * top_k, (slots_N, offsets_E1)
        self._in_parts = self._slots >= LEAST_ROWS * (offsets_E1.shape[0] - 1) * ranks

    def arriving(self, started: Tensor) -> tuple[Tensor, Iterator | None]:
        """The tokens, and the rows of some ranks once their tokens are there; None where all tokens are there."""
        if self.at_once or not self._in_parts:
            return peer_copies.arrived(started), None
        tokens_TD, arrivals = peer_copies.arriving(started)
        slots = (range(ranks.start * self._slots, ranks.stop * self._slots) for ranks in arrivals)
        return tokens_TD, (self.device.row_part(*self._routing, each) for each in slots)


def _expert_mlp(
    started, w_up, b_up, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation,
    weight_on_input, keep_h, ranks, group,
):  # fmt: skip
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    tokens = _Tokens(started, started.shape[1], ranks, routing)
    x_TD, parts = tokens.arriving(started)
    given = (x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, activation, weight_on_input)
    if tokens.at_once:
        h_NGF, out = experts_at_once("preactivation" if keep_h else "input", *given)
        (under_way,) = peer_copies.sum_parts([out], group, by_columns=True)
        return (_new_h(started, w_up, 0) if h_NGF is None else h_NGF), under_way
    check_expert_mlp("expert_mlp_by_rank", *given)
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    up = (x_TD, w_up, b_up, on_input, *routing, activation)
    h_NGF, a_NF = tokens.device.expert_up(*up, store_h=keep_h or activation == IDENTITY, parts=parts)
    shape = tokens.rows, w_down[0].shape[2]
    sums = peer_copies.SumByColumns(x_TD, shape, [], group)
    for columns in peer_copies.column_ranges(shape, x_TD.element_size()):
        part = columns.start, len(columns)
        weights = [w.narrow(2, *part) for w in w_down], [b.narrow(1, *part) for b in b_down]
        down = (h_NGF, a_NF, *weights, on_output, *routing, activation)
        tokens.device.expert_down(*down, column_sums=sums.columns(*part))
    return (h_NGF if keep_h else _new_h(started, w_up, 0)), sums.started[0]


def experts_at_once(keep: str, *args: Any) -> tuple[Tensor | None, Tensor]:
    """What is kept of h, see ``Ranks``, and ``expert_mlp`` of its arguments."""
    if keep == "input":
        return None, call(expert_mlp, *args)
    x_TD, w_up, b_up, w_down, b_down, weights_TK, *routing, activation, weight_on_input = args
    on_input, on_output = (weights_TK, None) if weight_on_input else (None, weights_TK)
    h_NGF, a_NF, *h8_NGB = call(up_that_keeps(keep, activation), x_TD, w_up, b_up, on_input, *routing, activation)
    out = call(expert_down, h_NGF, a_NF, w_down, b_down, on_output, *routing, activation)
    return (h8_NGB[0] if h8_NGB else h_NGF), out


def _new_h(like: Tensor, w_up: list[Tensor], num_rows: Any) -> Tensor:
    shape = up_shape(w_up)
    return like.new_empty((num_rows, shape.G, shape.F))


def _expert_mlp_fake(
    started, w_up, b_up, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation,
    weight_on_input, keep_h, ranks, group,
):  # fmt: skip
    h_NGF = _new_h(started, w_up, slots_N.shape[0] if keep_h else 0)
    return h_NGF, started.new_empty((started.shape[0] // ranks, w_down[0].shape[2], 0))


def _expert_down_backward(
    started, h_NGF, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation, ranks
):
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    tokens = _Tokens(started, started.shape[1], ranks, routing)
    dout_TD, parts = tokens.arriving(started)
    given = (dout_TD, h_NGF, w_down, b_down, weights_TK, *routing, activation)
    if tokens.at_once:
        return dout_TD, *call(expert_down_backward, *given)
    check_expert_down_backward("expert_down_backward_by_rank", *given)
    return dout_TD, *tokens.device.expert_down_backward(*given, parts=parts)


def _expert_down_backward_fake(
    started, h_NGF, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation, ranks
):
    N, G, F = h_NGF.shape
    dout_TD, dweights_TK = started.new_empty(started.shape[:-1]), routing_gradient_like(weights_TK, positions_TK)
    return dout_TD, h_NGF.new_empty((N, G, F)), dweights_TK, h_NGF.new_empty((N, F))


def _expert_up_backward(dh_NGF, w_up, slots_N, offsets_E1, positions_TK, blocks_B2, whole, ranks, group):
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    width = up_shape(w_up).D
    tokens = _Tokens(dh_NGF, width, ranks, routing)
    if tokens.at_once:
        dx_TD, _ = call(expert_up_backward, dh_NGF, None, w_up, None, *routing)
        return peer_copies.sum_parts([dx_TD, *whole], group)
    check_expert_up_backward("expert_up_backward_by_rank", dh_NGF, None, w_up, None, *routing)
    sums = peer_copies.SumByColumns(dh_NGF, (tokens.rows, width), whole, group)
    # What is sent has the products of the weight gradients to run beside: all columns at once.
    tokens.device.expert_up_backward(dh_NGF, w_up, *routing, sums.columns(0, width))
    return sums.started


def _expert_up_backward_fake(dh_NGF, w_up, slots_N, offsets_E1, positions_TK, blocks_B2, whole, ranks, group):
    rows = positions_TK.shape[0] // ranks
    others = [tensor.new_empty(tensor.shape[0] // ranks, *tensor.shape[1:], 0) for tensor in whole]
    return [dh_NGF.new_empty((rows, up_shape(w_up).D, 0)), *others]


expert_mlp_by_rank = register_plain_op(
    "expert_mlp_by_rank",
    "(Tensor started, Tensor[] w_up, Tensor[] b_up, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK,"
    f" {_ROUTING}, str activation, bool weight_on_input, bool keep_h, int ranks, str group) -> (Tensor, Tensor)",
    _expert_mlp,
    _expert_mlp_fake,
    launches=True,
)
"""``expert_mlp`` of tokens that ``gather_rows`` started to gather: h_NGF, or one without rows, and what ``arrived`` takes.

That gives the rows of this rank of the sum over the ranks. Experts are not stored apart.
"""

expert_down_backward_by_rank = register_plain_op(
    "expert_down_backward_by_rank",
    f"(Tensor started, Tensor h_NGF, Tensor[] w_down, Tensor[] b_down, Tensor? weights_TK, {_ROUTING},"
    " str activation, int ranks) -> (Tensor, Tensor, Tensor, Tensor)",
    _expert_down_backward,
    _expert_down_backward_fake,
    launches=True,
)
"""``expert_down_backward`` of gradients that ``gather_rows`` started to gather: these, and what it returns."""

expert_up_backward_by_rank = register_plain_op(
    "expert_up_backward_by_rank",
    f"(Tensor dh_NGF, Tensor[] w_up, {_ROUTING}, Tensor[] whole, int ranks, str group) -> Tensor[]",
    _expert_up_backward,
    _expert_up_backward_fake,
    launches=True,
)
"""What ``arrived`` takes for the sums over the ranks of ``expert_up_backward``'s dx, and of other tensors as by ``sum_parts``."""
