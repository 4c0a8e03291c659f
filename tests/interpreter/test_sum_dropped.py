"""The sum of dropped rows and its gradient in Triton's interpreter: the numbers that torch draws, bit for bit."""

import pytest
import torch

from moeblaze_ops.kernels.rows.sum_dropped import launch_sum_dropped, launch_sum_dropped_backward
from moeblaze_ops.ops.sum_dropped import sum_dropped, sum_dropped_backward

SIZES = [(5, 3, 40, torch.float32), (3, 1, 128, torch.bfloat16), (0, 2, 8, torch.float32)]


@pytest.mark.parametrize(("T", "K", "D", "dtype"), SIZES)
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_launchers(T, K, D, dtype, p):
    torch.manual_seed(0)
    rows, seed = torch.randn(T * K, D).to(dtype), torch.tensor([2.0**24 - 7])
    torch.testing.assert_close(launch_sum_dropped(rows, seed, K, p), sum_dropped(rows, seed, K, p))
    dout = torch.randn(D, T).to(dtype).T
    torch.testing.assert_close(launch_sum_dropped_backward(dout, seed, K, p), sum_dropped_backward(dout, seed, K, p))
