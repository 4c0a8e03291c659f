"""Backward of the low-rank part of a projection, ``y[r] = s[r] u[r] @ B[e]^T``: both gradients in one pass over dy.

For row r in expert order, of expert e, with token t(r) and a scale s(r) or 1:

    du[r]  = dy[r] @ B[e]                              dy[t(r)] in place of dy[r] where dy is in token order
    dB[e]  = sum over rows r of e of  dy[r]^T s(r) u[r]

Either product does little with a wide row that it has to read, so a program reads a tile of dy once for both. It walks through
the rows of one expert, BLOCK_K at a time, with BLOCK_W columns of one half g; the sum for its part of dB stays in registers,
and what its columns add to du is stored for each tile, so no two programs add to the same number. Programs of all experts
read the same columns at the same time: of tokens that several experts read, they are in L2.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import choose_low_rank_backward
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_rows
from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.kernels.launch import allows_tf32, capability, ceil_div, is_multiple, launch, operands, static_size
from moeblaze_ops.kernels.select import is_batch_invariant
from moeblaze_ops.kernels.tiles import load_tile, multiply_add
from moeblaze_ops.kernels.tracing import is_traceable


@triton.jit
def _low_rank_backward_kernel(
    dy_ptr, u_ptr, b_ptr, weights_ptr, slots_ptr, offsets_ptr, du_ptr, db_ptr,
    N, E, W,
    stride_dy_n, stride_dy_g, stride_dy_w, stride_u_n, stride_u_r, stride_b_e, stride_b_g, stride_b_w, stride_b_r,
    stride_db_e, stride_db_g, stride_db_w, stride_db_r,
    R: tl.constexpr, TOP_K: tl.constexpr, GATHERED: tl.constexpr, ALLOW_TF32: tl.constexpr, EVEN_W: tl.constexpr,
    EVEN_R: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) % E
    tile = tl.program_id(0) // E
    num_blocks = tl.cdiv(W, BLOCK_W)
    g = (tile // num_blocks).to(tl.int64)
    cols = tile % num_blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    ranks = tl.arange(0, BLOCK_R)
    first = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    expert = expert.to(tl.int64)
    dy_ptr += g * stride_dy_g
    du_ptr += tile.to(tl.int64) * N * R
    wide_cols = cols.to(tl.int64)[:, None]
    b_tile = b_ptr + expert * stride_b_e + g * stride_b_g + wide_cols * stride_b_w + ranks[None, :] * stride_b_r
    b = load_tile(b_tile, cols < W, ranks < R, EVEN_W, EVEN_R)  # [BLOCK_W, BLOCK_R]

    db = tl.zeros((BLOCK_W, BLOCK_R), tl.float32)
    for row in range(first, end, BLOCK_K):
        rows = row + tl.arange(0, BLOCK_K)
        row_in = rows < end
        # Behind the end the last row is read again, for u of zeros: wide tiles need no mask.
        dy_rows = tl.minimum(rows, end - 1)
        if GATHERED:
            dy_rows = tl.load(slots_ptr + dy_rows) // TOP_K
        dy_tile = dy_ptr + dy_rows.to(tl.int64)[:, None] * stride_dy_n + cols[None, :] * stride_dy_w
        u_tile = u_ptr + rows.to(tl.int64)[:, None] * stride_u_n + ranks[None, :] * stride_u_r
        dy = load_tile(dy_tile, row_in, cols < W, True, EVEN_W)  # [BLOCK_K, BLOCK_W]
        u = load_tile(u_tile, row_in, ranks < R, False, EVEN_R)  # [BLOCK_K, BLOCK_R]
        if weights_ptr is not None:
            u = (u.to(tl.float32) * tl.load(weights_ptr + rows, mask=row_in, other=0.0)[:, None]).to(dy.dtype)
        du = multiply_add(dy, b, tl.zeros((BLOCK_K, BLOCK_R), tl.float32), ALLOW_TF32)
        du_tile = du_ptr + rows.to(tl.int64)[:, None] * R + ranks[None, :]
        tl.store(du_tile, du, mask=row_in[:, None] & (ranks < R)[None, :])
        db = multiply_add(tl.trans(dy), u, db, ALLOW_TF32)
    db_tile = db_ptr + expert * stride_db_e + g * stride_db_g + wide_cols * stride_db_w + ranks[None, :] * stride_db_r
    tl.store(db_tile, db.to(db_ptr.dtype.element_ty), mask=(cols < W)[:, None] & (ranks < R)[None, :])


def launch_low_rank_backward(
    dy: Tensor, u_NR: Tensor, b: Tensor, weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``low_rank_backward`` on CUDA: gradients of the low-rank rows and of the factor that they are multiplied by; contiguous."""
    gathered, N, top_k, rank = dy.dim() == 2, u_NR.shape[0], positions_TK.shape[1], u_NR.shape[1]
    db, weights_N = b.new_empty(b.shape), None
    dy_XGW, b_EGWR, db_EGWR = (t.unsqueeze(1) for t in (dy, b, db)) if gathered else _halves(dy, b, db)
    E, G, W, _ = b_EGWR.shape
    config = choose_low_rank_backward(operands(dy), static_size(W), rank, gathered, capability(dy))
    if config is None:
        return _apart(dy, u_NR, b, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2)
    if weights_TK is not None:
        # In their dtype they are too short to be on their way while rows are multiplied.
        weights_N = weights_TK.reshape(-1).index_select(0, slots_N.clamp(min=0)).float()
    num_tiles = G * ceil_div(W, config.block_m)
    du_CNR = dy.new_empty((num_tiles, N, rank), dtype=torch.float32)
    launch(
        _low_rank_backward_kernel,
        E * num_tiles,
        dy_XGW, u_NR, b_EGWR, weights_N, slots_N, offsets_E1, du_CNR, db_EGWR,
        N, E, W,
        *dy_XGW.stride(), *u_NR.stride(), *b_EGWR.stride(), *db_EGWR.stride(),
        R=rank, TOP_K=top_k, GATHERED=gathered, ALLOW_TF32=allows_tf32(), EVEN_W=is_multiple(W, config.block_m),
        EVEN_R=is_multiple(rank, config.block_n),
        BLOCK_W=config.block_m, BLOCK_R=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return _added_up(du_CNR).to(dy.dtype), db


def _added_up(du_CNR: Tensor) -> Tensor:
    """The sum over tiles. Additions are one pass of generated code, where a sum of eight or more is a slower reduction.

    The order of the reduction depends on the number of rows, that of additions does not.
    """
    in_order = is_traceable() or is_batch_invariant()
    return functools.reduce(torch.add, du_CNR.unbind(0)) if in_order else du_CNR.sum(0)


def _halves(dy_NGW: Tensor, b_EGWR: Tensor, db_EGWR: Tensor) -> list[Tensor]:
    """The same with one half, of the columns of all, where memory has them so: fewer tiles then reach over an edge."""
    operands_1GW = [dy_NGW, b_EGWR, db_EGWR]
    if all(tensor.stride(1) == tensor.shape[2] * tensor.stride(2) for tensor in operands_1GW):
        return [tensor.flatten(1, 2).unsqueeze(1) for tensor in operands_1GW]
    return operands_1GW


def _apart(dy, u_NR, b, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2) -> tuple[Tensor, Tensor]:
    """Both gradients, a pass over dy for each: ranks so high that what tiles add to du would be as wide as dy."""
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    like = b.new_empty(b.shape)
    if dy.dim() == 2:
        du_NR = launch_expert_up(dy, [b.mT.unsqueeze(1)], [], None, *routing, IDENTITY)[0].squeeze(1)
        given = (dy, u_NR.unsqueeze(1), [like.mT], weights_TK, slots_N, offsets_E1, positions_TK.shape[1])
        return du_NR, launch_expert_weight_grad(*given)[0].mT
    weights_N1 = None if weights_TK is None else weights_TK.reshape(-1, 1).index_select(0, slots_N.clamp(min=0))
    rows_N = torch.arange(u_NR.shape[0], dtype=torch.int32, device=dy.device)
    db = launch_expert_weight_grad(u_NR, dy, [like], weights_N1, rows_N, offsets_E1, 1)[0]
    return launch_expert_rows(dy, b, offsets_E1, blocks_B2), db
