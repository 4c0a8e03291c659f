"""Rows in parts by the tokens that they are of: every row once, with the results of all rows at once."""

import pytest
import torch

from moeblaze_ops import config
from moeblaze_ops.kernels import configs
from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from moeblaze_ops.kernels.experts.expert_up_backward import launch_expert_up_backward, launch_expert_up_backward_into
from moeblaze_ops.kernels.hopper.expert_order import spread_blocks
from moeblaze_ops.kernels.routing.dispatch import launch_dispatch
from moeblaze_ops.kernels.rows.row_parts import launch_row_part

E, K = 3, 2
CASES = {
    "even": torch.arange(E).repeat(280).view(-1, K),
    "long_and_short": torch.where(torch.arange(420) < 330, 2, torch.arange(420) % 3).view(210, K),
    "one_expert_has_all": torch.ones(120, K, dtype=torch.int64),
    "no_rows_of_a_part": torch.arange(480).view(-1, K) % 3 - 9 * (torch.arange(240).view(-1, 1) >= 160),
    "no_rows": torch.full((12, K), -1),
}


def routing_of(case: str, exact: bool):
    slots_N, *rest = launch_dispatch(CASES[case].to(torch.int32), E)
    return (slots_N[: int(rest[0][-1])] if exact else slots_N, *rest)


def rows_of(part, slots_N):
    """The rows in the order of the schedule."""
    blocks = part.blocks_B2[1 : 1 + int(part.blocks_B2[0, 0])].tolist()
    ends = part.ends_E1.tolist()
    return [row for expert, first in blocks for row in range(first, min(first + ROW_BLOCK, ends[expert + 1]))]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("ranges", [[(0, 4)], [(1, 2), (0, 1), (2, 4)], [(3, 4), (2, 3), (0, 2)]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_in_the_part_of_its_token(case, ranges, exact):
    slots_N, offsets_E1, positions_TK, _ = routing_of(case, exact)
    num_slots = -(-positions_TK.numel() // 4)
    parts = [launch_row_part(slots_N, offsets_E1, range(begin * num_slots, end * num_slots)) for begin, end in ranges]
    found = []
    for (begin, end), part in zip(ranges, parts, strict=True):
        rows = rows_of(part, slots_N)
        assert all(begin <= int(slots_N[row]) // num_slots < end for row in rows)
        spread_B2 = spread_blocks(part.blocks_B2, part.ends_E1, part.begins_E)
        assert sorted(rows_of(part._replace(blocks_B2=spread_B2), slots_N)) == rows
        if not rows:  # what is looked up ahead of time
            assert part.blocks_B2[1].tolist() == spread_B2[1].tolist() == [-1, 0]
        found += rows
    assert sorted(found) == list(range(int(offsets_E1[-1])))


@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_all_rows_give(case):
    """With whole numbers, whose sums are exact in any order."""
    D, F = 8, 12
    routing = slots_N, offsets_E1, positions_TK, _ = routing_of(case, exact=False)
    T = positions_TK.shape[0]
    used = int(offsets_E1[-1])

    def whole(*shape):
        return torch.randint(-3, 4, shape).float()

    def parts():
        return [launch_row_part(slots_N, offsets_E1, slots) for slots in (range(T, T * K), range(T))]

    x, dout, weights = whole(T, D), whole(T, D), whole(T, K)
    w_up, b_up, w_down, b_down = [whole(E, 2, F, D)], [whole(E, 2, F)], [whole(E, F, D)], [whole(E, D)]
    up = (x, w_up, b_up, None, *routing, "swiglu")
    h, a = launch_expert_up(*up)
    found_h, found_a = launch_expert_up(*up, parts=parts())
    assert torch.equal(found_h[:used], h[:used]) and torch.equal(found_a[:used], a[:used])
    backward = (dout, h, w_down, b_down, weights, *routing, "swiglu")
    expected, found = launch_expert_down_backward(*backward), launch_expert_down_backward(*backward, parts=parts())
    for got, wanted, end in zip(found, expected, (used, T, used), strict=True):
        torch.testing.assert_close(got[:end], wanted[:end], rtol=1e-5, atol=1e-5)


def test_sums_are_written_token_by_token_and_column_by_column(monkeypatch):
    monkeypatch.setattr(configs, "COLUMN_UNIT", 16)
    D, F, T = 40, 12, 30
    routing = launch_dispatch(torch.randint(-1, E, (T, K), dtype=torch.int32), E)
    rows, asked = K * T, []
    found = torch.full((T, D), torch.nan)

    def column_sums(first, width):
        asked.append((first, width))
        for token, end in ((0, 7), (22, T), (7, 22)):
            yield token, found[token:end, first : first + width]

    a, weights = torch.randn(rows, F), torch.rand(T, K)
    down = (a.unsqueeze(1), a, [torch.randn(E, F, D)], [], weights, *routing, "relu")
    expected = launch_expert_down(*down)
    monkeypatch.setattr(config, "max_transient_bytes", rows * 16 * 4)
    assert launch_expert_down(*down, column_sums=column_sums).shape == (0, D)
    torch.testing.assert_close(found, expected)
    assert asked == [(0, 16), (16, 16), (32, 8)]
    up_backward = (torch.randn(rows, 2, F), [torch.randn(E, 2, F, D)], *routing)
    expected, _ = launch_expert_up_backward(up_backward[0], None, up_backward[1], None, *routing)
    launch_expert_up_backward_into(*up_backward, column_sums)
    torch.testing.assert_close(found, expected)
