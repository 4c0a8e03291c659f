"""Chooses each token's K experts from the router's logits and weighs them, or those given; and the gradient for the logits.

Forward. A program holds whole rows of logits. Each expert's choice score (the logit, or its softmax or sigmoid plus a bias)
becomes an int32 key of the same order, so that the largest of a row comes from one integer maximum, and the first
expert that has it from one integer minimum; both are single warp instructions where a row fills a warp. K rounds take
the largest key and lower it out of the way. Experts outside the kept groups, and padding, have the lowest key from the
start, which no number has. Weights then come from the K chosen logits, read again by index.

With groups, a row is laid out as [GROUPS, GROUP_BLOCK], each group padded to a power of two, so that a reduction over the last
axis scores every group at once.

Backward. With ``c = sum_k dweights[k] * weights[k]`` (0 for a sigmoid that is not renormalized), every scoring has

    dlogits[j] = slope[j] * (scale * dweights[j] - c)        dweights[j] = 0 where j was not chosen

    softmax                             slope[j] = softmax(logits)[j]
    softmax over the chosen             slope[j] = weights[j] / scale               0 where j was not chosen
    sigmoid, s = sigmoid(logits)        slope[j] = s[j] * (1 - s[j])                0 where j was not chosen
    sigmoid, renormalized               slope[j] = s[j] * (1 - s[j]) / (sum_k s[k] + eps)   0 where j was not chosen

so that only the first reads all the logits. A row of dlogits is filled by comparing its columns with the K chosen experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import SIGMOID_EPS, choose_route, choose_route_backward
from moeblaze_ops.kernels.launch import ceil_div, launch

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_SIGMOID_EPS = tl.constexpr(SIGMOID_EPS)


@triton.jit
def _to_key(value):
    """int32 of the order of fp32 ``value``: -0.0 equals 0.0, NaN is above all numbers."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & _HIGHEST), _HIGHEST)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & _HIGHEST)).to(tl.float32, bitcast=True)


@triton.jit
def _take_largest(keys, ids, AXIS: tl.constexpr):
    """``(key, id, rest)``: the largest key along an axis, the lowest id that has it, and the keys without it."""
    largest = tl.max(keys, axis=AXIS, keep_dims=True)
    first = tl.min(tl.where(keys == largest, ids, _HIGHEST), axis=AXIS, keep_dims=True)
    return largest, first, tl.where(ids == first, _LOWEST, keys)


