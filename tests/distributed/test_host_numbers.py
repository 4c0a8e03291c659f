"""Numbers that processes tell each other on the host."""

import random
import time

import pytest
import torch.distributed as dist

from moeblaze_ops.ops.sharded import host_numbers
from tests.tools.ranks import assert_passed, run_checks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def _turns(way) -> None:
    generators = [random.Random(rank) for rank in range(dist.get_world_size())]
    for _ in range(300):
        numbers = [generator.randrange(1 << 20) for generator in generators]
        if random.random() < 0.05:
            time.sleep(0.002)
        assert way.largest(numbers[dist.get_rank()]) == max(numbers)


def check_shared_memory() -> None:
    way = host_numbers._shared_memory(dist.group.WORLD)
    assert isinstance(way, host_numbers._Board)
    _turns(way)


def check_messages() -> None:
    _turns(host_numbers._Messages(dist.group.WORLD))


def check_by_name() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert host_numbers.largest_number(rank, dist.group.WORLD.group_name) == ranks - 1
    assert host_numbers.largest_number(0, dist.group.WORLD.group_name) == 0


def check_silent_rank() -> None:
    """Rank 1 tells no number: the others raise."""
    way = host_numbers._shared_memory(dist.group.WORLD)
    host_numbers._PATIENCE_S = 0.2
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError, match="got no word of rank 1"):
            way.largest(3)


CHECKS = {
    "shared memory": check_shared_memory,
    "messages": check_messages,
    "by name": check_by_name,
    "a silent rank": check_silent_rank,
}


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_numbers(outcomes, name):
    assert_passed(outcomes[name])
