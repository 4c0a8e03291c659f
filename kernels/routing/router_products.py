"""The products of a router: of one of few experts they are so narrow that matrix libraries have only slow kernels for them.

    logits[t, e] = <x[t, :], w[e, :]>
    dw[e, :]     = sum over tokens t:  dlogits[t, e] * x[t, :]

Each reads x once, and is bound by that. A program of the logits takes BLOCK_T tokens and BLOCK_E experts; one of the gradient
takes a stretch of D of the tokens of one of PARTS equal parts, which are added in order. A logit is one sum over D in order:
its bits depend on no other token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_router_block, choose_router_product, router_parts
from moeblaze_ops.kernels.launch import allows_tf32, capability, ceil_div, is_multiple, launch, operands, static_size
from moeblaze_ops.kernels.tiles import add_rows_times_weight, load_tile, multiply_add, offsets_of


@triton.jit(do_not_specialize=["T"])
def _router_logits_kernel(
    x_ptr, w_ptr, logits_ptr,
    T, D, E,
    stride_x_t, stride_x_d, stride_w_e, stride_w_d,
    ALLOW_TF32: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    num_expert_tiles = tl.cdiv(E, BLOCK_E)
    tokens = (tl.program_id(0) // num_expert_tiles).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(0) % num_expert_tiles * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = x_ptr + tl.minimum(tokens, T - 1) * stride_x_t
    columns, logits = offsets_of(experts, stride_w_e, True), tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    logits = add_rows_times_weight(
        logits, rows, stride_x_d, w_ptr, stride_w_d, columns, experts < E, D, BLOCK_D, EVEN_D, EVEN_E, ALLOW_TF32
    )
    is_in = (tokens < T)[:, None] & (experts < E)[None, :]
    tl.store(logits_ptr + tokens[:, None] * E + experts[None, :], logits.to(logits_ptr.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["T"])
def _router_weight_grad_kernel(
    dlogits_ptr, x_ptr, parts_ptr,
    T, D, E,
    stride_dlogits_t, stride_dlogits_e, stride_x_t, stride_x_d,
    PARTS: tl.constexpr, ALLOW_TF32: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    num_col_tiles = tl.cdiv(D, BLOCK_D)
    cols = tl.program_id(0) % num_col_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.program_id(0) // num_col_tiles
    experts = tl.arange(0, BLOCK_E)
    part_tokens = tl.cdiv(T, PARTS)
    first = part * part_tokens
    end = tl.minimum(T, first + part_tokens)
    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for token in range(first, end, BLOCK_T):
        tokens = (token + tl.arange(0, BLOCK_T)).to(tl.int64)
        token_in = tokens < end
        dlogits_tile = dlogits_ptr + experts[:, None] * stride_dlogits_e + tokens[None, :] * stride_dlogits_t
        x_tile = x_ptr + tokens[:, None] * stride_x_t + cols[None, :] * stride_x_d
        dlogits = load_tile(dlogits_tile, experts < E, token_in, False, False)  # [BLOCK_E, BLOCK_T]
        x = load_tile(x_tile, token_in, cols < D, False, EVEN_D)  # [BLOCK_T, BLOCK_D]
        total = multiply_add(dlogits, x, total, ALLOW_TF32)
    parts_tile = parts_ptr + (part * E + experts)[:, None] * D + cols[None, :]
    tl.store(parts_tile, total, mask=(experts < E)[:, None] & (cols < D)[None, :])


def _options(config, D, block_e) -> dict:
    """What both kernels are compiled for."""
    return {
        "ALLOW_TF32": allows_tf32(),
        "EVEN_D": is_multiple(D, config.columns),
        "BLOCK_T": config.rows,
        "BLOCK_D": config.columns,
        "BLOCK_E": block_e,
        "num_warps": config.num_warps,
        "num_stages": 4,
    }


def launch_router_logits(x_TD: Tensor, w_ED: Tensor, wide: bool = False) -> Tensor:
    """``router_logits`` on CUDA: ``x @ w.T``, contiguous, in fp32 if ``wide``."""
    (T, D), E = x_TD.shape, w_ED.shape[0]
    logits_TE = x_TD.new_empty((T, E), dtype=torch.float32 if wide else x_TD.dtype)
    config = choose_router_product(operands(x_TD), static_size(D), capability(x_TD), static_size(T))
    block_e = choose_router_block(operands(x_TD), static_size(E), static_size(T), capability(x_TD))
    launch(
        _router_logits_kernel,
        ceil_div(T, config.rows) * ceil_div(E, block_e),
        x_TD, w_ED, logits_TE,
        T, D, E,
        *x_TD.stride(), *w_ED.stride(),
        EVEN_E=is_multiple(E, block_e),
        **_options(config, D, block_e),
    )  # fmt: skip
    return logits_TE


def launch_router_weight_grad(dlogits_TE: Tensor, x_TD: Tensor) -> Tensor:
    """``router_weight_grad`` on CUDA: ``dlogits.T @ x``, contiguous; zero without tokens."""
    (T, D), E = x_TD.shape, dlogits_TE.shape[1]
    config = choose_router_product(operands(x_TD), static_size(D), capability(x_TD))
    num_col_tiles = ceil_div(D, config.columns)
    parts = router_parts(static_size(num_col_tiles))
    parts_PED = x_TD.new_empty((parts, E, D), dtype=torch.float32)
    launch(
        _router_weight_grad_kernel,
        parts * num_col_tiles,
        dlogits_TE, x_TD, parts_PED,
        T, D, E,
        *dlogits_TE.stride(), *x_TD.stride(),
        PARTS=parts,
        **_options(config, D, 16),
    )  # fmt: skip
    return parts_PED.sum(0).to(x_TD.dtype)