@triton.jit
def _keep_groups(
    keys,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """``keys`` with the lowest key outside the best groups, by their largest value or the sum of their largest two."""
    keys = tl.reshape(keys, (BLOCK_T, GROUPS, GROUP_BLOCK))
    largest, _, rest = _take_largest(keys, tl.arange(0, GROUP_BLOCK)[None, None, :], 2)
    score = _from_key(largest)
    if SUM_OF_TWO:
        score += _from_key(tl.max(rest, axis=2, keep_dims=True))
    groups = tl.arange(0, GROUPS)[None, :, None]
    exists = groups < NUM_GROUPS
    group_keys = tl.where(exists, _to_key(score), _LOWEST)  # [BLOCK_T, GROUPS, 1]
    for _ in range(TOP_GROUPS):
        _, _, group_keys = _take_largest(group_keys, groups, 1)
    keys = tl.where(exists & (group_keys == _LOWEST), keys, _LOWEST)
    return tl.reshape(keys, (BLOCK_T, GROUPS * GROUP_BLOCK))


@triton.jit
def _weigh(logits, row_max, row_sum, SIGMOID: tl.constexpr, OVER_CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr):
    """The weights of chosen logits, [BLOCK_T, BLOCK_K], of which those of no expert are minus infinity."""
    if SIGMOID:
        weights = tl.sigmoid(logits)
    elif OVER_CHOSEN:
        weights = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
    else:
        weights = tl.exp(logits - row_max) / row_sum
    if NORMALIZED:
        weights /= tl.sum(weights, axis=1, keep_dims=True) + (_SIGMOID_EPS if SIGMOID else 0.0)
    return weights


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr,
    T,
    stride_logits_t, stride_logits_e, stride_bias_e,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, BY_LOGIT: tl.constexpr, NORMALIZED: tl.constexpr,
    SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_in = tokens < T
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    places = tl.arange(0, GROUPS * GROUP_BLOCK)
    if NUM_GROUPS == 1:
        ids = places
        id_in = ids < NUM_EXPERTS
    else:
        ids = places // GROUP_BLOCK * group_size + places % GROUP_BLOCK
        id_in = (places % GROUP_BLOCK < group_size) & (places // GROUP_BLOCK < NUM_GROUPS)
    row_ptrs = logits_ptr + tokens[:, None] * stride_logits_t
    logits_in = token_in[:, None] & id_in[None, :]
    logits = tl.load(row_ptrs + ids.to(tl.int64)[None, :] * stride_logits_e, mask=logits_in, other=-float("inf"))
    logits = logits.to(tl.float32)  # [BLOCK_T, GROUPS * GROUP_BLOCK]

    row_max, row_sum = 0.0, 1.0
    if not SIGMOID and not (BY_LOGIT and NORMALIZED):
        row_max = tl.max(logits, axis=1, keep_dims=True)
        row_sum = tl.sum(tl.exp(logits - row_max), axis=1, keep_dims=True)
    if BY_LOGIT:
        choice = logits
    elif SIGMOID:
        choice = tl.sigmoid(logits)
    else:
        choice = tl.exp(logits - row_max) / row_sum
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + ids * stride_bias_e, mask=id_in, other=0.0)
        choice += bias.to(tl.float32)[None, :]

    keys = tl.where(id_in[None, :], _to_key(choice), _LOWEST)
    if TOP_GROUPS < NUM_GROUPS:
        keys = _keep_groups(keys, NUM_GROUPS, TOP_GROUPS, SIGMOID, BLOCK_T, GROUPS, GROUP_BLOCK)
    ks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for k in range(TOP_K):
        _, expert, keys = _take_largest(keys, ids[None, :], 1)
        chosen = tl.where(ks[None, :] == k, expert, chosen)

    chosen_in = token_in[:, None] & (ks < TOP_K)[None, :]
    # Rows past T read no logits, and may hold the same expert twice: neither is stored.
    logits = tl.load(row_ptrs + chosen.to(tl.int64) * stride_logits_e, mask=chosen_in, other=-float("inf"))
    logits = logits.to(tl.float32)  # [BLOCK_T, BLOCK_K]
    weights = _weigh(logits, row_max, row_sum, SIGMOID, BY_LOGIT and NORMALIZED, NORMALIZED)
    out_offsets = tokens[:, None] * TOP_K + ks[None, :]
    tl.store(weights_ptr + out_offsets, weights * SCALE, mask=chosen_in)
    tl.store(experts_ptr + out_offsets, chosen, mask=chosen_in)


@triton.jit(do_not_specialize=["T"])
def _route_at_kernel(
    logits_ptr, experts_ptr, weights_ptr,
    T,
    stride_logits_t, stride_logits_e, stride_experts_t, stride_experts_k,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_in = tokens < T
    row_ptrs = logits_ptr + tokens[:, None] * stride_logits_t
    row_max, row_sum = 0.0, 1.0
    if not SIGMOID and not NORMALIZED:
        ids = tl.arange(0, BLOCK_E)
        row_in = token_in[:, None] & (ids < NUM_EXPERTS)[None, :]
        row = tl.load(row_ptrs + ids.to(tl.int64)[None, :] * stride_logits_e, mask=row_in, other=-float("inf")).to(tl.float32)
        row_max = tl.max(row, axis=1, keep_dims=True)
        row_sum = tl.sum(tl.exp(row - row_max), axis=1, keep_dims=True)
    ks = tl.arange(0, BLOCK_K)
    slot_in = token_in[:, None] & (ks < TOP_K)[None, :]
    expert_ptrs = experts_ptr + tokens[:, None] * stride_experts_t + ks[None, :] * stride_experts_k
    experts = tl.load(expert_ptrs, mask=slot_in, other=-1).to(tl.int64)
    chosen_in = (experts >= 0) & (experts < NUM_EXPERTS)
    logits = tl.load(row_ptrs + experts * stride_logits_e, mask=chosen_in, other=-float("inf")).to(tl.float32)
    weights = _weigh(logits, row_max, row_sum, SIGMOID, NORMALIZED, NORMALIZED)  # [BLOCK_T, BLOCK_K]
    weights = tl.where(chosen_in, weights * SCALE, 0.0)
    tl.store(weights_ptr + tokens[:, None] * TOP_K + ks[None, :], weights, mask=slot_in)


@triton.jit(do_not_specialize=["T"])
def _route_backward_kernel(
    dweights_ptr, logits_ptr, weights_ptr, experts_ptr, dlogits_ptr,
    T,
    stride_dweights_t, stride_dweights_k, stride_logits_t, stride_logits_e,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_in = tokens < T
    logits_ptrs = logits_ptr + tokens * stride_logits_t
    dweights_ptrs = dweights_ptr + tokens * stride_dweights_t
    slots = tokens * TOP_K

    ks = tl.arange(0, BLOCK_K)
    slot_in = token_in[:, None] & (ks < TOP_K)[None, :]
    centre = tl.zeros((BLOCK_T,), tl.float32)
    divisor = tl.full((BLOCK_T,), 1.0, tl.float32)
    if NORMALIZED or not SIGMOID:
        dweights = tl.load(dweights_ptrs[:, None] + ks[None, :] * stride_dweights_k, mask=slot_in, other=0.0)
        weights = tl.load(weights_ptr + slots[:, None] + ks[None, :], mask=slot_in, other=0.0)
        centre = tl.sum(dweights.to(tl.float32) * weights, axis=1)
    if NORMALIZED and SIGMOID:
        experts = tl.load(experts_ptr + slots[:, None] + ks[None, :], mask=slot_in, other=-1).to(tl.int64)
        chosen_in = (experts >= 0) & (experts < NUM_EXPERTS)
        logits = tl.load(logits_ptrs[:, None] + experts * stride_logits_e, mask=chosen_in, other=-float("inf"))
        divisor = tl.sum(tl.sigmoid(logits.to(tl.float32)), axis=1) + _SIGMOID_EPS

    ids = tl.arange(0, BLOCK_E)
    row = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for k in range(TOP_K):
        expert = tl.load(experts_ptr + slots + k, mask=token_in, other=-1)
        value = tl.load(dweights_ptrs + k * stride_dweights_k, mask=token_in, other=0.0).to(tl.float32) * SCALE
        if SIGMOID:
            expert_in = (expert >= 0) & (expert < NUM_EXPERTS)
            logit = tl.load(logits_ptrs + expert.to(tl.int64) * stride_logits_e, mask=expert_in, other=0.0)
            score = tl.sigmoid(logit.to(tl.float32))
            value = score * (1.0 - score) / divisor * (value - centre)
        elif NORMALIZED:
            weight = tl.load(weights_ptr + slots + k, mask=token_in, other=0.0)
            value = weight / SCALE * (value - centre)
        row += tl.where(ids[None, :] == expert[:, None], value[:, None], 0.0)  # given experts may be the same

    row_in = token_in[:, None] & (ids < NUM_EXPERTS)[None, :]
    if not SIGMOID and not NORMALIZED:
        row_tile = logits_ptrs[:, None] + ids.to(tl.int64)[None, :] * stride_logits_e  # [BLOCK_T, BLOCK_E]
        logits = tl.load(row_tile, mask=row_in, other=-float("inf")).to(tl.float32)
        exponentials = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        row = exponentials / tl.sum(exponentials, axis=1, keep_dims=True) * (row - centre[:, None])
    dlogits_tile = dlogits_ptr + tokens[:, None] * NUM_EXPERTS + ids[None, :]  # [BLOCK_T, BLOCK_E]
    tl.store(dlogits_tile, row.to(dlogits_ptr.dtype.element_ty), mask=row_in)


def launch_route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """``route`` on CUDA: the weights and the ids of each token's K experts, best first; contiguous."""
    T, num_experts = logits_TE.shape[0], int(logits_TE.shape[1])
    weights_TK = logits_TE.new_empty((T, top_k), dtype=torch.float32)
    experts_TK = logits_TE.new_empty((T, top_k), dtype=torch.int32)
    groups = triton.next_power_of_2(num_groups)
    group_block = triton.next_power_of_2(num_experts // num_groups)
    config = choose_route(groups * group_block)
    launch(
        _route_kernel,
        ceil_div(T, config.rows),
        logits_TE, bias_E, weights_TK, experts_TK,
        T,
        *logits_TE.stride(), bias_E.stride(0) if bias_E is not None else 0,
        NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=scoring == "sigmoid",
        BY_LOGIT=scoring == "softmax_topk" or (bias_E is None and (scoring == "softmax" or top_groups == num_groups)),
        NORMALIZED=renormalize or scoring == "softmax_topk", SCALE=scale, NUM_GROUPS=num_groups, TOP_GROUPS=top_groups,
        BLOCK_T=config.rows, BLOCK_K=triton.next_power_of_2(top_k), GROUPS=groups, GROUP_BLOCK=group_block,
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return weights_TK, experts_TK


def launch_route_at(logits_TE: Tensor, experts_TK: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    """``route_at`` on CUDA: the weights of given experts of each token, contiguous; that of an id outside [0, E) is 0."""
    T, num_experts = logits_TE.shape[0], int(logits_TE.shape[1])
    top_k = int(experts_TK.shape[1])
    weights_TK = logits_TE.new_empty((T, top_k), dtype=torch.float32)
    config = choose_route(triton.next_power_of_2(num_experts))
    launch(
        _route_at_kernel,
        ceil_div(T, config.rows),
        logits_TE, experts_TK, weights_TK,
        T,
        *logits_TE.stride(), *experts_TK.stride(),
        NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=scoring == "sigmoid",
        NORMALIZED=renormalize or scoring == "softmax_topk", SCALE=scale,
        BLOCK_T=config.rows, BLOCK_K=triton.next_power_of_2(top_k), BLOCK_E=config.columns, num_warps=config.num_warps,
        num_stages=1,
    )  # fmt: skip
    return weights_TK


def launch_route_backward(
    dweights_TK: Tensor,
    logits_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """``route_backward`` on CUDA, contiguous: zero where the scoring makes it so for an expert that was not chosen.

    ``weights_TK`` and ``experts_TK`` are contiguous.
    """
    T, num_experts = logits_TE.shape[0], int(logits_TE.shape[1])
    top_k = int(experts_TK.shape[1])
    dlogits_TE = logits_TE.new_empty((T, num_experts))
    config = choose_route_backward(triton.next_power_of_2(num_experts))
    launch(
        _route_backward_kernel,
        ceil_div(T, config.rows),
        dweights_TK, logits_TE, weights_TK, experts_TK, dlogits_TE,
        T,
        *dweights_TK.stride(), *logits_TE.stride(),
        NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=scoring == "sigmoid",
        NORMALIZED=renormalize or scoring == "softmax_topk", SCALE=scale,
        BLOCK_T=config.rows, BLOCK_K=triton.next_power_of_2(top_k), BLOCK_E=config.columns, num_warps=config.num_warps,
        num_stages=1,
    )  # fmt: skip
    return dlogits_TE
