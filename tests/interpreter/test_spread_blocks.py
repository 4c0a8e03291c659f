"""The block schedule with experts side by side."""

from fractions import Fraction

import pytest
import torch

import moeblaze_ops  # noqa: F401  (registers the operators)
from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.hopper.expert_order import spread_blocks

CASES = {
    "uneven": [700, 130, 0, 1, 512],
    "even": [256, 256, 256],
    "one_expert_has_all": [0, 1500, 0, 0],
    "no_rows": [0, 0],
    "many_experts": [131] * 300,
}


@pytest.mark.parametrize("case", CASES)
def test_all_experts_go_through_their_blocks_at_one_pace(case):
    sizes = CASES[case]
    experts = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    experts = experts[torch.randperm(len(experts))] if len(experts) else torch.tensor([-1, -1])
    _, offsets_E1, _, blocks_B2 = torch.ops.moeblaze.dispatch(experts.unsqueeze(1), len(sizes))
    num_blocks = int(blocks_B2[0, 0])
    of_experts = [-(-size // ROW_BLOCK) for size in sizes]

    def place(block):
        expert, row = block
        index = (row - int(offsets_E1[expert])) // ROW_BLOCK
        return Fraction(2 * index + 1, 2 * of_experts[expert]), expert

    spread_B2 = spread_blocks(blocks_B2, offsets_E1)
    assert int(spread_B2[0, 0]) == num_blocks
    assert spread_B2[1 : 1 + num_blocks].tolist() == sorted(blocks_B2[1 : 1 + num_blocks].tolist(), key=place)
