"""Random batches of known tokens on ranks that share the experts, and how many bits are not those of one batch on one rank.

Each rank has tokens of a pool in an order of its own, as many as it happens to have, none included, with padding, in some calls
of the layer. Which rank has a token, and beside which others, changes no bit of its output, of its gradient or of its routing
weights'.

    python tests/batch/rank_cases.py --ranks 4 --layers 10 --cases 5         # of each layer; eager and compiled
"""

import argparse
import copy
import functools
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from tests.batch.cases import Case, Layer, Pool, Sizes, WrittenLayer, different_bits, run  # noqa: E402
from tests.tools.ranks import run_checks  # noqa: E402

POOL = 40
KINDS = ("eager", "compiled", "written")
"""Operators as they are, compiled, and rewritten from sorted rows and grouped products, whose routing weights are their own."""


def draw_sizes(kind: str, generator: torch.Generator) -> Sizes:
    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    E = dist.get_world_size() * one_of(1, 2, 3)
    D, F, K, written = one_of(16, 33, 64), one_of(8, 17, 48), min(one_of(1, 2, 3), E), kind == "written"
    if written:  # grouped products take rows of 16 bytes, in bf16
        return Sizes(one_of(16, 64), one_of(8, 48), E, K, one_of("silu", "swiglu"))
    return Sizes(D, F, E, K, one_of("silu", "swiglu", "geglu", "relu2"), one_of(True, False), one_of("output", "input"))


def draw_calls(kind: str, generator: torch.Generator) -> list[Case]:
    """What this rank has in each call of the layer: as many calls on all of them.

    What Dynamo captures of ``torch._grouped_mm`` asserts that there are rows.
    """
    least = int(kind == "written")
    calls = []
    for _ in range(1 + int(torch.randint(3, (), generator=generator))):
        of_ranks = []
        for _ in range(dist.get_world_size()):
            T = (least, 1, 2, 7, POOL, 90)[int(torch.randint(6, (), generator=generator))]
            distinct = (POOL, POOL, 1, 3)[int(torch.randint(4, (), generator=generator))]
            tokens = torch.randperm(POOL, generator=generator)[torch.randint(distinct, (T,), generator=generator)]
            is_padding = torch.rand(T, generator=generator) < (0, 0.3)[int(torch.randint(2, (), generator=generator))]
            filler = (0.0, 1e4, float("nan"))[int(torch.randint(3, (), generator=generator))]
            of_ranks.append(Case(torch.where(is_padding, -1, tokens), filler, (T,)))
        calls.append(of_ranks[dist.get_rank()])
    return calls


def differing(kind: str, seed: int, cases: int) -> int:
    """Rows of this rank's results that differ, in random cases of one random layer."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes, dtype = draw_sizes(kind, generator), torch.float32 if seed % 2 and kind != "written" else torch.bfloat16
    one = (WrittenLayer if kind == "written" else Layer)(sizes, dtype, "cpu")
    K = None if kind == "written" else sizes.K
    sharded = copy.deepcopy(one)
    pool = Pool(Layer.forward.__get__(one), sizes, dtype, "cpu", POOL)
    shard_experts(sharded, harness.axis(), [name for name, _ in one.named_parameters() if name != "router"])
    torch._dynamo.reset()
    layer = sharded if kind == "eager" else torch.compile(sharded, backend="moeblaze", dynamic=True)
    wrong = 0
    for case in (case for _ in range(cases) for case in draw_calls(kind, generator)):
        if case.ends == (0,):
            run(layer, pool.x[:0], pool.dout[:0], K)
        else:
            wrong += different_bits(pool, case, lambda x, dout: run(layer, x, dout, K))
    return wrong


def check(kind: str, seeds: range, cases: int) -> None:
    """No bit differs on any rank."""
    from moeblaze_ops import config

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    config.batch_invariant = True
    try:
        found = {seed: wrong for seed in seeds if (wrong := differing(kind, seed, cases))}
    finally:
        config.batch_invariant = False
        torch.set_default_dtype(before)
    assert not found, f"{kind}: rows that differ, by seed: {found}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--cases", type=int, default=5)
    arguments = parser.parse_args()
    checks = {
        f"{kind} {seed}": functools.partial(check, kind, range(seed, seed + 1), arguments.cases)
        for kind in KINDS
        for seed in range(arguments.layers)
    }
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_checks(checks, arguments.ranks, folder)
    for name, of_ranks in outcomes.items():
        print(name, *(outcome.splitlines()[-1] for outcome in of_ranks))
    sys.exit(any(outcome != "passed" for of_ranks in outcomes.values() for outcome in of_ranks))


if __name__ == "__main__":
    main()
