"""Ranks with different numbers of tokens, none included: tokens move, and every rank does what the others do.

One compiled callable sees all steps, so ranks compile for one number, or for any, at different steps.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_shard_experts import LISTED, Skipping, layer, sharded
from tests.distributed.test_sharded_tokens import compiled, names_in
from tests.tools.ranks import assert_passed, run_checks
from tests.tools.rewrite_harness import rewriting_backend

STEPS = {
    2: [(5, 64), (64, 5), (0, 1), (5, 0), (0, 0)],
    4: [(0, 1, 5, 64), (64, 5, 1, 0), (0, 0, 0, 5)],
}
FEW_STEPS = [(5, 64), (0, 5)]
WITHOUT_NONE = [(5, 64), (1, 5), (5, 5)]


def wanted(name: str, inputs: list[Tensor]) -> dict[str, Tensor]:
    """What this rank should have, with the gradients of a single process that had all tokens."""
    from tests.tools import sharded_layers as harness

    result = harness.in_one_process(layer(name), inputs)[dist.get_rank()]
    return harness.joined_entries(result, "experts", zoo.E) if name in LISTED else result


def without_router(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank without tokens has no gradient of the router, or zeros."""
    return {key: value for key, value in results.items() if "router" not in key}


def check_steps(name: str, steps=None, first_only: bool = False, backend: str = "eager", **settings) -> None:
    """Steps of one compiled callable. ``first_only``: all tokens choose experts of the first rank."""
    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    before = {key: getattr(config, key) for key in settings}
    for key, value in settings.items():
        setattr(config, key, value)
    try:
        model = sharded(name)
        run, graphs, reports = compiled(model, backend)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            for number, counts in enumerate(steps or STEPS[world]):
                inputs = [harness.tokens_of(10 * number + r, zoo.D, count) for r, count in enumerate(counts)]
                if first_only:
                    towards = model.router.gate.weight[:2].sum(0) - model.router.gate.weight[2:].sum(0)
                    inputs = [x + 20 * towards.detach() for x in inputs]
                got = without_router(harness.train(model, run, inputs[rank]))
                harness.assert_close(got, without_router(wanted(name, inputs)))
    finally:
        for key, value in before.items():
            setattr(config, key, value)
    names = names_in(graphs)
    assert names.count("experts_over_ranks") == len(graphs) > 1, reports
    assert not [called for called in names if "redistribute" in called], names
    assert names.count("start_gather_of_tokens") == len(graphs), names


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


def check_checkpointed(within_graph: bool) -> None:
    """A layer that is run again in backward, by the compiled graph or from outside, on ranks without tokens as well."""
    from tests.tools import sharded_layers as harness

    model = sharded("stacked_loop")
    if within_graph:
        run, graphs, reports = compiled(Checkpointed(model), "aot_eager")
    else:
        once, graphs, reports = compiled(model, "aot_eager")
        run = Checkpointed(once)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for number, counts in enumerate(FEW_STEPS):
            inputs = [harness.tokens_of(10 * number + r, zoo.D, count) for r, count in enumerate(counts)]
            got = without_router(harness.train(model, run, inputs[dist.get_rank()]))
            harness.assert_close(got, without_router(wanted("stacked_loop", inputs)))
    everywhere = [inner.graph for graph in graphs for inner in graph.owning_module.modules() if isinstance(inner, fx.GraphModule)]
    assert names_in(everywhere).count("experts_over_ranks") == len(graphs) > 1, reports


def check_too_many() -> None:
    """The rank that breaks the caller's promise raises before anything travels: where it compiles, or when it runs."""
    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    config.tokens_per_rank = 8
    try:
        run, _, _ = compiled(sharded("dense_einsum"), "aot_eager")
        for count in (9, 7, 5):
            x, error = harness.tokens_of(0, zoo.D, count), None
            try:
                run(x)
            except Exception as raised:
                error = str(raised)
            expected = None if count < 9 else "tokens must be at most config.tokens_per_rank=8 on every rank, got 9"
            assert (error is None and expected is None) or expected in error, error
    finally:
        config.tokens_per_rank = None


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer("stacked_loop"), layer("dense_einsum")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(x + self.first(x))


def check_asks_for_each_layer() -> None:
    """Two layers of a graph ask twice, whether or not they have equally many tokens on this rank."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    rank = dist.get_rank()
    model = TwoLayers()
    shard_experts(model, harness.axis())
    run, graphs, reports = compiled(model)
    x = harness.tokens_of(rank, zoo.D, count=8 + 8 * rank)
    expected = harness.train(model, model, x)
    harness.assert_close(harness.train(model, run, x), expected)
    names = names_in(graphs)
    assert names.count("experts_over_ranks") == 2 and names.count("most_tokens.default") == 2, names
    run, graphs, reports = compiled(lambda x: model.second(model.first(x)[: len(x) // 2]))
    run(x)
    names = names_in(graphs)
    assert names.count("experts_over_ranks") == 2 and names.count("most_tokens.default") == 2, names


class Beside(nn.Module):
    """A layer that takes more rows than those that it routes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer("stacked_loop")

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        return torch.cat([others, self.layer(x)])


