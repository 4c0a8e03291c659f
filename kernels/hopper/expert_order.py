"""Orders of work: of experts, for the tiles of a weight gradient, and of row blocks, for products of few columns.

A weight gradient begins with the experts that have most rows. Programs take tiles forth and back, so that all end at about the
same time however skewed the routing is. Behind the experts in this order stands how many of them have rows or are marked as
fresh: where gradients are added to what is there, nothing is to be done for the rest. Where a tile reads much more of the
gathered tokens than of rows, all experts with rows have their turn with one block of columns before the next one: of tokens
that several experts read, those columns are in L2.

A product of few columns reads little beside its tokens. In the block schedule an expert's blocks follow each other, so what runs
at a time is a few experts, which read all tokens. Spread, all experts go through their rows at one pace: their rows are in the
order of the tokens, so what runs at a time reads the same ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.hopper.gluon_api import aggregate, gl, gluon
from moeblaze_ops.kernels.hopper.launch import launch_compiled


@triton.jit
def _work(offsets_ptr, fresh_ptr, experts, exists, HAS_FRESH: tl.constexpr):
    """What experts are ordered by: their rows, and of two with as many the one that is fresh."""
    rows = tl.load(offsets_ptr + experts + 1, mask=exists, other=0) - tl.load(offsets_ptr + experts, mask=exists, other=0)
    work = 2 * rows
    if HAS_FRESH:
        work += tl.load(fresh_ptr + experts, mask=exists, other=0)
    return work


@triton.jit
def _order_experts_kernel(offsets_ptr, fresh_ptr, order_ptr, num_experts, HAS_FRESH: tl.constexpr, BLOCK_E: tl.constexpr):
    """``order[i]`` is the expert with the i-th most work; of two with as much, the lower one first. One program an expert."""
    expert = tl.program_id(0)
    own_work = _work(offsets_ptr, fresh_ptr, expert, expert < num_experts, HAS_FRESH)
    rank = 0
    num_visited = 0
    for start in range(0, num_experts, BLOCK_E):
        others = start + tl.arange(0, BLOCK_E)
        exists = others < num_experts
        work = _work(offsets_ptr, fresh_ptr, others, exists, HAS_FRESH)
        is_before = exists & ((work > own_work) | ((work == own_work) & (others < expert)))
        rank += tl.sum(is_before.to(tl.int32), 0)
        num_visited += tl.sum((work > 0).to(tl.int32), 0)
    tl.store(order_ptr + rank, expert)
    tl.store(order_ptr + num_experts, num_visited, mask=expert == 0)


@aggregate
class ExpertTiles:
    """Output tiles, those of the most loaded expert first, or with BY_COLUMNS the first ones of all ``num_busy`` experts."""

    order_ptr: gl.tensor
    offsets_ptr: gl.tensor
    num_experts: gl.tensor
    num_busy: gl.tensor
    BLOCKS: gl.constexpr
    BY_COLUMNS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, order_ptr, offsets_ptr, num_experts, num_busy, BLOCKS, BY_COLUMNS):
        self.order_ptr = order_ptr
        self.offsets_ptr = offsets_ptr
        self.num_experts = num_experts
        self.num_busy = num_busy
        self.BLOCKS = gl.constexpr(BLOCKS)
        self.BY_COLUMNS = gl.constexpr(BY_COLUMNS)

    @gluon.jit
    def rounds(self):
        return gl.cdiv(self.num_experts * self.BLOCKS, gl.num_programs(0))

    @gluon.jit
    def locate(self, turn):
        """``(expert, tile within it, first row, end of rows, whether there is such a tile)``, forth and back."""
        forth = gl.program_id(0)
        place = gl.where(turn % 2 == 0, forth, gl.num_programs(0) - 1 - forth)
        index = turn * gl.num_programs(0) + place
        exists = index < self.num_experts * self.BLOCKS
        index = gl.where(exists, index, 0)
        rank = index // self.BLOCKS
        tile = index % self.BLOCKS
        if self.BY_COLUMNS:
            num_busy = gl.maximum(self.num_busy, 1)
            is_busy = index < self.num_busy * self.BLOCKS
            rank = gl.where(is_busy, index % num_busy, rank)
            tile = gl.where(is_busy, index // num_busy, tile)
        expert = gl.load(self.order_ptr + rank)
        first = gl.load(self.offsets_ptr + expert)
        end = gl.load(self.offsets_ptr + expert + 1)
        return expert, tile, first, gl.where(exists, end, first), exists


def order_experts(offsets_E1: Tensor, fresh_E: Tensor | None = None) -> Tensor:
    """The experts, most rows first, and how many of them have rows or are marked as fresh by a 1. Shape [E + 1], int32."""
    num_experts = offsets_E1.shape[0] - 1
    order_E1 = torch.empty_like(offsets_E1)
    has_fresh = fresh_E is not None
    given = (offsets_E1, fresh_E if has_fresh else offsets_E1, order_E1, num_experts, has_fresh, 256)
    launch_compiled(_order_experts_kernel, num_experts, order_E1.device, given, num_warps=1)
    return order_E1


@triton.jit
def _spread_blocks_kernel(
    blocks_ptr, begins_ptr, ends_ptr, spread_ptr, num_experts, ROW_BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    """One program a block. Block j of n of an expert is followed by those of all experts that begin at (j + 1/2) / n or later."""
    index = tl.program_id(0)
    num_blocks = tl.load(blocks_ptr)
    if index == 0:
        tl.store(spread_ptr, num_blocks)
        if num_blocks == 0:  # a kernel looks up its first tile before it knows that there is none
            tl.store(spread_ptr + 2, -1)
            tl.store(spread_ptr + 3, 0)
    if index < num_blocks:
        expert = tl.load(blocks_ptr + 2 * (1 + index))
        row = tl.load(blocks_ptr + 2 * (1 + index) + 1)
        first = tl.load(begins_ptr + expert)
        size = tl.cdiv(tl.load(ends_ptr + expert + 1) - first, ROW_BLOCK).to(tl.int64)
        place = 2 * ((row - first) // ROW_BLOCK) + 1  # in halves of a block
        rank = place.to(tl.int64) * 0
        for start in range(0, num_experts, BLOCK_E):
            others = start + tl.arange(0, BLOCK_E)
            exists = others < num_experts
            begins = tl.load(begins_ptr + others, mask=exists, other=0)
            sizes = tl.cdiv(tl.load(ends_ptr + others + 1, mask=exists, other=0) - begins, ROW_BLOCK)
            # Blocks i with (2 i + 1) / sizes less than place / size, or as much if their expert comes first.
            before = (place * sizes.to(tl.int64) + size - (others >= expert).to(tl.int64)) // (2 * size)
            rank += tl.sum(tl.where(exists, before, 0), 0)
        tl.store(spread_ptr + 2 * (1 + rank), expert)
        tl.store(spread_ptr + 2 * (1 + rank) + 1, row)


def spread_blocks(blocks_B2: Tensor, ends_E1: Tensor, begins_E: Tensor | None = None) -> Tensor:
    """The block schedule with experts side by side, like ``blocks_B2``, unwritten behind the blocks that are used.

    Args:
        ends_E1, begins_E: where an expert's rows end and begin, as in ``RowPart``; None: where those of the one before it end.
    """
    spread_B2 = torch.empty_like(blocks_B2)
    begins_E = ends_E1 if begins_E is None else begins_E
    given = (blocks_B2, begins_E, ends_E1, spread_B2, ends_E1.shape[0] - 1, ROW_BLOCK, 256)
    launch_compiled(_spread_blocks_kernel, blocks_B2.shape[0] - 1, blocks_B2.device, given, num_warps=1)
    return spread_B2
