"""Numbers that processes tell each other on the host."""

import gc
import random
import tempfile
import time
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from moeblaze_ops.ops.sharded import host_numbers
from tests.tools.ranks import assert_passed, run_checks


def _turns(way) -> None:
    generators = [random.Random(rank) for rank in range(dist.get_world_size())]
    for _ in range(300):
        numbers = [generator.randrange(1 << 20) for generator in generators]
        if random.random() < 0.05:
            time.sleep(0.002)
        assert way.largest(numbers[dist.get_rank()], "a layer") == max(numbers)


def _board(group: dist.ProcessGroup | None = None) -> host_numbers._Board:
    way = host_numbers._shared_memory(host_numbers._Messages(group or dist.group.WORLD))
    assert isinstance(way, host_numbers._Board)
    return way


def check_shared_memory() -> None:
    _turns(_board())


def check_messages() -> None:
    _turns(host_numbers._Messages(dist.group.WORLD))


def check_by_name() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert host_numbers.largest_number(rank, dist.group.WORLD.group_name, "a layer") == ranks - 1
    assert host_numbers.largest_number(0, dist.group.WORLD.group_name, "a layer") == 0


def check_second_world() -> None:
    """What was kept for a group goes with it: one of the same name begins again, with fewer ranks, or in another order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = {name := dist.group.WORLD.group_name}
    assert host_numbers.largest_number(rank, name, "a layer") == ranks - 1
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for number, new_rank, size in ((1, ranks - 1 - rank, ranks), (2, rank, 1), (3, rank, ranks)):
        kept = weakref.ref(host_numbers._way(name))
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        assert kept() is None
        store = dist.FileStore(f"{folder[0]}/{number}{rank if size == 1 else ''}", size)
        dist.init_process_group(
            "gloo", store=store, rank=0 if size == 1 else new_rank, world_size=size, timeout=timedelta(seconds=60)
        )
        names.add(name := dist.group.WORLD.group_name)
        assert host_numbers.largest_number(new_rank, name, "a layer") == (rank if size == 1 else ranks - 1)
    assert len(names) == 1


def check_silent_rank() -> None:
    """Rank 1 tells no number: the others raise when the time of the group is over, and from then on."""
    for way in (_board(group := dist.new_group(timeout=timedelta(seconds=1))), host_numbers._Messages(group)):
        if dist.get_rank() != 1:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="every rank must run the layer, got no word of rank 1 .*(1 s|1000ms)"):
                    way.largest(3, "a layer")
        dist.barrier()


def check_gone_rank() -> None:
    """Rank 1 gives its lock back, as a process that ends: the others do not wait until the time of the group is over."""
    way = _board()
    if dist.get_rank() == 1:
        way._file.close()
    else:
        with pytest.raises(RuntimeError, match="got no word of rank 1, which has ended"):
            way.largest(3, "a layer")
    dist.barrier()


def check_another_layer() -> None:
    """The last rank asks for another layer, or for an equal one elsewhere: all raise, and name it, whatever they asked for.

    A rank that does not know where its layer is takes that of the others.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    is_last, other = rank == last, 0 if rank == last else last
    for way in (_board(), host_numbers._Messages(dist.group.WORLD)):
        assert way.largest(rank, "4 experts", "" if is_last else "layers.0") == last
        asked = "8 experts" if is_last else "4 experts"
        with pytest.raises(RuntimeError, match=f"got another one on rank {other} than here: {asked}"):
            way.largest(3, asked)
    for way in (_board(), host_numbers._Messages(dist.group.WORLD)):
        path = f"layers.{int(is_last)}"
        with pytest.raises(RuntimeError, match=f"got another one on rank {other} than here: {path}, 4 experts"):
            way.largest(3, "4 experts", path)
    dist.barrier()


CHECKS = {
    "shared memory": check_shared_memory,
    "messages": check_messages,
    "by name": check_by_name,
    "a second world": check_second_world,
    "a silent rank": check_silent_rank,
    "a rank that is gone": check_gone_rank,
    "another layer": check_another_layer,
}


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_numbers(outcomes, name):
    assert_passed(outcomes[name])
