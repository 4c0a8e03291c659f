"""Random programs of sharded layers: every rank makes the same sequence of collectives, and computes what one process would."""

import pytest

from tests.distributed.rank_programs import Outcome, Way, draw, run_programs

SEEDS = {2: [0, 1, 9, 12, 13, 15, 16, 274]}
"""As many as a minute allows: ``tests/distributed/rank_programs.py`` runs hundreds."""


@pytest.fixture(scope="module")
def outcomes() -> dict[int, dict[int, list[Outcome]]]:
    return {ranks: run_programs(seeds, ranks) for ranks, seeds in SEEDS.items()}


@pytest.mark.parametrize(("ranks", "seed"), [(ranks, seed) for ranks, seeds in SEEDS.items() for seed in seeds])
def test_ranks_compute_what_one_process_does(outcomes, ranks, seed):
    for outcome in outcomes[ranks][seed]:
        assert outcome.became == "right", draw(seed, ranks)


def test_tokens_move_in_these_programs(outcomes):
    for of_seeds in outcomes.values():
        assert sum(outcome.moved for of_ranks in of_seeds.values() for outcome in of_ranks) > 0


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1012, id="weights of two layers move in a graph that Inductor orders by the memory that it takes"),
        pytest.param(1031, id="what is kept of checkpointed layers follows from this rank's sizes"),
    ],
)
def test_ranks_of_other_sizes_exchange_alike(seed):
    (outcomes,) = run_programs([seed], 2, Way("inductor")).values()
    assert [outcome.became for outcome in outcomes] == ["right", "right"]


@pytest.mark.parametrize(
    ("ranks", "seeds", "way"),
    [
        pytest.param(2, [0], Way(registered=True), id="experts of transformers' registry"),
        pytest.param(2, [27], Way(registered=True), id="beside sharded ones, for tokens of their own"),
        pytest.param(2, [3455], Way("aot_eager"), id="tokens of a layer behind weights that move"),
        pytest.param(4, [2], Way(hosts=2), id="two hosts"),
    ],
)
def test_other_ways(ranks, seeds, way):
    if way.registered:
        pytest.importorskip("transformers.distributed.expert_parallel")
    for outcomes in run_programs(seeds, ranks, way).values():
        assert [outcome.became for outcome in outcomes] == ["right"] * ranks
