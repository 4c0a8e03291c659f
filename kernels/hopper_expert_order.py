"""The order in which the weight gradient visits its output tiles: experts with the most rows first.

Programs take tiles forth and back, so that all end at about the same time however skewed the routing is.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.gluon_api import aggregate, gl, gluon
from moeblaze_ops.kernels.hopper_launch import launch_compiled


@triton.jit
def _order_experts_kernel(offsets_ptr, order_ptr, num_experts, BLOCK_E: tl.constexpr):
    """``order[i]`` is the expert with the i-th most rows; of two with as many, the lower one first."""
    expert = tl.program_id(0)
    load = tl.load(offsets_ptr + expert + 1) - tl.load(offsets_ptr + expert)
    rank = 0
    for start in range(0, num_experts, BLOCK_E):
        others = start + tl.arange(0, BLOCK_E)
        exists = others < num_experts
        first = tl.load(offsets_ptr + others, mask=exists, other=0)
        loads = tl.load(offsets_ptr + others + 1, mask=exists, other=0) - first
        is_before = exists & ((loads > load) | ((loads == load) & (others < expert)))
        rank += tl.sum(is_before.to(tl.int32), 0)
    tl.store(order_ptr + rank, expert)


@aggregate
class ExpertTiles:
    """Output tiles, those of the most loaded expert first."""

    order_ptr: gl.tensor
    offsets_ptr: gl.tensor
    num_experts: gl.tensor
    BLOCKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, order_ptr, offsets_ptr, num_experts, BLOCKS):
        self.order_ptr = order_ptr
        self.offsets_ptr = offsets_ptr
        self.num_experts = num_experts
        self.BLOCKS = gl.constexpr(BLOCKS)

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
        expert = gl.load(self.order_ptr + index // self.BLOCKS)
        first = gl.load(self.offsets_ptr + expert)
        end = gl.load(self.offsets_ptr + expert + 1)
        return expert, index % self.BLOCKS, first, gl.where(exists, end, first), exists


def order_experts(offsets_E1: Tensor) -> Tensor:
    """The experts, most rows first. Shape [E], int32."""
    num_experts = offsets_E1.shape[0] - 1
    order_E = offsets_E1.new_empty(num_experts)
    launch_compiled(_order_experts_kernel, num_experts, order_E.device, (offsets_E1, order_E, num_experts, 256), num_warps=1)
    return order_E
