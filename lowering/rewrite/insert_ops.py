"""The operators that take the place of a matched layer, and how they get its operands."""

import operator
from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import moeblaze_ops.ops.dispatch
import moeblaze_ops.ops.expert_down
import moeblaze_ops.ops.expert_up
import moeblaze_ops.ops.recomputed.expert_mlp
import moeblaze_ops.ops.recomputed.expert_mlp_chunked
import moeblaze_ops.ops.recomputed.expert_mlp_ranged
import moeblaze_ops.ops.route
import moeblaze_ops.ops.route_at  # noqa: F401
from moeblaze_ops import config
from moeblaze_ops.kernels.formulas.named import IDENTITY, is_gated
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.stored_numbers import is_integral
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.find_scales import Scale
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.rewrite.dropout import dropped_activation, insert_seed, sum_of_dropped
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.rewrite.low_rank import describe_ranks, low_rank_of_down, low_rank_of_up
from moeblaze_ops.lowering.rewrite.sharded import insert_moved_tokens, may_move
from moeblaze_ops.lowering.rewrite.zero_computation import (
    describe_missing,
    describe_zero_computation,
    numbered,
    with_zero_computation,
)
from moeblaze_ops.lowering.router.match_router import RouterMatch
from moeblaze_ops.lowering.torch_internals.graphs import repeat_in_backward
from moeblaze_ops.lowering.torch_internals.inductor import inductor_config
from moeblaze_ops.memory.estimate import LayerSizes, choose_keep
from moeblaze_ops.memory.row_ranges import choose_parts
from moeblaze_ops.ops.expert_up import up_that_keeps

_ops = torch.ops.moeblaze


def insert_layer_ops(insert: Inserter, match: MoEMatch, router: RouterMatch | None) -> tuple[fx.Node, str]:
    """Insert what computes a matched layer from its operands; returns its result, a row a token, and what it became."""
    x_TD = insert.rows(match.x, match.D)
    weights_TK, ids_TK = _routing_operands(insert, match, router) if match.experts else _of_all_experts(insert, match, x_TD)
    for scale in match.scales:
        if not scale.is_mask:
            scale_TK = _scale(insert, match, scale, ids_TK)
            weights_TK = scale_TK if weights_TK is None else insert.call(torch.mul, weights_TK, scale_TK)
    if match.kept is not None:
        ids_TK = _without_dropped(insert, match, ids_TK)
    for mask in (scale for scale in match.scales if scale.is_mask):
        masked = insert.call(torch.ne if mask.is_negated else torch.eq, insert.rows(mask.operand, mask.width), 0)
        ids_TK = insert.call("masked_fill", ids_TK, masked, _no_expert(match))
    experts_TK = numbered(insert, match.numbers, ids_TK) if match.numbers else ids_TK
    out, became = _insert_layer(insert, match, x_TD, weights_TK, experts_TK)
    if match.zero_computation:
        out = with_zero_computation(insert, match, out, weights_TK, ids_TK)
        became += f" -> {describe_zero_computation(match)}"
    became += describe_missing(match)
    return insert.in_dtype(out, fake_of(match.region.carriers[0]).dtype), became


