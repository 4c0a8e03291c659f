"""With ``config.batch_invariant`` a token's results have the same bits on one rank and on several that share the experts."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.batch import rank_cases
from tests.tools.ranks import assert_passed, run_checks


def check(kind: str) -> None:
    """Each rank has other tokens, and other numbers of them; what they give is what they give in one batch of all."""
    import moeblaze_ops
    from moeblaze_ops import config
    from tests.corpus.zoo import catalogue as zoo
    from tests.tools import sharded_layers as harness

    config.batch_invariant = True

    def layer():
        torch.manual_seed(0)
        model = moeblaze_ops.MoE(D=zoo.D, F=24, E=8, K=2) if kind == "module" else zoo.stacked("stacked_loop")
        return model.float()

    def compiled(model):
        return model if kind == "module" else torch.compile(model, backend="moeblaze", dynamic=True)

    counts = [3 + 5 * rank for rank in range(dist.get_world_size())]
    inputs = [harness.tokens_of(rank, zoo.D, count).float() for rank, count in enumerate(counts)]
    alone, model = layer(), layer()
    wanted = harness.train(alone, compiled(alone), torch.cat(inputs))
    moeblaze_ops.shard_experts(model, harness.axis(), ["w_up", "w_down"] if kind == "module" else None)
    torch._dynamo.reset()
    got = harness.train(model, compiled(model), inputs[dist.get_rank()])
    first = sum(counts[: dist.get_rank()])
    for name in ("output", "gradient of x"):
        assert torch.equal(got[name], wanted[name][first : first + counts[dist.get_rank()]]), name


@pytest.mark.parametrize(("kind", "ranks"), [("module", 2), ("module", 4), ("loop", 2)])
def test_ranks_change_no_bit(kind, ranks, tmp_path):
    assert_passed(run_checks({kind: functools.partial(check, kind)}, ranks, str(tmp_path))[kind])


SEED = range(1, 2)
"""Of a layer with three experts a token."""


def check_that_moving_tokens_is_caught() -> None:
    """Tokens of a proven layer move although ``config.batch_invariant`` is set: each rank rounds its part of a token's sum."""
    from types import SimpleNamespace
    from unittest import mock

    from moeblaze_ops import config
    from moeblaze_ops.lowering.rewrite import sharded

    moved = mock.patch.object(sharded, "config", SimpleNamespace(**config.snapshot() | {"batch_invariant": False}))
    with moved, pytest.raises(AssertionError, match="rows that differ"):
        rank_cases.check("written", SEED, 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_batches_on_ranks_change_no_bit(ranks, tmp_path):
    """As many as seconds allow: ``tests/batch/rank_cases.py`` takes a number."""
    layers = {"eager": range(6), "compiled": range(1), "written": SEED}
    checks = {kind: functools.partial(rank_cases.check, kind, seeds, 2) for kind, seeds in layers.items()}
    if ranks == 4:
        del checks["written"]
    else:
        checks["caught"] = check_that_moving_tokens_is_caught
    for outcomes in run_checks(checks, ranks, str(tmp_path)).values():
        assert_passed(outcomes)
