"""Tokens move to sharded experts where a layer is proven: numbers of one process, and the graph that computes them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_shard_experts import LISTED, layer, sharded
from tests.tools.ranks import run_checks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

SPELLINGS = ("loop_mixtral", "masked_sum", "stacked_loop", "dense_bmm", "sorted_transformers", "gpt_oss_loop")


def compiled(model: nn.Module):
    """The model compiled with rewriting, and the graphs after it."""
    from torch._dynamo.backends.debugging import aot_eager

    from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph

    graphs, reports = [], []

    def backend(gm, example_inputs):
        reports.append(rewrite_graph(gm))
        graphs.append(gm.graph)
        return aot_eager(gm, example_inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True), graphs, reports


def names_in(graphs) -> list[str]:
    nodes = (node for graph in graphs for node in graph.nodes if node.op in ("call_function", "call_method"))
    return [node.target if isinstance(node.target, str) else node.target.__name__ for node in nodes]


def check_tokens(name: str, **settings) -> None:
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
        run, graphs, reports = compiled(model)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            results = [harness.train(model, run, inputs[dist.get_rank()]) for _ in range(2)]
    finally:
        for key, value in before.items():
            setattr(config, key, value)
    results = [harness.reduced(got, ("router.gate.weight",)) for got in results]
    names = names_in(graphs)
    assert names.count("experts_over_ranks") == names.count("start_gather") == 1, reports
    assert not [called for called in names if "redistribute" in called], names
    harness.assert_close(results[0], wanted)
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


CHECKS = {
    **{name: functools.partial(check_tokens, name) for name in SPELLINGS},
    "room for all rows": functools.partial(check_tokens, "dense_bmm", arrived_rows="bound"),
    "keeps the input": functools.partial(check_tokens, "gpt_oss_loop", keep="input"),
}
RANKS = {2: tuple(CHECKS), 4: ("loop_mixtral", "stacked_loop")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    return {
        ranks: run_checks({name: CHECKS[name] for name in names}, ranks, tmp_path_factory.mktemp("ranks"))
        for ranks, names in RANKS.items()
    }


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in RANKS.items() for name in names])
def test_on_ranks(outcomes, ranks, name):
    for outcome in outcomes[ranks][name]:
        assert outcome == "passed", outcome
