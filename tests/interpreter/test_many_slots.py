"""Sums over a token's rows where it has many slots, of which most are unused: as one sums the used ones in order."""

import pytest
import torch

from moeblaze_ops.kernels.rows.combine import combine, token_slots


@pytest.mark.parametrize("dropped", [False, True], ids=["all_rows", "first_rows"])
@pytest.mark.parametrize("K", [9, 20, 300])
def test_unused_slots_change_nothing(K, dropped):
    torch.manual_seed(0)
    T, D = 7, 40
    used = torch.rand(T, K) < 0.3
    used[2], used[3] = False, True
    positions = torch.where(used, used.flatten().cumsum(0).view(T, K) - 1, -1).int()
    rows, weights = torch.randn(int(used.sum()), D), torch.randn(T, K)
    if dropped:
        rows = rows[: len(rows) // 2]
    expected = torch.zeros(T, D)
    for k in range(K):
        here = (positions[:, k] >= 0) & (positions[:, k] < len(rows))
        expected[here] += rows[positions[here, k].long()] * weights[here, k, None]
    out, with_product = torch.empty(T, D), torch.empty(T, D)
    slots = token_slots(positions, weights, len(rows))
    combine(rows, slots, out)
    assert torch.equal(out, expected)
    left, right = torch.randn(T, 24), torch.randn(24, D)
    combine(rows, slots, with_product, (left, right))
    torch.testing.assert_close(with_product, expected + left @ right)
    in_parts = torch.empty(T, D)
    combine(rows, slots, in_parts, (left, right[:8]))
    torch.testing.assert_close(in_parts, expected + left @ right[:8].repeat(3, 1))