def _of_all_experts(insert: Inserter, match: MoEMatch, x_TD: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """Weights and ids, ``[T, E]``, of tokens that may go to every expert; -1 where an expert does not name a token itself."""
    device = fake_of(x_TD).device
    num_tokens = fake_of(x_TD).shape[0] if isinstance(match.T, int) else insert.call("size", x_TD, 0)
    ids_TE = insert.call("expand", insert.call(torch.arange, match.E, device=device), num_tokens, match.E)
    weights_TE = None if match.weights is None else insert.rows(match.weights, match.E)
    if match.named is None:
        return weights_TE, ids_TE
    tokens_CE = insert.places(match.named.tokens)
    B = match.named.sequences
    shape = (num_tokens, match.E) if B == 1 else (B, num_tokens // B, match.E)

    def of_all(named: fx.Node) -> fx.Node:
        return named if B == 1 else insert.call("reshape", named, (-1, match.E))

    named = insert.call(torch.zeros, shape, dtype=torch.bool, device=device)
    named_TE = of_all(insert.call("scatter", named, -2, tokens_CE, True))
    ids_TE = insert.call(torch.where, named_TE, ids_TE, -1)
    if (weights := match.named.weights) is not None:
        none = insert.call(torch.zeros, shape, dtype=weights.dtype, device=device)
        placed_TE = of_all(insert.call("scatter_add", none, -2, tokens_CE, insert.places(weights)))
        weights_TE = placed_TE if weights_TE is None else insert.call(torch.mul, placed_TE, weights_TE)
    return weights_TE, ids_TE


def _scale(insert: Inserter, match: MoEMatch, scale: Scale, ids_TK: fx.Node) -> fx.Node:
    """What the weight of each slot is multiplied by, ``[T, K]``."""
    if scale.width is not None:
        return insert.call("expand", insert.rows(scale.operand, scale.width), -1, match.K)
    numbers = insert.numbers(scale.operand)
    if fake_of(numbers).numel() == 1:
        return insert.call("expand_as", numbers, ids_TK)
    numbers_TK = insert.call("clamp", ids_TK, 0, match.E - 1)  # an id may be no expert's
    return insert.call(operator.getitem, numbers, numbers_TK)


def _without_dropped(insert: Inserter, match: MoEMatch, ids_TK: fx.Node) -> fx.Node:
    """Ids of no expert for those whose expert has no room for the token."""
    index = insert.in_dtype(ids_TK, torch.int64)
    kept = insert.rows(match.kept, match.E, match.K)
    if match.kept.of_slots:
        kept_TK = insert.call("squeeze", insert.call("gather", kept, 2, insert.call("unsqueeze", index, 2)), 2)
    else:
        kept_TK = insert.call("gather", kept, 1, index)
    return insert.call("masked_fill", ids_TK, insert.call(torch.eq, kept_TK, 0), _no_expert(match))


def _no_expert(match: MoEMatch) -> int:
    """An id below those of all experts."""
    return min((0, *match.numbers, *(number for own in match.zero_computation for number in own.numbers))) - 1


def _insert_layer(
    insert: Inserter, match: MoEMatch, x_TD: fx.Node, weights_TK: fx.Node | None, experts_TK: fx.Node
) -> tuple[fx.Node, str]:
    moving = may_move(match, x_TD, experts_TK)
    if moving is None or not moving.tokens:
        out, became = _insert_whole(insert, match, x_TD, weights_TK, experts_TK)
        return out, became if moving is None else f"{became}: {moving.describe()}"
    out = insert_moved_tokens(insert, match, moving, x_TD, weights_TK, experts_TK)
    return out, f"experts_over_ranks({match.activation}): {moving.describe()}"


def _insert_whole(
    insert: Inserter, match: MoEMatch, x_TD: fx.Node, weights_TK: fx.Node | None, experts_TK: fx.Node
) -> tuple[fx.Node, str]:
    """Insert a layer whose experts are all here."""
    w_up, b_up = insert.weights(match.w_up), insert.weights(match.b_up)
    w_down = insert.weights([match.w_down])
    b_down = insert.weights([match.b_down] if match.b_down is not None else [])
    keep = _keep(match, fake_of(x_TD))
    is_plain = match.out_width == match.D and not (match.has_low_rank or match.parameters or any(match.dropout))
    parameters, settings = (w_up, b_up, w_down, b_down, weights_TK), (match.activation, match.weights_on_input)
    parts, size = _parts(match, fake_of(x_TD)) if keep == "input" and is_plain else (None, 0)
    if parts == "chunks":
        chunked = (x_TD, *parameters, experts_TK, match.E, size, *settings)
        return insert.call(_ops.expert_mlp_chunked.default, *chunked), f"expert_mlp_chunked({match.activation})"
    routing = insert.items(insert.call(_ops.dispatch.default, experts_TK, match.E), 4)
    if match.named is not None and (num_rows := _named_rows(match)) is not None:
        routing[0] = insert.call("narrow", routing[0], 0, 0, num_rows)
    elif match.experts is None and parts != "ranges" and _counts_rows(match):
        routing[0] = insert.of_data(_ops.used_slots.default, *routing[:2])
    if parts == "ranges":
        out = insert.call(_ops.expert_mlp_ranged.default, x_TD, *parameters, *routing, *settings, size)
        return out, f"expert_mlp_ranged({match.activation})"
    if parts == "whole":
        return insert.call(_ops.expert_mlp.default, x_TD, *parameters, *routing, *settings), f"expert_mlp({match.activation})"
    up_weights, down_weights = (weights_TK, None) if match.weights_on_input else (None, weights_TK)
    up_rank, down_rank = describe_ranks(match)
    between, behind = match.dropout
    exact = any(match.dropout) and inductor_config.fallback_random
    prove(not exact, Reason.EFFECT, "its dropout would draw other numbers than eager's, which verify and fallback_random ask for")
    activation = dropped_activation(match) if between else match.activation
    up_op = up_that_keeps(keep, activation)
    up_name = up_op.overloadpacket.__name__
    became = f"{up_name}({match.activation}{up_rank and ', '}{up_rank}) -> expert_down{down_rank and f'({down_rank})'}"
    learned = _parameters(insert, match, fake_of(x_TD).device)
    low_rank = low_rank_of_up(insert, match, x_TD, routing)
    up_operands = (x_TD, w_up, b_up, up_weights, *routing, activation, *_with_parameters(low_rank, learned))
    up = insert.call(up_op, *up_operands)
    if keep == "input" and torch.is_grad_enabled():
        repeat_in_backward(up)
        became += ", up again in backward"
    h_NGF, a_NF, *h8_NGB = insert.items(up, len(up_op._schema.returns))
    if between:
        became = became.replace(" -> ", f" -> dropout({between}) -> ", 1)
    if activation == IDENTITY:
        a_NF = None
    low_rank = low_rank_of_down(insert, match, h_NGF if activation == IDENTITY else a_NF, routing)
    optional = _with_parameters(low_rank, learned)
    if h8_NGB:
        optional = (*optional, *[None] * (4 - len(optional)), *h8_NGB)
    if behind:  # a sum over one slot: the rows of all slots
        routing[2] = insert.call("reshape", routing[2], (-1, 1))
        down_weights = None if down_weights is None else insert.call("reshape", down_weights, (-1, 1))
    operands = (h_NGF, a_NF, w_down, b_down, down_weights, *routing, activation, *optional)
    out = insert.call(_ops.expert_down.default, *operands)
    if behind:
        out, became = sum_of_dropped(insert, match, out), f"{became} -> dropout({behind})"
    return out, became


def _with_parameters(low_rank: tuple[fx.Node, ...], params_EP: fx.Node | None) -> tuple[fx.Node | None, ...]:
    """The last arguments of both ops, as far as they are given."""
    return low_rank if params_EP is None else (*(low_rank or (None, None, None)), params_EP)


def _parameters(insert: Inserter, match: MoEMatch, device: torch.device) -> fx.Node | None:
    """``params_EP`` of both ops, where the activation reads parameters or drops elements."""
    columns = [insert.numbers(operand) for operand in match.parameters]
    if match.dropout[0]:
        columns.append(insert_seed(insert, match, device))
    if not columns:
        return None
    columns = [node if fake_of(node).shape[0] == match.E else insert.call("expand", node, match.E) for node in columns]
    return insert.call(torch.stack, columns, 1)


def _named_rows(match: MoEMatch) -> int | None:
    """How many rows experts can have that name their tokens, where that is known and less than a row for every slot."""
    B, sizes = match.named.sequences, (match.named.C, match.T)
    return B * match.E * min(sizes[0], sizes[1] // B) if all(isinstance(size, int) for size in sizes) else None


def _counts_rows(match: MoEMatch) -> bool:
    """True if the program as written reads on the host how many rows its experts have.

    for e in range(E): (token,) = torch.where(gate[:, e] > 0)        # it does; the layer reads it once for all of them
    torch.einsum("etd,te->td", experts(x), gate)                     # it does not, and has a row for each token and expert
    """
    return any(free_unbacked_symbols(fake_of(node)) for node in match.region.nodes if isinstance(fake_of(node), torch.Tensor))


def _keep(match: MoEMatch, x_TD: torch.Tensor) -> str:
    """What of the layer is kept for backward, as ``moe`` decides it for ``config.keep``: "input" where there is no backward."""
    if not torch.is_grad_enabled():
        return "input"
    if config.keep != "auto":
        return config.keep
    if free_unbacked_symbols(x_TD):
        return "preactivation"
    gated = is_gated(match.activation)
    sizes = LayerSizes(D=max(match.D, match.out_width), F=match.F, E=match.E, K=match.K, dtype=match.dtype, gated=gated)
    return choose_keep(x_TD.shape[0], sizes, x_TD.device, compiled=True)


def _parts(match: MoEMatch, x_TD: torch.Tensor) -> tuple[str, int]:
    """How the layer goes through its tokens, as ``moe`` decides it: a symbolic T gets a guard on the limit's side.

    As a whole for a T that depends on data, about which nothing can be guarded.
    """
    if free_unbacked_symbols(x_TD):
        return "whole", 0
    gated = is_gated(match.activation)
    return choose_parts(x_TD.shape[0], match.D, match.F, match.E, match.K, match.dtype, gated, x_TD.device)


def _routing_operands(insert: Inserter, match: MoEMatch, router: RouterMatch | None) -> tuple[fx.Node | None, fx.Node]:
    """Routing weights and expert ids: those of the graph, or of the fused router in its place."""
    if router is None or router.given is not None:
        experts_TK = insert.rows(_ids(match), match.K)
        if match.subscripts:
            numbers_E = insert.call(torch.arange, match.E, device=fake_of(experts_TK).device)
            experts_TK = insert.call(operator.getitem, numbers_E, experts_TK)
        if router is not None and router.given is not None:
            return _fused_weights(insert, match, _weights_at(insert, router, router.given)), experts_TK
        if match.weights is None:
            return None, experts_TK
        if not match.weights.gathered:
            return insert.rows(match.weights, match.K), experts_TK
        ids_TK = insert.in_dtype(experts_TK, torch.int64)
        return insert.call("gather", insert.rows(match.weights, match.E), 1, ids_TK), experts_TK
    at = insert if router.shared is None else insert.at(router.last_source)
    weights_TK, experts_TK = _route(at, match, router)
    if router.shared is not None:
        _share(at, router.shared, experts_TK, match)
    return _fused_weights(insert, match, weights_TK), experts_TK


def _route(insert: Inserter, match: MoEMatch, router: RouterMatch) -> list[fx.Node]:
    choice, bias_E = router.choice, router.choice.bias
    logits_TE = _logits(insert, router)
    if bias_E is not None and fake_of(bias_E).dtype not in (torch.float32, fake_of(router.logits).dtype):
        bias_E = insert.call("to", bias_E, torch.float32)
    options = (router.scoring, router.renormalize, router.scale, choice.num_groups, choice.top_groups)
    return insert.items(insert.call(_ops.route.default, logits_TE, bias_E, match.K, *options), 2)


def _share(insert: Inserter, chosen: fx.Node, experts_TK: fx.Node, match: MoEMatch) -> None:
    """Let others read the ids of the fused router in place of those that were chosen, as these were shaped."""
    fake = fake_of(chosen)
    ids = insert.call("to", experts_TK, fake.dtype)
    ids = ids if fake.dim() == 2 else insert.call("reshape", ids, tuple(fake.shape))
    region = set(match.region.nodes)
    if readers := [reader for reader in chosen.users if reader not in region]:
        insert.edits.redirect(readers, chosen, ids)


def _weights_at(insert: Inserter, router: RouterMatch, ids: fx.Node) -> fx.Node:
    ids_TK = ids if fake_of(ids).dim() == 2 else insert.call("reshape", ids, (-1, fake_of(ids).shape[-1]))
    return insert.call(_ops.route_at.default, _logits(insert, router), ids_TK, router.scoring, router.renormalize, router.scale)


def _logits(insert: Inserter, router: RouterMatch) -> fx.Node:
    logits = fake_of(router.logits)
    return insert.rows(Operand(router.logits, logits.dtype), logits.shape[-1])


def _fused_weights(insert: Inserter, match: MoEMatch, weights_TK: fx.Node) -> fx.Node:
    """What a fused router gives, in the dtypes that it is rounded to, and times a factor."""
    for dtype in (fake_of(match.weights.node).dtype, match.weights.dtype):
        weights_TK = insert.in_dtype(weights_TK, dtype)
    return insert.times(weights_TK, match.weights.factor)


def _ids(match: MoEMatch) -> Operand:
    """The expert ids in a dtype that the ops take, where they are integers of any width."""
    dtype = match.experts.dtype
    if dtype in (torch.int32, torch.int64):
        return match.experts
    prove(is_integral(dtype), Reason.OPERANDS, f"expert ids are {dtype}, and no integers", match.experts.node)
    fits = torch.iinfo(dtype).max >= match.E - 1
    prove(fits, Reason.OPERANDS, f"expert ids are {dtype}, which has no number {match.E - 1}", match.experts.node)
    return replace(match.experts, dtype=torch.int64)
