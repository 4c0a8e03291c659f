"""Ranks of several hosts: a token crosses once to each host that has an expert of it, and goes on from there."""

import functools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moeblaze_ops import config
from moeblaze_ops.ops.sharded import hosts
from moeblaze_ops.ops.sharded.exchange import choose_exchange, moe_over_ranks
from tests.distributed import test_all_to_all as one_host
from tests.ops.sharded.two_hosts import fork_ranks, run_on_two_hosts, two_hosts_are_possible
from tests.tools.ranks import assert_passed, run_checks


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
LAYERS = {
    "compiled, two experts a token": ("stacked_loop", 2, [(5, 0, 33, 1)]),
    "compiled, all experts": ("dense_einsum", 4, one_host.WITHOUT_NONE[4]),
}


def check_says() -> None:
    """What moves between hosts, beside what the ways of one host would move."""
    from moeblaze_ops.distributed import shard_experts
    from tests.corpus.zoo import catalogue as zoo
    from tests.distributed.test_sharded_tokens import compiled
    from tests.tools import sharded_layers as harness

    model = one_host.layer("dense_einsum", 2)
    shard_experts(model, harness.axis())
    run, _, reports = compiled(model)
    with torch.no_grad():
        run(harness.tokens_of(dist.get_rank(), zoo.D, 4096))
    row = 5 * 4096 * zoo.D * 8 / 2**20
    wanted = f"; {row * 5 / 6:.1f} MiB between 2 hosts, not {row * 3:.1f} MiB by all-gather or {row * 1.5:.1f} MiB by all-to-all"
    assert reports[0].candidates[0].became.endswith(wanted), reports[0].candidates[0].became


CHECKS = {
    **{name: functools.partial(on_two_hosts, one_host.check_function, *given) for name, given in FUNCTION.items()},
    **{name: functools.partial(on_two_hosts, one_host.check_layer, *given) for name, given in LAYERS.items()},
    "checkpointed in the graph": functools.partial(on_two_hosts, one_host.check_checkpointed, True, 4),
    "says": functools.partial(on_two_hosts, check_says),
}


SIZES = E, D, F, K = 8, 16, 24, 2
PATIENCE_S = 20
WAYS = ("auto", "all_gather", "all_to_all")


def step(exchange: str, is_exact: bool) -> dict[str, torch.Tensor]:
    """Output and gradients of a layer of all ranks, of numbers whose sums no order changes or of any."""

    def drawn(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        any_number = torch.randn(shape, generator=generator)
        return any_number.mul(2).round() if is_exact else any_number

    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    here, count = slice(rank * E // 4, (rank + 1) * E // 4), (5, 0, 33, 8)[rank]
    weights = [drawn(seed, *shape)[here] for seed, shape in enumerate(((E, 1, F, D), (E, F, D)))]
    leaves = [each.requires_grad_() for each in (drawn(rank + 10, count, D), drawn(rank + 20, count, K), *weights)]
    x, routing, w_up, w_down = leaves
    ids = one_host.routing_of(rank, count, K, "any")
    config.exchange = exchange
    out = moe_over_ranks(x, routing, ids, [w_up], [], [w_down], [], "relu", *choose_exchange(group, K, False))
    out.backward(drawn(rank + 30, count, D))
    return {"output": out.detach()} | {name: t.grad for name, t in zip(("x", "weights", "up", "down"), leaves, strict=True)}


def run_rank(folder: str, told_hosts: bool, rank: int) -> None:
    """Steps of all ways; then the last rank is killed, of two hosts with their wire, and the others write what they see."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    if told_hosts:
        hosts._this_host = lambda: rank // 2
    hosts.prepare(dist.group.WORLD.group_name)
    results = {(way, is_exact): step(way, is_exact) for way in WAYS for is_exact in (True, False)}
    found = {"results": results, "hosts": len(hosts.hosts_of(dist.group.WORLD.group_name)), "seen": ""}
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    if rank == 3:
        if found["hosts"] and not told_hosts:
            subprocess.run(["ip", "link", "delete", "wire"], check=True)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        step("auto", True)
    except RuntimeError as error:
        found["seen"] = f"{error}"
        assert time.monotonic() - started < 60
    torch.save(found, f"{folder}/{rank}")


def run_host(folder: str, *told_hosts: bool) -> None:
    for told in told_hosts:
        os.makedirs(f"{folder}/{told}", exist_ok=True)
        fork_ranks(functools.partial(run_rank, f"{folder}/{told}", told))


def program(folder: str, *told_hosts: bool) -> list[str]:
    return [sys.executable, "-c", f"from tests.ops.sharded import test_hosts; test_hosts.run_host({folder!r}, *{told_hosts})"]


@pytest.mark.skipif(not two_hosts_are_possible(), reason="needs namespaces of users and networks")
def test_two_hosts_of_a_network(tmp_path):
    """Each way has the bits of one host, and of one that takes its ranks for two; without rank 3, or its host, others raise."""
    for name in ("two", "one"):
        (tmp_path / name).mkdir()
    run_on_two_hosts(program(f"{tmp_path}/two", False), str(tmp_path), 200)
    own = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    subprocess.run(program(f"{tmp_path}/one", False, True), env={**os.environ, **own}, timeout=200, check=True)
    for rank in range(4):
        two, one, told = (torch.load(tmp_path / name / str(rank)) for name in ("two/False", "one/False", "one/True"))
        assert (two["hosts"], one["hosts"], told["hosts"]) == (2, 0, 2)
        for (way, is_exact), found in two["results"].items():
            same = told if way == "auto" and not is_exact else one
            for name, value in found.items():
                assert torch.equal(value, same["results"][way, is_exact][name]), (way, name)
                assert not is_exact or torch.equal(value, two["results"]["all_gather", True][name]), (way, name)
                torch.testing.assert_close(value, one["results"][way, is_exact][name])
        for end in (two, one):
            assert (rank == 3) == (not end["seen"]), (rank, end["seen"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(outcomes, name):
    assert_passed(outcomes[name])


def test_ranks_per_host():
    """Blocks of ranks, as many on each host; all ranks are as of one host otherwise."""
    found = {(7, 7, 3, 3): 2, (1, 1, 1): 3, (1, 2): 1, (1, 1, 2): 3, (1, 2, 1, 2): 4, (1, 1, 2, 2, 1, 1): 6}
    for of_ranks, count in found.items():
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
