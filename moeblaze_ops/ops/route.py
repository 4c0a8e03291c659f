"""``moeblaze::route`` and its backward: router logits to the ids and weights of each token's experts, in one kernel."""

from typing import Any

import torch
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.arguments.geometry import once
from moeblaze_ops.arguments.validation import check_shape, require, require_dtype
from moeblaze_ops.arguments.validation_calls import MAX_TOP_K, TOP_K_BOUNDS, check_route_call
from moeblaze_ops.arguments.validation_router import check_like_logits, check_logits, check_scoring
from moeblaze_ops.arguments.validation_values import ID_DTYPES, not_scriptable
from moeblaze_ops.cpu.row_pieces import in_pieces
from moeblaze_ops.cpu.rows import sum_dtype
from moeblaze_ops.kernels.configs import SIGMOID_EPS
from moeblaze_ops.ops.autodiff import carrying, parted
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.register import register_op


@not_scriptable
def route(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The weights and ids of each token's best experts, in descending order of their choice scores.

    An expert's score is ``softmax(logits)[e]``, or ``sigmoid(logits[e])``; for ``softmax_topk`` the K experts are chosen
    by their logits and scored by a softmax over these K. The choice goes by score + bias, the weights come from the scores.
    Where that has the order of the logits, it goes by these, in which no rounding makes two experts equal.

    - Mixtral, Qwen-MoE: ``softmax`` with ``renormalize=True``; OLMoE: ``softmax``; gpt-oss: ``softmax_topk``;
    - DeepSeek-V2: ``softmax`` with groups and a scale; DeepSeek-V3: ``sigmoid`` with all options; Llama 4: ``sigmoid``.

    Args:
        logits: router logits. Shape [..., E], bf16, fp16, fp32, or fp64 on CPU, any strides, may be empty. Autocast
            leaves them as they are.
        top_k: K, at most 32.
        bias: added for the choice only (to the logits for ``softmax_topk``), not differentiable. Shape [E], fp32 or
            the dtype of the logits.
        scoring: ``softmax``, ``softmax_topk`` or ``sigmoid``.
        renormalize: divide a token's weights by their sum, plus 1e-20 for ``sigmoid``.
        scale: positive factor of the weights, applied last.
        num_groups: groups of neighbouring experts. A group's score is its largest choice score, or for ``sigmoid``
            the sum of its largest two; a token chooses inside its ``top_groups`` best groups.
        top_groups: groups a token may choose from.

    Returns:
        weights: shape [..., K], fp32 (fp64 for fp64), differentiable in the logits.
        experts: shape [..., K], int32, distinct ids for each token. The lower id wins between equal scores; NaN counts
            as larger than any number, as in ``torch.topk``.

    Raises:
        ValueError, TypeError: an argument breaks one of the rules above. Computes in fp32 (fp64 for fp64); two runs
        agree bit for bit.
    """
    once(check_route_call, logits, top_k, bias, scoring, renormalize, scale, num_groups, top_groups)
    logits_TE = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    options = (top_k, scoring, renormalize, scale, num_groups, top_groups)
    weights_TK, experts_TK = call(_route_op, logits_TE, bias, *options)
    shape = (*logits.shape[:-1], top_k)
    result = weights_TK.view(shape), experts_TK.view(shape)
    for position in range(torch._C._len_torch_function_stack()):
        mode: Any = torch._C._get_function_stack_at(position)
        if hasattr(mode, "watch_route"):
            result = mode.watch_route(logits, {"scoring": scoring, "renormalize": renormalize, "scale": scale}, result)
    return result


def chosen_experts(logits_TE: Tensor, top_k: int) -> Tensor:
    """The ids of each token's largest logits, ``[T, K]``, which no watcher hears of."""
    return _route_op(logits_TE, None, top_k, "softmax", False, 1.0, 1, 1)[1]


def check_route(
    op: str,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> None:
    check_logits(op, logits_TE)
    check_scoring(op, scoring, scale)
    E = int(logits_TE.shape[1])
    largest = min(E, MAX_TOP_K)
    require(1 <= top_k <= largest, op, "top_k", f"be between 1 and {largest}{TOP_K_BOUNDS}", top_k)
    if bias_E is not None:
        check_shape(op, "bias_E", bias_E, [E], " (experts of logits_TE)")
        allowed = (torch.float32, logits_TE.dtype)
        require_dtype(bias_E.dtype in allowed, op, "bias_E", f"be float32 or {logits_TE.dtype}", bias_E.dtype)
        check_like_logits(op, "bias_E", bias_E, logits_TE)
    require(num_groups >= 1 and E % num_groups == 0, op, "num_groups", f"divide the {E} experts", num_groups)
    require(1 <= top_groups <= num_groups, op, "top_groups", f"be between 1 and num_groups={num_groups}", top_groups)
    group_size = E // num_groups
    if scoring == "sigmoid" and top_groups < num_groups:
        rule = "leave 2 experts or more in a group, whose score is the sum of two"
        require(group_size >= 2, op, "num_groups", rule, num_groups)
    reachable = top_groups * group_size
    require(top_k <= reachable, op, "top_k", f"be at most {reachable}, the experts of {top_groups} groups", top_k)


def check_route_backward(
    op: str,
    dweights_TK: Tensor,
    logits_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> None:
    check_logits(op, logits_TE)
    check_scoring(op, scoring, scale)
    fits = experts_TK.dim() == 2 and experts_TK.shape[0] == logits_TE.shape[0]
    require(fits, op, "experts_TK", f"have shape [{logits_TE.shape[0]}, K]", f"shape {list(experts_TK.shape)}")
    require_dtype(experts_TK.dtype in ID_DTYPES, op, "experts_TK", "be int32 or int64", experts_TK.dtype)
    check_like_logits(op, "experts_TK", experts_TK, logits_TE)
    wide = sum_dtype(logits_TE)
    for name, tensor in {"dweights_TK": dweights_TK, "weights_TK": weights_TK}.items():
        check_shape(op, name, tensor, list(experts_TK.shape), " of experts_TK")
        require_dtype(tensor.dtype == wide, op, name, f"be {wide}", tensor.dtype)
        check_like_logits(op, name, tensor, logits_TE)


def _route_fake(logits_TE, bias_E, top_k, scoring, renormalize, scale, num_groups, top_groups) -> tuple[Tensor, Tensor]:
    shape = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(shape, dtype=sum_dtype(logits_TE)), logits_TE.new_empty(shape, dtype=torch.int32)


def _route_cpu(logits_TE, bias_E, top_k, *options) -> tuple[Tensor, Tensor]:
    if not config.batch_invariant:
        return _choose(logits_TE, bias_E, top_k, *options)
    weights_TK, experts_TK = _route_fake(logits_TE, bias_E, top_k, *options)

    def fill(weights: Tensor, experts: Tensor, logits: Tensor) -> None:
        for result, chosen in zip((weights, experts), _choose(logits, bias_E, top_k, *options), strict=True):
            result.copy_(chosen)

    in_pieces(fill, [weights_TK, experts_TK], [logits_TE])
    return weights_TK, experts_TK


def _choose(logits_TE, bias_E, top_k, scoring, renormalize, scale, num_groups, top_groups) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.to(sum_dtype(logits_TE))
    choice_TE = _choice_scores(logits_TE, bias_E, scoring, top_groups < num_groups)
    if top_groups < num_groups:
        choice_TE, order_TE = _order_groups_first(choice_TE, scoring, num_groups, top_groups)
        experts_TK = order_TE.gather(1, _descending(choice_TE)[:, :top_k])
    else:
        experts_TK = _descending(choice_TE)[:, :top_k]
    weights_TK = weights_of(logits_TE, experts_TK, scoring, renormalize, scale)
    return weights_TK.contiguous(), experts_TK.to(torch.int32, memory_format=torch.contiguous_format)


def weights_of(logits_TE: Tensor, experts_TK: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    """The weights of the chosen experts, from logits in the dtype of the arithmetic."""
    chosen_TK = logits_TE.gather(1, experts_TK)
    if scoring == "sigmoid":
        weights_TK = chosen_TK.sigmoid()
    elif scoring == "softmax_topk":
        weights_TK = chosen_TK.softmax(1)
    else:
        weights_TK = logits_TE.softmax(1).gather(1, experts_TK)
    if renormalize and scoring != "softmax_topk":
        eps = SIGMOID_EPS if scoring == "sigmoid" else 0
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + eps)
    return weights_TK * scale


def _route_forward_mode(logits_TE, bias_E, top_k, scoring, renormalize, scale, *groups) -> tuple[Tensor, Tensor]:
    """The choice has no tangent, and so has a bias that it alone depends on."""
    (primal_TE, primal_E), (dlogits_TE, _) = parted((logits_TE, bias_E))
    weights_TK, experts_TK = _route_op(primal_TE, primal_E, top_k, scoring, renormalize, scale, *groups)
    if dlogits_TE is None:
        return weights_TK, experts_TK
    carried_TK = weights_of(logits_TE.to(sum_dtype(logits_TE)), experts_TK.long(), scoring, renormalize, scale)
    (_, (dweights_TK,)) = parted([carried_TK])
    return carrying(weights_TK, dweights_TK), experts_TK


def _choice_scores(logits_TE: Tensor, bias_E: Tensor | None, scoring: str, grouped: bool) -> Tensor:
    """What the K largest are taken of; ``grouped``: also the groups with the largest sums of two sigmoids."""
    if scoring == "sigmoid" and (bias_E is not None or grouped):
        scores_TE = logits_TE.sigmoid()
    elif scoring == "softmax" and bias_E is not None:
        scores_TE = logits_TE.softmax(1)
    else:
        scores_TE = logits_TE
    return scores_TE if bias_E is None else scores_TE + bias_E


def _order_groups_first(choice_TE: Tensor, scoring: str, num_groups: int, top_groups: int) -> tuple[Tensor, Tensor]:
    """The choice scores of the kept groups' experts, and the ids of these experts, in the order of ids."""
    E = choice_TE.shape[1]
    grouped = choice_TE.unflatten(1, (num_groups, E // num_groups))
    group_scores = grouped.topk(2, 2).values.sum(2) if scoring == "sigmoid" else grouped.amax(2)
    kept = _descending(group_scores)[:, :top_groups].sort(1).values
    order_TE = torch.arange(E).view(num_groups, -1)[kept].flatten(1)
    return choice_TE.gather(1, order_TE), order_TE


def _descending(scores: Tensor) -> Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices


def _route_setup_context(ctx, inputs, output) -> None:
    logits_TE, _, _, scoring, renormalize, scale, _, _ = inputs
    weights_TK, experts_TK = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(experts_TK)
    ctx.options = scoring, renormalize, scale
    ctx.save_for_backward(logits_TE, weights_TK, experts_TK)


def _route_gradient(ctx, dweights_TK, dexperts_TK):
    dlogits_TE = None
    if dweights_TK is not None and ctx.needs_input_grad[0]:
        dlogits_TE = call(route_backward, dweights_TK, *ctx.saved_tensors, *ctx.options)
    return dlogits_TE, None, None, None, None, None, None, None


def _route_backward_cpu(dweights_TK, logits_TE, weights_TK, experts_TK, *options) -> Tensor:
    operands = dweights_TK, logits_TE, weights_TK, experts_TK
    if not config.batch_invariant:
        return _gradient_of_logits(*operands, *options)
    dlogits_TE = logits_TE.new_empty(logits_TE.shape)
    in_pieces(lambda dlogits, *given: dlogits.copy_(_gradient_of_logits(*given, *options)), [dlogits_TE], operands)
    return dlogits_TE


def _gradient_of_logits(dweights_TK, logits_TE, weights_TK, experts_TK, scoring, renormalize, scale) -> Tensor:
    experts_TK = experts_TK.long()
    wide_TE = logits_TE.to(sum_dtype(logits_TE))
    zeros_TE = torch.zeros_like(wide_TE, memory_format=torch.contiguous_format)
    centred_TK = scale * dweights_TK
    if scoring != "sigmoid" or renormalize:
        centre_T1 = (dweights_TK * weights_TK).sum(1, keepdim=True)
        centred_TK = centred_TK - centre_T1
    if scoring == "sigmoid":
        scores_TK = wide_TE.gather(1, experts_TK).sigmoid()
        slope_TK = scores_TK * (1 - scores_TK)
        if renormalize:
            slope_TK = slope_TK / (scores_TK.sum(1, keepdim=True) + SIGMOID_EPS)
        dlogits_TE = zeros_TE.scatter_add(1, experts_TK, slope_TK * centred_TK)
    elif scoring == "softmax_topk" or renormalize:
        dlogits_TE = zeros_TE.scatter_add(1, experts_TK, weights_TK / scale * centred_TK)
    else:
        dlogits_TE = wide_TE.softmax(1) * (zeros_TE.scatter_add(1, experts_TK, scale * dweights_TK) - centre_T1)
    return dlogits_TE.to(logits_TE.dtype).contiguous()


route_backward = register_op(
    "route_backward",
    "(Tensor dweights_TK, Tensor logits_TE, Tensor weights_TK, Tensor experts_TK, str scoring, bool renormalize,"
    " float scale) -> Tensor",
    fake=lambda dweights_TK, logits_TE, *_: logits_TE.new_empty(logits_TE.shape),
    cpu=_route_backward_cpu,
    kernel="routing.route:launch_route_backward",
    check=check_route_backward,
)
"""Gradient of ``route`` and ``route_at`` for the logits, in their dtype and contiguous.

``dlogits[j] = slope[j] * (scale * dweights[j] - sum_k dweights[k] * weights[k])`` with dweights 0 where j was not chosen;
``kernels/routing/route.py`` has the slope of each scoring. Computes in fp32 (fp64 for fp64), without atomics.
"""

_route_op = register_op(
    "route",
    "(Tensor logits_TE, Tensor? bias_E, int top_k, str scoring, bool renormalize, float scale, int num_groups,"
    " int top_groups) -> (Tensor, Tensor)",
    fake=_route_fake,
    cpu=_route_cpu,
    kernel="routing.route:launch_route",
    check=check_route,
    backward=_route_gradient,
    setup_context=_route_setup_context,
    forward_mode=_route_forward_mode,
)
"""``moeblaze::route``: what the function ``route`` documents, for logits of shape [T, E].

Backward needs the logits and both results, nothing else.
"""
