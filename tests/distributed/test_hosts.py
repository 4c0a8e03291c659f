"""Ranks of several hosts: a token crosses once to each host that has an expert of it, and goes on from there."""

import functools

import pytest
import torch
import torch.distributed as dist

from moeblaze_ops.ops.sharded import hosts
from tests.distributed import test_all_to_all as one_host
from tests.tools.ranks import assert_passed, run_checks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def on_two_hosts(check, *args, **settings) -> None:
    """Run a check in a group whose ranks learned that each half of them has a host of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    if not hosts.hosts_of(group):
        hosts._this_host = lambda: rank // (ranks // 2)
        hosts.prepare(group)
    assert [dist.get_process_group_ranks(hosts.process_group(name)) for name in hosts.hosts_of(group)] == [
        [rank % 2, rank % 2 + 2],
        [rank - rank % 2, rank - rank % 2 + 1],
    ]
    check(*args, **settings)


FUNCTION = {
    "two experts a token": (2,),
    "four experts a token": (4,),
    "all to the first rank": (2, "of the first rank"),
    "no expert": (4, "none"),
}
CHECKS = {name: functools.partial(on_two_hosts, one_host.check_function, *given) for name, given in FUNCTION.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(outcomes, name):
    assert_passed(outcomes[name])


def test_ranks_per_host():
    """Blocks of ranks, as many on each host; all ranks are as of one host otherwise."""
    for of_ranks, count in (([7, 7, 3, 3], 2), ([1] * 4, 4), ([1, 2], 1), ([1, 1, 2], 3), ([1, 2, 1, 2], 4), ([1, 1, 2, 2, 1, 1], 6)):
        assert hosts.ranks_per_host(of_ranks) == count


def test_settings_that_hide_overlap(monkeypatch):
    """Each is named, once."""
    told = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    found = hosts.hide_overlap(told)
    assert found == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL"]
    hosts._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1; unset it") as warned:
        hosts._warn_of(found)
        hosts._warn_of(found)
    assert len(warned) == 2
