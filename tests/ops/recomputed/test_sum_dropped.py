"""Dropout in the sum over a token's slots: what is drawn, its gradients, and bad calls."""

import pytest
import torch
from torch.library import opcheck

from moeblaze_ops.arguments.draws import dropped_rows
from moeblaze_ops.ops.sum_dropped import sum_dropped, sum_dropped_backward

SIZES = {"several": (6, 3, 20), "one_slot": (5, 1, 8), "one_token": (1, 4, 7), "no_tokens": (0, 2, 8)}


def operands(T, K, D, dtype=torch.float64, seed=12345.0):
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    return torch.randn(T * K, D, dtype=dtype), torch.tensor([seed], dtype=wide), K, 0.3


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_it_is_the_sum_of_dropped_rows(sizes):
    rows, seed, K, p = operands(*sizes)
    leaf = rows.requires_grad_()
    got, expected = sum_dropped(leaf, seed, K, p), dropped_rows(leaf, seed, p).view(-1, K, sizes[2]).sum(1)
    torch.testing.assert_close(got, expected)
    dout = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(out, leaf, dout) for out in (got, expected)))


def test_half_precision_is_rounded_once():
    rows, seed, K, p = operands(64, 8, 32, torch.bfloat16)
    assert torch.equal(sum_dropped(rows, seed, K, p), sum_dropped(rows.float(), seed, K, p).bfloat16())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_opcheck(sizes):
    rows, seed, K, p = operands(*sizes)
    opcheck(sum_dropped, (rows.requires_grad_(), seed, K, p))
    opcheck(sum_dropped, (rows.detach().float().T.contiguous().T, seed.float(), K, p))
    dout = torch.randn(sizes[0], sizes[2], dtype=torch.float64).requires_grad_()
    opcheck(sum_dropped_backward, (dout, seed, K, p))


def test_higher_gradients():
    rows, seed, K, p = operands(3, 2, 4)
    torch.autograd.gradcheck(lambda x: sum_dropped(x, seed, K, p), rows.requires_grad_(), check_forward_ad=True)
    torch.autograd.gradgradcheck(lambda x: sum_dropped(x, seed, K, p).square(), rows)


REJECTED = {
    r"rows_ND must have 2 dimensions": {"rows": torch.zeros(6)},
    r"rows_ND must have a multiple of top_k = 2 rows, got 5": {"rows": torch.zeros(5, 4)},
    r"seed must have shape \[1\], got shape \[2\]": {"seed": torch.zeros(2)},
    r"seed must be torch.float32, got torch.float64": {"seed": torch.zeros(1, dtype=torch.float64)},
    r"top_k must be at least 1, got 0": {"K": 0},
    r"p must be from 0 to 1, got 1.5": {"p": 1.5},
}


@pytest.mark.parametrize("message", REJECTED)
def test_bad_calls(message):
    given = {"rows": torch.zeros(6, 4), "seed": torch.zeros(1), "K": 2, "p": 0.5} | REJECTED[message]
    with pytest.raises((ValueError, TypeError), match=f"sum_dropped: {message}"):
        sum_dropped(*given.values())
