"""Tokens move to sharded experts where a layer is proven: numbers of one process, and the graph that computes them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_shard_experts import LISTED, layer, sharded
from tests.tools.ranks import assert_passed, run_checks

SPELLINGS = ("masked_sum", "stacked_loop", "dense_bmm", "sorted_transformers", "gpt_oss_loop")


def compiled(model: nn.Module, through: str = "eager"):
    """The model compiled with rewriting and another backend behind it, and the graphs after it.

    AOTAutograd behind it takes half of a check's time: it traces one layer of each kind, and what it keeps or computes again.
    """
    from torch._dynamo.backends.registry import lookup_backend

    from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph

    graphs, reports = [], []

    def backend(gm, example_inputs):
        reports.append(rewrite_graph(gm))
        graphs.append(gm.graph)
        return lookup_backend(through)(gm, example_inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True), graphs, reports


def names_in(graphs) -> list[str]:
    nodes = (node for graph in graphs for node in graph.nodes if node.op in ("call_function", "call_method"))
    return [node.target if isinstance(node.target, str) else node.target.__name__ for node in nodes]


def check_tokens(name: str, through: str = "eager", **settings) -> None:
    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    inputs = [harness.tokens_of(rank, zoo.D) for rank in range(dist.get_world_size())]
    wanted = harness.in_one_process(layer(name), inputs)[dist.get_rank()]
    if name in LISTED:
        wanted = harness.joined_entries(wanted, "experts", zoo.E)
    before = {key: getattr(config, key) for key in ("experts_move", *settings)}
    for key, value in {"experts_move": "tokens", **settings}.items():
        setattr(config, key, value)
    try:
        model = sharded(name)
        run, graphs, reports = compiled(model, through)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            results = [harness.train(model, run, inputs[dist.get_rank()]) for _ in range(2)]
    finally:
        for key, value in before.items():
            setattr(config, key, value)
    results = [harness.reduced(got, ("router.gate.weight",)) for got in results]
    names = names_in(graphs)
    assert names.count("experts_over_ranks") == names.count("start_gather_of_tokens") == 1, reports
    assert not [called for called in names if "redistribute" in called], names
    harness.assert_close(results[0], wanted, in_eight_bits=settings.get("keep") == "h8")
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


class Redistributed(nn.Module):
    """A layer whose user wrote the redistribution."""

    def __init__(self, mesh, grad_placements) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.layer, self.grad_placements = layer("dense_einsum"), grad_placements
        for name in ("w1", "w2", "w3"):
            parameter = getattr(self.layer, name)
            self.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            delattr(self.layer, name)

    def forward(self, x):
        from torch.distributed.tensor import Replicate

        for name in ("w1", "w2", "w3"):
            whole = self._parameters[name].redistribute(placements=[Replicate()])
            setattr(self.layer, name, whole.to_local(grad_placements=self.grad_placements))
        return self.layer(x)


def became(run, graphs, reports, x) -> str:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(x)
    (candidate,) = reports[0].candidates
    return candidate.became


def check_redistribution_of_the_user() -> None:
    from torch.distributed.tensor import Partial

    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    config.experts_move = "tokens"
    try:
        inputs = [harness.tokens_of(rank, zoo.D) for rank in range(dist.get_world_size())]
        wanted = harness.in_one_process(layer("dense_einsum"), inputs)[dist.get_rank()]
        wanted = {name: value for name, value in wanted.items() if "router" not in name}
        for placements, moves in (([Partial()], True), (None, False)):
            model = Redistributed(harness.axis(), placements)
            run, graphs, reports = compiled(model, "aot_eager")
            got = harness.train(model, run, inputs[dist.get_rank()])
            assert ("experts_over_ranks" in names_in(graphs)) is moves, reports
            if moves:
                harness.assert_close({name: got[name] for name in wanted}, wanted)
            else:
                eager = harness.train(model, model, inputs[dist.get_rank()])
                harness.assert_close(got, eager)
    finally:
        config.experts_move = "auto"


def check_choice() -> None:
    """Tokens move, or what is known to be fewer bytes, and the report says both. A rank's own tokens decide nothing."""
    from moeblaze_ops import config
    from moeblaze_ops.explanation import size_text
    from tests.tools import sharded_layers as harness

    D, FF, E, item = zoo.D, zoo.FF, zoo.E, 8
    try:
        for promised, count, moves in ((None, 24, "tokens"), (None, 2000, "tokens"), (24, 20, "tokens"), (2000, 24, "weights")):
            config.tokens_per_rank = promised
            text = became(*compiled(sharded("dense_einsum")), harness.tokens_of(dist.get_rank(), D, count))
            sizes = {"tokens": 5 * (promised or count) * D * item, "weights": 3 * 3 * E * D * FF * item // 2}
            other = "weights" if moves == "tokens" else "tokens"
            wanted = f"{size_text(sizes[moves])} of {moves} move between 2 ranks, not {size_text(sizes[other])} of {other}"
            assert wanted in text, text
    finally:
        config.tokens_per_rank = None


def check_weights_that_move() -> None:
    """Weights move on ranks with different numbers of tokens where that is asked for."""
    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    rank = dist.get_rank()
    x = harness.tokens_of(rank, zoo.D, count=8 * (rank + 1))
    config.experts_move = "weights"
    try:
        model = sharded("dense_einsum")
        run, graphs, _ = compiled(model, "aot_eager")
        got = harness.train(model, run, x)
        assert "experts_over_ranks" not in names_in(graphs)
        harness.assert_close(got, harness.train(model, model, x))
    finally:
        config.experts_move = "auto"


def check_checkpointing() -> None:
    """A checkpointed layer runs again in backward: the same numbers, and no rank waits for another."""
    from torch.utils.checkpoint import checkpoint

    from moeblaze_ops import config
    from tests.tools import sharded_layers as harness

    config.experts_move = "tokens"
    try:
        x = harness.tokens_of(dist.get_rank(), zoo.D)
        model = sharded("dense_einsum")
        wanted = harness.train(model, model, x)
        run, graphs, _ = compiled(lambda x: checkpoint(model, x, use_reentrant=False), "aot_eager")
        harness.assert_close(harness.train(model, run, x), wanted)
    finally:
        config.experts_move = "auto"


class InARow(nn.Module):
    """Layers of which each takes what the one before gives, as it is or with something between."""

    def __init__(self, between: str, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(map(layer, names)), between

    def forward(self, x):
        if self.between == "batched":
            x = x.unflatten(0, (2, -1))
        for number, one in enumerate(self.layers):
            out = one(x)
            if self.between == "residual":
                out = out + x
            elif self.between == "view":
                out = out.view(2, -1, zoo.D).flatten(0, 1)
            elif self.between == "written":
                out = out.mul_(2)
            x = one(out) if self.between == "twice" and not number else out
        return x.reshape(-1, zoo.D)


def check_in_a_row(between: str, names: tuple[str, ...], exchange: str = "all_gather") -> None:
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    inputs = [harness.tokens_of(rank, zoo.D) for rank in range(dist.get_world_size())]
    wanted = harness.in_one_process(InARow(between, names), inputs)[dist.get_rank()]
    for number, name in enumerate(names):
        if name in LISTED:
            wanted = harness.joined_entries(wanted, f"layers.{number}.experts", zoo.E)
    config.experts_move, config.exchange = "tokens", exchange
    try:
        model = InARow(between, names)
        shard_experts(model, harness.axis())
        run, graphs, reports = compiled(model)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            got = harness.train(model, run, inputs[dist.get_rank()])
    finally:
        config.experts_move = config.exchange = "auto"
    calls = len(names) + (between == "twice")
    assert names_in(graphs).count("experts_over_ranks") == calls, reports
    harness.assert_close(harness.reduced(got, tuple(key for key in got if "router" in key)), wanted)


def check_two_lists() -> None:
    """Lists of up and of down projections, in a loop that skips experts without tokens."""
    from moeblaze_ops import compile as switch
    from moeblaze_ops.distributed import shard_experts
    from tests.distributed.test_state import TwoLists
    from tests.tools import sharded_layers as harness
    from tests.tools.rewrite_harness import rewriting_backend

    def make() -> nn.Module:
        torch.manual_seed(0)
        return TwoLists()

    inputs = [harness.tokens_of(rank, zoo.D) for rank in range(dist.get_world_size())]
    wanted = harness.in_one_process(make(), inputs)[dist.get_rank()]
    for path in ("up", "down"):
        wanted = harness.joined_entries(wanted, path, 4)
    model = make()
    report = shard_experts(model, harness.axis())
    assert [taken.name for taken in report.taken] == ["up.weight", "up.bias", "down.weight"]
    with rewriting_backend() as backend, switch.recording() as records:
        run = torch.compile(model, backend=backend, fullgraph=True)
        for each in (model, run):
            got = harness.train(model, each, inputs[dist.get_rank()])
            harness.assert_close(harness.reduced(got, ("router.weight",)), wanted)
    became = [c.became for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert len(became) == 1 and "experts_over_ranks" in became[0], records


ROWS = {
    "two": ("direct", ("dense_einsum", "stacked_loop")),
    "three": ("direct", ("loop_mixtral", "dense_bmm", "masked_sum")),
    "three and all-to-all": ("direct", ("stacked_loop", "stacked_loop", "dense_bmm"), "all_to_all"),
    "residual": ("residual", ("stacked_loop", "loop_mixtral")),
    "batched": ("batched", ("stacked_loop", "dense_einsum")),
    "view": ("view", ("stacked_loop", "sorted_transformers")),
    "written": ("written", ("dense_einsum", "masked_sum")),
    "one twice": ("twice", ("dense_einsum", "gpt_oss_loop")),
}

CHECKS = {
    **{name: functools.partial(check_tokens, name) for name in SPELLINGS},
    "loop_mixtral": functools.partial(check_tokens, "loop_mixtral", "aot_eager"),
    "room for all rows": functools.partial(check_tokens, "dense_bmm", arrived_rows="bound"),
    "keeps eight bits": functools.partial(check_tokens, "gpt_oss_loop", "aot_eager", keep="h8"),
    "keeps the input": functools.partial(check_tokens, "gpt_oss_loop", "aot_eager", keep="input"),
    "redistribution of the user": check_redistribution_of_the_user,
    "choice": check_choice,
    "weights that move": check_weights_that_move,
    "checkpointing": check_checkpointing,
    "two lists": check_two_lists,
    **{f"in a row, {name}": functools.partial(check_in_a_row, *row) for name, row in ROWS.items()},
}
CHECKS_OF_FOUR = {"loop_mixtral": functools.partial(check_tokens, "loop_mixtral", exchange="all_gather")}
RANKS = {2: CHECKS, 4: CHECKS_OF_FOUR}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    return {ranks: run_checks(checks, ranks, tmp_path_factory.mktemp("ranks")) for ranks, checks in RANKS.items()}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, checks in RANKS.items() for name in checks])
def test_on_ranks(outcomes, ranks, name):
    assert_passed(outcomes[ranks][name])
