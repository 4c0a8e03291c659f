"""Numbers of a seed and a place: evenly spread, of no relation between rows, features and seeds, and dropout by them."""

import pytest
import torch

from moeblaze_ops.arguments.draws import draw, dropped_rows
from moeblaze_ops.kernels.formulas.dropped import factor_of_kept


def table(seed, rows=2048, columns=512):
    return draw(torch.tensor(float(seed)), torch.arange(rows).unsqueeze(1), torch.arange(columns))


def correlation(a, b):
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()))


def test_numbers_are_evenly_spread():
    numbers = table(7)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 64, 0, 1)
    expected = numbers.numel() / 64
    assert ((counts - expected).square() / expected).sum() < 63 + 6 * (2 * 63) ** 0.5  # chi square of 63 degrees of freedom
    assert len(numbers.unique()) > 0.9 * numbers.numel()  # of 2 ** 23


@pytest.mark.parametrize("other", [8, 9, 7 + 2**16, 2**24 - 1])
def test_neighbours_have_nothing_in_common(other):
    numbers = table(7)
    bound = 6 / numbers.numel() ** 0.5
    pairs = {"seeds": (numbers, table(other))}
    for step in (1, 2, 64):
        pairs[f"rows {step}"] = numbers[:-step], numbers[step:]
        pairs[f"columns {step}"] = numbers[:, :-step], numbers[:, step:]
        pairs[f"seeds, shifted {step}"] = numbers[:, :-step], table(other)[:, step:]
    assert all(abs(correlation(*pair)) < bound for pair in pairs.values()), {n: correlation(*p) for n, p in pairs.items()}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for(p):
    rows = torch.ones(512, 1024, dtype=torch.float64)
    dropped = dropped_rows(rows, torch.tensor(3.0), p)
    assert set(dropped.unique().tolist()) == {0.0, factor_of_kept(p)}
    share = (dropped == 0).double()
    assert abs(share.mean() - p) < 6 * (p * (1 - p) / rows.numel()) ** 0.5
    assert (share.mean(0) - p).abs().max() < 6 * (p * (1 - p) / 512) ** 0.5
    assert (share.mean(1) - p).abs().max() < 6 * (p * (1 - p) / 1024) ** 0.5


def test_what_is_dropped_is_zero_times_it():
    rows = torch.full((4, 4), float("nan"))
    assert dropped_rows(rows, torch.tensor(0.0), 0.5).isnan().all()
    assert not dropped_rows(torch.ones(4, 4), torch.tensor(0.0), 1.0).any()
    assert torch.equal(dropped_rows(torch.ones(4, 4), torch.tensor(0.0), 0.0), torch.ones(4, 4))
