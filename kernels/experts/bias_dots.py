"""The part that the down projection's bias has in the gradient of the routing weights: ``<dout[t], b[e]>`` of each row."""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK, choose_row_dot
from moeblaze_ops.kernels.launch import is_multiple, launch, most_row_tiles, static_size
from moeblaze_ops.kernels.tiles import count_row_tiles, load_tile, locate_row_tile


@triton.jit
def _bias_dots_kernel(
    dout_ptr, b_ptr, slots_ptr, offsets_ptr, blocks_ptr, dots_ptr,
    D,
    stride_dout_t, stride_dout_d, stride_b_e, stride_b_d,
    TOP_K: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row_tile = tl.program_id(0)
    if row_tile >= count_row_tiles(tl.load(blocks_ptr), BLOCK_M):
        return
    entry, skipped = locate_row_tile(row_tile, BLOCK_M)
    expert = tl.load(blocks_ptr + entry)
    first_row = tl.load(blocks_ptr + entry + 1) + skipped
    end_row = tl.load(offsets_ptr + expert + 1)
    if first_row >= end_row:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    row_in = rows < end_row
    slots = tl.load(slots_ptr + rows, mask=row_in, other=0)
    dout_rows = dout_ptr + (slots // TOP_K).to(tl.int64)[:, None] * stride_dout_t  # [BLOCK_M, 1]
    b_row = b_ptr + expert.to(tl.int64) * stride_b_e
    products = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for d in range(0, D, BLOCK_D):
        cols = d + tl.arange(0, BLOCK_D)
        dout = load_tile(dout_rows + cols[None, :] * stride_dout_d, row_in, cols < D, False, EVEN_D)
        b = tl.load(b_row + cols * stride_b_d, mask=cols < D, other=0.0).to(tl.float32)
        products += dout.to(tl.float32) * b[None, :]
    tl.store(dots_ptr + rows, tl.sum(products, axis=1), mask=row_in)


def bias_dots(
    dout_TD: Tensor,
    b_ED: Tensor,
    slots_N: Tensor,
    offsets_E1: Tensor,
    blocks_B2: Tensor,
    top_k: int,
    dots_N: Tensor,
) -> None:
    """Fills ``dots_N``, fp32, with ``<dout[token of row], b[expert of row]>``; two runs agree bit for bit."""
    D = b_ED.shape[1]
    config = choose_row_dot(static_size(D))
    block_m = min(config.rows, ROW_BLOCK)
    launch(
        _bias_dots_kernel,
        most_row_tiles(blocks_B2, dots_N.shape[0], block_m),
        dout_TD, b_ED, slots_N, offsets_E1, blocks_B2, dots_N,
        D,
        *dout_TD.stride(), *b_ED.stride(),
        TOP_K=top_k, EVEN_D=is_multiple(D, config.columns),
        BLOCK_M=block_m, BLOCK_D=config.columns, num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
