"""A layer whose experts are spread over ranks: tokens go to the experts, and what they computed comes back.

    rank r:   x [T, D]  --gather-->  x of all ranks [R*M, D]  --experts of r-->  sums [R*M, D]  --reduce-scatter-->  out [T, D]

T is this rank's own number of tokens, M is the same on every rank and no less than any T. Rows behind T have ids of -1.

Ids of foreign experts become -1 and cost nothing but their index: no routed copy of a token is made, and a token travels once to
each rank, not once to each expert. Backward gathers ``dout`` and reduces ``dx`` the same way. It gathers x again, beside the
product that comes first; the reduction of ``dx`` runs beside the weight gradients. Kept: x, routing indices, the routing weights
of all ranks and h.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.expert_down import expert_down_backward
from moeblaze_ops.ops.expert_up import expert_up_backward
from moeblaze_ops.ops.recomputed.expert_mlp import expert_mlp_backward, split_groups
from moeblaze_ops.ops.register import register_plain_op
from moeblaze_ops.ops.sharded.by_rank import (
    expert_down_backward_by_rank,
    expert_mlp_by_rank,
    expert_up_backward_by_rank,
    experts_at_once,
    goes_by_rank,
    is_long,
)
from moeblaze_ops.ops.sharded.collectives import Gathered, first_of_rank
from moeblaze_ops.ops.sharded.ways import same_way, way_of
from moeblaze_ops.ops.weight_grad import expert_bias_grad, expert_weight_grad, up_bias_gradients


class Ranks(NamedTuple):
    """Where the experts are, and how the layer runs there.

    ``members`` are the ranks of the process group ``group``. ``copies``: copy engines move what they exchange.
    ``exact``: the host reads how many rows arrived, and h is as long;
    otherwise it has room for all slots. ``keep``: what backward finds, "preactivation", "h8" or "input". ``hosts``: the names of
    ``hosts_of``, where tokens cross once to a host.
    """

    members: list[int]
    group: str
    copies: bool
    exact: bool
    keep: str
    hosts: Sequence[str] = ()

    @property
    def size(self) -> int:
        return len(self.members)


def experts_over_ranks(
    x_TD: Tensor,
    gathered: Gathered | None,
    weights_TK: Tensor | None,
    experts_TK: Tensor,
    w_up: list[Tensor],
    b_up: list[Tensor],
    w_down: list[Tensor],
    b_down: list[Tensor],
    activation: str,
    weight_on_input: bool,
    *ranks: Any,
) -> Tensor:
    """``moe`` of the tokens of this rank, with experts ``[r * E_local, (r + 1) * E_local)`` given on rank r.

    Args:
        x_TD: tokens of this rank. Shape [T, D]; T may be 0, and another one on each rank.
        gathered: what ``start_gather_of_tokens`` gives for x_TD. None: an all-to-all brings tokens to the ranks of their experts.
        weights_TK, experts_TK: routing weights (or None) and expert ids over all ranks, -1 for an unused slot.
        w_up, b_up, w_down, b_down: of this rank's experts, as ``expert_up`` and ``expert_down`` take them.
        activation, weight_on_input: as for ``expert_mlp``.
        ranks: the fields of a ``Ranks``.

    Returns:
        [T, D]. Gradients of the weights are sums over the tokens of all ranks. Two runs agree bit for bit if the reductions of
        the process group do.
    """
    counts = [len(tensors) for tensors in (w_up, b_up, w_down, b_down)]
    parameters = (*w_up, *b_up, *w_down, *b_down)
    return _Experts.apply(Ranks(*ranks), counts, activation, weight_on_input, experts_TK, gathered, x_TD, weights_TK, *parameters)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, counts, activation, weight_on_input, experts_TK, gathered, x_TD, weights_TK, *parameters):
        w_up, b_up, w_down, b_down = split_groups(list(parameters), counts)
        num_local = w_down[0].shape[0]
        moving, ids, all_weights_TK = way_of(
            experts_TK, weights_TK, gathered, x_TD, w_down[0], ranks.size, ranks.group, ranks.hosts, ranks.copies
        )
        (gathered_x,) = moving.start_out([x_TD]) if gathered is None else gathered[:1]
        local = ids - first_of_rank(ids, num_local, ranks.group, ranks.members)
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        slots_N, *rest = dispatch(local, num_local)
        routing = (moving.used(slots_N, rest[0]) if ranks.exact else slots_N, *rest)
        given = (w_up, b_up, w_down, b_down, all_weights_TK, *routing, activation, weight_on_input)
        by_columns = moving.copies and goes_by_rank(w_up, w_down, experts_TK.shape[1])
        by_rank = by_columns and ranks.keep != "h8" and is_long(x_TD, ranks.exact)
        if by_rank:
            keeps_h = ranks.keep != "input"
            h_NGF, sums = expert_mlp_by_rank(gathered_x, *given, keeps_h, ranks.size, ranks.group)
            h_NGF = h_NGF if keeps_h else None
        else:
            h_NGF, out = experts_at_once(ranks.keep, moving.arrived(gathered_x), *given)
            (sums,) = moving.start_back([out], by_columns)
        ctx.ranks, ctx.counts, ctx.settings, ctx.by_rank = ranks, counts, (activation, weight_on_input), by_rank
        route = moving.tensors()
        ctx.num_route = len(route)
        ctx.save_for_backward(x_TD, h_NGF, all_weights_TK, *routing, *route, *parameters)
        # No view of a longer tensor, though it is in its memory: others may write to the result.
        return torch.ops.aten._unsafe_view(moving.sums(sums), x_TD.shape)

    @staticmethod
    def backward(ctx, dout_TD):
        x_TD, h_NGF, all_weights_TK, *saved = ctx.saved_tensors
        routing, route, parameters = saved[:4], saved[4 : 4 + ctx.num_route], saved[4 + ctx.num_route :]
        needed = ctx.needs_input_grad
        needs = [needed[6], needed[7] and all_weights_TK is not None]
        needs += [any(group) for group in split_groups(list(needed[8:]), ctx.counts)]
        groups = split_groups(parameters, ctx.counts)
        gradients = experts_over_ranks_backward(
            dout_TD.contiguous(), x_TD, h_NGF, *groups, all_weights_TK, *routing, *ctx.settings, ctx.ranks.size,
            ctx.ranks.group, ctx.ranks.hosts, ctx.ranks.copies, ctx.by_rank, route, needs,
        )  # fmt: skip
        dx_TD, dweights_TK, *of_parameters = gradients
        filled: list[Tensor | None] = []
        for need, tensors in zip(needs[2:], groups, strict=True):
            filled += [of_parameters.pop(0) if need else None for _ in tensors]
        return (None,) * 6 + (dx_TD if needs[0] else None, dweights_TK if needs[1] else None, *filled)


def gradients_over_ranks(*args: Any) -> list[Tensor]:
    """What ``experts_over_ranks_backward`` computes, of its arguments."""
    from moeblaze_ops.kernels.multiprocessors import leaving_free

    with leaving_free(config.collective_multiprocessors or 0):
        return _gradients(*args)


def _gradients(
    dout_TD, x_TD, h_NGF, w_up, b_up, w_down, b_down, all_weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation,
    weight_on_input, ranks, group, hosts, copies, by_rank, route, needs,
):  # fmt: skip
    needs_x, needs_weights, needs_w_up, needs_b_up, needs_w_down, needs_b_down = needs
    on_input, on_output = (all_weights_TK, None) if weight_on_input else (None, all_weights_TK)
    top_k = positions_TK.shape[1]
    moving = same_way(list(route), positions_TK.shape[0], x_TD.shape[0], ranks, group, hosts, copies)
    needs_all_x = needs_w_up or h_NGF is None or on_input is not None
    offsets_E1 = moving.met(offsets_E1, w_down[0])
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    dout, *gathered = moving.start_out([dout_TD, x_TD] if needs_all_x else [dout_TD])
    all_x = moving.arrived(gathered[0]) if h_NGF is None or on_input is not None else None
    if h_NGF is not None and by_rank:
        dout, dh_NGF, dscale_TK, wa_NF = expert_down_backward_by_rank(
            dout, h_NGF, w_down, b_down, on_output, *routing, activation, ranks
        )
    elif h_NGF is None:
        dout = moving.arrived(dout)
        dh_NGF, dscale_TK, wa_NF = expert_mlp_backward(
            dout, all_x, w_up, b_up, w_down, b_down, all_weights_TK, *routing, activation, weight_on_input
        )
    else:
        dout = moving.arrived(dout)
        dh_NGF, dscale_TK, wa_NF = expert_down_backward(dout, h_NGF, w_down, b_down, on_output, *routing, activation)
    of_tokens: list[Tensor] = []
    if needs_x and on_input is None and by_rank:
        sums = expert_up_backward_by_rank(dh_NGF, w_up, *routing, [dscale_TK] if needs_weights else [], ranks, group)
    else:
        if needs_x or (needs_weights and weight_on_input):
            x_or_none = None if on_input is None else all_x
            dx, scale_TK = expert_up_backward(dh_NGF, x_or_none, w_up, on_input, *routing)
            dscale_TK = scale_TK if weight_on_input else dscale_TK
            of_tokens += [dx] if needs_x else []
        of_tokens += [dscale_TK] if needs_weights else []
        sums = moving.start_back(of_tokens) if of_tokens else []
    # Beside the sums.
    results: list[Tensor] = []
    if needs_w_up:
        all_x = moving.arrived(gathered[0]) if all_x is None else all_x
        results += expert_weight_grad(all_x, dh_NGF, w_up, on_input, slots_N, offsets_E1, top_k)
    if needs_b_up:
        results += up_bias_gradients(dh_NGF, slots_N, offsets_E1, top_k, len(b_up))
    if needs_w_down:
        results += expert_weight_grad(dout, wa_NF.unsqueeze(1), w_down, None, slots_N, offsets_E1, top_k)
    if needs_b_down:
        results.append(expert_bias_grad(dout, on_output, slots_N, offsets_E1, top_k, True))
    own = (moving.sums(each) for each in sums)
    reduced = [next(own) if need else x_TD.new_empty(0) for need in (needs_x, needs_weights)]
    return [*reduced, *results]


def _backward_fake(
    dout_TD, x_TD, h_NGF, w_up, b_up, w_down, b_down, all_weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation,
    weight_on_input, ranks, group, hosts, copies, by_rank, route, needs,
):  # fmt: skip
    needs_x, needs_weights, *needs_parameters = needs
    tokens, top_k = x_TD.shape[0], positions_TK.shape[1]
    results = [x_TD.new_empty(x_TD.shape) if needs_x else x_TD.new_empty(0)]
    results.append(all_weights_TK.new_empty((tokens, top_k)) if needs_weights else x_TD.new_empty(0))
    for need, tensors, strided in zip(needs_parameters, (w_up, b_up, w_down, b_down), (True, False) * 2, strict=True):
        if need:
            results += [torch.empty_like(t) if strided else t.new_empty(t.shape) for t in tensors]
    return results


experts_over_ranks_backward = register_plain_op(
    "experts_over_ranks_backward",
    "(Tensor dout_TD, Tensor x_TD, Tensor? h_NGF, Tensor[] w_up, Tensor[] b_up, Tensor[] w_down,"
    " Tensor[] b_down, Tensor? all_weights_TK, Tensor slots_N, Tensor offsets_E1, Tensor positions_TK, Tensor blocks_B2,"
    " str activation, bool weight_on_input, int ranks, str group, str[] hosts, bool copies, bool by_rank, Tensor[] route,"
    " bool[] needs) -> Tensor[]",
    gradients_over_ranks,
    _backward_fake,
)
"""All gradients of ``experts_over_ranks``, in one op: what travels and what is computed beside it keep their order.

Returns:
    dx [T, D] and dweights [T, K] of this rank's tokens, then one gradient for each parameter of the kinds that are needed
    (``needs``: x, weights, w_up, b_up, w_down, b_down); empty tensors for an x or weights without need.
"""
