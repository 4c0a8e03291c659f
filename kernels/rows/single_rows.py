"""Layers with one expert a token, where nothing is summed: a row of a projection to the model width is its token's result.

    out[t, :] = weights[t] * y[r, :] + left[t, :] @ right            row r of token t; weights None: 1; the product if given

The projections write such rows where they belong, so there is no buffer of rows and no kernel that reads it. What no row
reaches, tokens with an unused slot, gets the product alone, or zeros.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import FEW_CHANNELS
from moeblaze_ops.kernels.launch import ceil_div, launch, static_size
from moeblaze_ops.kernels.tiles import add_channels

_BLOCK_T = 64
_BLOCK_D = 32


@triton.jit(do_not_specialize=["T"])
def _unused_tokens_kernel(
    positions_ptr, left_ptr, right_ptr, out_ptr,
    T, D,
    stride_left_t, stride_left_c, stride_right_c, stride_right_d,
    CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    unused = tl.load(positions_ptr + tokens, mask=tokens < T, other=0) < 0
    if tl.max(unused.to(tl.int32), axis=0) > 0:
        for d in range(0, D, BLOCK_D):
            cols = d + tl.arange(0, BLOCK_D)
            total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            if CHANNELS > 0:
                left_rows, right_cols = left_ptr + tokens * stride_left_t, right_ptr + cols * stride_right_d
                total = add_channels(total, left_rows, unused, right_cols, cols < D, stride_left_c, stride_right_c, CHANNELS)
            out_tile = out_ptr + tokens[:, None] * D + cols[None, :]
            tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=unused[:, None] & (cols < D)[None, :])


def has_single_rows(positions_TK: Tensor, product: tuple[Tensor, Tensor] | None = None) -> bool:
    """True if the rows of a projection are results: one expert a token, and a product of few channels if any."""
    num_channels = 0 if product is None else static_size(product[0].shape[1])
    return static_size(positions_TK.shape[1]) == 1 and num_channels is not None and num_channels <= FEW_CHANNELS


def num_channels(product: tuple[Tensor, Tensor] | None) -> int:
    """Channels of a product that ``has_single_rows`` accepts."""
    return 0 if product is None else product[0].shape[1]


def product_strides(product: tuple[Tensor, Tensor] | None) -> tuple:
    """Strides of the left and of the right side of a product, zeros for none."""
    return (0, 0, 0, 0) if product is None else (*product[0].stride(), *product[1].stride())


def fill_unused_tokens(positions_TK: Tensor, out_TD: Tensor, product: tuple[Tensor, Tensor] | None = None) -> None:
    """Writes the result of every token that no row reaches.

    Args:
        positions_TK: row of each token, -1 for none. Shape [T, 1], int32, contiguous.
        out_TD: the results. Shape [T, D], contiguous.
        product: ``(left_TC, right_CD)``, any strides, or None for zeros.
    """
    T, D = out_TD.shape
    left_TC, right_CD = product or (None, None)
    launch(
        _unused_tokens_kernel,
        ceil_div(T, _BLOCK_T),
        positions_TK, left_TC, right_CD, out_TD,
        T, D,
        *product_strides(product),
        CHANNELS=num_channels(product),
        BLOCK_T=_BLOCK_T, BLOCK_D=_BLOCK_D, num_warps=4, num_stages=1,
    )  # fmt: skip
