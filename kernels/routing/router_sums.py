"""Sums over tokens of a router's logits, which the losses of routers are made of; and their gradient.

    sums[e]  = sum_t softmax(logits[t])[e]
    squares  = sum_t logsumexp(logits[t])**2                              both over the tokens that are kept
    dlogits[t, e] = p[t, e] * (dsums[e] - sum_j p[t, j] * dsums[j] + 2 * logsumexp(logits[t]) * dsquares)
                    with p = softmax(logits), and 0 for a token that is not kept, plus another gradient if there is one

Both read the logits once. A program of the sums takes one of PARTS stretches of tokens, BLOCK_T at a time, and the parts are
added in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_route_backward, choose_router_sums, router_sum_parts
from moeblaze_ops.kernels.launch import ceil_div, launch


@triton.jit
def _load_rows(
    logits_ptr,
    kept_ptr,
    tokens,
    end,
    stride_t,
    stride_e,
    stride_kept,
    E,
    BLOCK_E: tl.constexpr,
):
    """``(p, logsumexp, kept)`` of some tokens; a row that is not kept is one of zeros."""
    kept = tokens < end
    if kept_ptr is not None:
        kept &= tl.load(kept_ptr + tokens * stride_kept, mask=kept, other=0) != 0
    ids = tl.arange(0, BLOCK_E)
    row_tile = logits_ptr + tokens[:, None] * stride_t + ids.to(tl.int64)[None, :] * stride_e  # [BLOCK_T, BLOCK_E]
    logits = tl.load(row_tile, mask=kept[:, None] & (ids < E)[None, :], other=0.0).to(tl.float32)
    logits = tl.where((ids < E)[None, :], logits, -float("inf"))
    row_max = tl.max(logits, axis=1)
    exponentials = tl.exp(logits - row_max[:, None])
    row_sum = tl.sum(exponentials, axis=1)
    return exponentials / row_sum[:, None], row_max + tl.log(row_sum), kept


@triton.jit(do_not_specialize=["T"])
def _router_sums_kernel(
    logits_ptr, kept_ptr, sums_ptr, squares_ptr,
    T, E,
    stride_t, stride_e, stride_kept,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    part_tokens = tl.cdiv(T, PARTS)
    first = part * part_tokens
    end = tl.minimum(T, first + part_tokens)
    sums = tl.zeros((BLOCK_E,), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for token in range(first, end, BLOCK_T):
        tokens = (token + tl.arange(0, BLOCK_T)).to(tl.int64)
        p, size, kept = _load_rows(logits_ptr, kept_ptr, tokens, end, stride_t, stride_e, stride_kept, E, BLOCK_E)
        sums += tl.sum(tl.where(kept[:, None], p, 0.0), axis=0)
        squares += tl.where(kept, size * size, 0.0)
    ids = tl.arange(0, BLOCK_E)
    tl.store(sums_ptr + part * E + ids, sums, mask=ids < E)
    tl.store(squares_ptr + part, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["T"])
def _router_sums_backward_kernel(
    dsums_ptr, dsquares_ptr, logits_ptr, kept_ptr, added_ptr, dlogits_ptr,
    T, E,
    stride_dsums, stride_t, stride_e, stride_kept, stride_added_t, stride_added_e,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = tl.arange(0, BLOCK_E)
    p, size, kept = _load_rows(logits_ptr, kept_ptr, tokens, T, stride_t, stride_e, stride_kept, E, BLOCK_E)
    slope = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if dsums_ptr is not None:
        dsums = tl.load(dsums_ptr + ids * stride_dsums, mask=ids < E, other=0.0).to(tl.float32)
        slope += dsums[None, :] - tl.sum(p * dsums[None, :], axis=1)[:, None]
    if dsquares_ptr is not None:
        slope += (2.0 * tl.load(dsquares_ptr).to(tl.float32) * size)[:, None]
    dlogits = tl.where(kept[:, None], p * slope, 0.0)
    row_in = (tokens < T)[:, None] & (ids < E)[None, :]
    if added_ptr is not None:
        added_rows = added_ptr + tokens * stride_added_t
        added_tile = added_rows[:, None] + ids.to(tl.int64)[None, :] * stride_added_e  # [BLOCK_T, BLOCK_E]
        dlogits += tl.load(added_tile, mask=row_in, other=0.0).to(tl.float32)
    dlogits_tile = dlogits_ptr + tokens[:, None] * E + ids[None, :]  # [BLOCK_T, BLOCK_E]
    tl.store(dlogits_tile, dlogits.to(dlogits_ptr.dtype.element_ty), mask=row_in)


def launch_router_sums(logits_TE: Tensor, kept_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """``router_sums`` on CUDA: the sums over tokens of their probabilities and of their squared logsumexp."""
    T, E = logits_TE.shape[0], int(logits_TE.shape[1])
    config = choose_router_sums(triton.next_power_of_2(E))
    parts = router_sum_parts(config.columns)
    sums_PE = logits_TE.new_empty((parts, E), dtype=torch.float32)
    squares_P = logits_TE.new_empty((parts,), dtype=torch.float32)
    launch(
        _router_sums_kernel,
        parts,
        logits_TE, kept_T, sums_PE, squares_P,
        T, E,
        *logits_TE.stride(), kept_T.stride(0) if kept_T is not None else 0,
        PARTS=parts,
        BLOCK_T=config.rows, BLOCK_E=config.columns, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return sums_PE.sum(0), squares_P.sum()


def launch_router_sums_backward(
    dsums_E: Tensor | None,
    dsquares: Tensor | None,
    logits_TE: Tensor,
    kept_T: Tensor | None,
    added_TE: Tensor | None = None,
) -> Tensor:
    """``router_sums_backward`` on CUDA: the gradient of the logits, contiguous; ``added_TE`` is another one."""
    T, E = logits_TE.shape[0], int(logits_TE.shape[1])
    dlogits_TE = logits_TE.new_empty((T, E))
    config = choose_route_backward(triton.next_power_of_2(E))
    launch(
        _router_sums_backward_kernel,
        ceil_div(T, config.rows),
        dsums_E, dsquares, logits_TE, kept_T, added_TE, dlogits_TE,
        T, E,
        dsums_E.stride(0) if dsums_E is not None else 0, *logits_TE.stride(), kept_T.stride(0) if kept_T is not None else 0,
        *(added_TE.stride() if added_TE is not None else (0, 0)),
        BLOCK_T=config.rows, BLOCK_E=config.columns, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return dlogits_TE
