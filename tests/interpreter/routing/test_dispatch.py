from itertools import cycle

import pytest
import torch

from moeblaze_ops.kernels.configs import DispatchConfig
from moeblaze_ops.kernels.routing import dispatch as dispatch_module
from moeblaze_ops.kernels.routing.dispatch import launch_dispatch
from tests.corpus import reference
from tests.corpus.layers import ROUTINGS, routing

SMALL = DispatchConfig(chunk=16, step=8, bins=16, num_warps=4)


FEW_BINS = DispatchConfig(chunk=64, step=16, bins=4, num_warps=4)


def assert_dispatches(experts_TK, num_experts):
    for got, expected in zip(launch_dispatch(experts_TK, num_experts), reference.dispatch(experts_TK, num_experts), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, expected)


def in_chunks(monkeypatch):
    """However few slots there are, they are counted, scanned and placed."""
    monkeypatch.setattr(dispatch_module, "has_few_slots", lambda *_: False)


@pytest.mark.parametrize(("case", "dtype"), zip(ROUTINGS, cycle([torch.int32, torch.int64]), strict=False))
def test_dispatch_matches_reference(case, dtype, monkeypatch):
    experts = routing(case).to(dtype)
    assert_dispatches(experts, 5)
    in_chunks(monkeypatch)
    assert_dispatches(experts, 5)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("config", [SMALL, FEW_BINS], ids=["many_chunks", "many_windows"])
def test_dispatch_over_many_programs(case, config, monkeypatch):
    in_chunks(monkeypatch)
    monkeypatch.setattr(dispatch_module, "choose_dispatch", lambda num_experts: config)
    monkeypatch.setattr(dispatch_module, "_COUNT_STEP", 32)
    monkeypatch.setattr(dispatch_module, "_SCAN_BLOCK", 4)
    assert_dispatches(routing(case), 5)


@pytest.mark.parametrize("num_experts", [1, 2, 30, 31, 63, 200])
def test_dispatch_any_number_of_experts(num_experts):
    assert_dispatches(torch.randint(0, num_experts, (300, 2)), num_experts)


@pytest.mark.parametrize(
    ("slots", "num_experts"), [(0, 31), (1, 1), (1, 1022), (127, 30), (127, 31), (128, 128), (128, 1022), (129, 31), (128, 1023)]
)
def test_dispatch_of_few_slots(slots, num_experts):
    """Around the most slots and experts that one program groups."""
    assert_dispatches(torch.randint(-1, num_experts + 2, (slots, 1)), num_experts)


def test_one_program_groups_few_slots(monkeypatch):
    monkeypatch.setattr(dispatch_module, "_launch_counts", None)
    assert_dispatches(torch.randint(0, 5, (64, 2)), 5)


@pytest.mark.parametrize("few", [True, False])
def test_dispatch_ids_out_of_range_are_unused_slots(few, monkeypatch):
    if not few:
        in_chunks(monkeypatch)
    ids = [-1, 3, 4, -(2**31), 2**31 - 1, 2**32, 2**32 + 1, 0, -5, 2]
    assert_dispatches(torch.tensor(ids).view(5, 2), 4)


@pytest.mark.parametrize("few", [True, False])
def test_dispatch_reads_strided_ids(few, monkeypatch):
    if not few:
        in_chunks(monkeypatch)
    wide = torch.randint(0, 5, (3, 40))
    assert_dispatches(wide[:, ::4].t(), 5)


@pytest.mark.parametrize("used", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("top_k", "num_experts"), [(9, 200), (20, 20), (40, 31)])
def test_dispatch_lists_the_used_of_many_slots(top_k, num_experts, used, monkeypatch):
    """Over several chunks, and several steps of one; with more experts than bins all slots are sorted."""
    torch.manual_seed(0)
    in_chunks(monkeypatch)
    monkeypatch.setattr(dispatch_module, "_LISTED_TOKENS", 8)
    monkeypatch.setattr(dispatch_module, "_COUNT_STEP", 64)
    monkeypatch.setattr(dispatch_module, "_SCAN_BLOCK", 4)
    experts = torch.randint(0, num_experts, (50, top_k))
    experts[torch.rand(experts.shape) >= used] = -1
    experts[3, :2] = num_experts + 3
    config = dispatch_module.choose_dispatch(num_experts)
    for bins in (config.bins, 16):
        changed = DispatchConfig(chunk=64, step=32, bins=bins, num_warps=4)
        monkeypatch.setattr(dispatch_module, "choose_dispatch", lambda num_experts, changed=changed: changed)
        assert_dispatches(experts, num_experts)