def check_none_beside() -> None:
    """A tensor without rows beside the tokens, on one rank: gradients of the tokens are what they were."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    rank = dist.get_rank()
    pairs = [(harness.tokens_of(r, zoo.D, 5), harness.tokens_of(9, zoo.D, 3 * (1 - r))) for r in range(2)]
    one, model = Beside(), Beside()
    results = [harness.train(one, lambda x, others=others: one(x, others), x) for x, others in pairs]
    shard_experts(model, harness.axis())
    run, graphs, _ = compiled(model)
    got = harness.train(model, lambda x: run(x, pairs[rank][1]), pairs[rank][0])
    for name in ("output", "gradient of x"):
        torch.testing.assert_close(got[name], results[rank][name], atol=harness.TOLERANCE, rtol=0)
    assert names_in(graphs).count("experts_over_ranks") == 1


def check_skipped_experts() -> None:
    """A loop that skips experts without tokens: a rank without any compiles what it would with tokens."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    rank = dist.get_rank()
    model, whole = Skipping(False), Skipping(False)
    shard_experts(model, harness.axis())
    with rewriting_backend() as backend, switch.recording() as records:
        run = torch.compile(model, backend=backend)
        for counts in ((5, 9), (0, 9)):
            inputs = [harness.tokens_of(r, zoo.D, count) for r, count in enumerate(counts)]
            expected = without_router(harness.in_one_process(whole, inputs)[rank])
            harness.assert_close(without_router(harness.train(model, run, inputs[rank])), expected)
    kept = [r for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None]
    became = [c.became for r in kept for c in r.report.candidates]
    assert became and all(text and "experts_over_ranks" in text for text in became), records


def check_calls() -> None:
    """What a step asks of the process group and of the host; a promised number of tokens saves the question.

    The processes of a machine ask each other through shared memory.
    """
    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    for promised, questions in ((None, 1), (24, 0)):
        config.tokens_per_rank = promised
        try:
            run, _, _ = compiled(sharded("dense_einsum"), "aot_eager")
            x = harness.tokens_of(dist.get_rank(), zoo.D).requires_grad_()
            run(x).sum().backward()  # compiles
            out, forward = harness.collectives(lambda run=run, x=x: run(x))
            _, backward = harness.collectives(out.sum().backward)
            _, ours = harness.counting(lambda run=run, x=x: run(x), "moeblaze::")
        finally:
            config.tokens_per_rank = None
        assert (forward, backward) == ({"gather": 2, "reduce_scatter": 1}, {"gather": 2, "reduce_scatter": 2})
        assert (ours.get("most_tokens", 0), ours["used_slots"]) == (questions, 1), ours


# Equal numbers of tokens meet every spelling, in `test_sharded_tokens`. Here is one of each kind of layer.
CHECKS = {
    "stacked_loop": functools.partial(check_steps, "stacked_loop", backend="aot_eager"),
    "loop_mixtral": functools.partial(check_steps, "loop_mixtral", FEW_STEPS),
    "sorted_transformers": functools.partial(check_steps, "sorted_transformers", WITHOUT_NONE),
    "skipped experts": check_skipped_experts,
    "all to one rank, room for all rows": functools.partial(
        check_steps, "stacked_loop", FEW_STEPS, first_only=True, arrived_rows="bound"
    ),
    "keeps the input": functools.partial(check_steps, "gpt_oss_loop", FEW_STEPS, backend="aot_eager", keep="input"),
    "promised number, all to one rank": functools.partial(
        check_steps, "dense_einsum", FEW_STEPS, first_only=True, tokens_per_rank=64
    ),
    "through Inductor": functools.partial(check_steps, "masked_sum", FEW_STEPS, backend="inductor"),
    "checkpointed from outside": functools.partial(check_checkpointed, within_graph=False),
    "checkpointed in the graph": functools.partial(check_checkpointed, within_graph=True),
    "none beside the tokens": check_none_beside,
    "too many": check_too_many,
    "asks for each layer": check_asks_for_each_layer,
    "calls": check_calls,
}
OF_FOUR = functools.partial(check_steps, "stacked_loop", backend="aot_eager", exchange="all_gather")
RANKS = {2: CHECKS, 4: {"stacked_loop": OF_FOUR}}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    return {ranks: run_checks(checks, ranks, tmp_path_factory.mktemp("ranks")) for ranks, checks in RANKS.items()}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, checks in RANKS.items() for name in checks])
def test_on_ranks(outcomes, ranks, name):
    assert_passed(outcomes[ranks][name])
