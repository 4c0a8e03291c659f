"""A short run of `fuzz.run`: random layers behave as eager does, and the unchanged ones are rewritten."""

import pytest

from tests.corpus.fuzz import adapters
from tests.corpus.fuzz.run import case_of, outcome_of

SEEDS, CHUNK = 60, 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_layers(first):
    failures = []
    for seed in range(first, first + CHUNK):
        case = case_of(seed)
        outcome = outcome_of(case)
        if outcome.failure:
            failures.append(f"seed {seed}: {outcome.failure}: {outcome.detail}\n\n{case.reproducer}")
    assert not failures, f"{len(failures)} of seeds {first}:{first + CHUNK}\n" + "\n".join(failures)


def test_a_seed_gives_one_program():
    assert all(case_of(seed).reproducer == case_of(seed).reproducer for seed in range(0, 100, 7))


@pytest.mark.parametrize("through_moe", [False, True])
def test_random_adapters(through_moe):
    for seed in range(200 if through_moe else 10):
        case = adapters.case_of(seed)
        failure, became = adapters.failure_of(case, seed, through_moe)
        assert not failure, f"seed {seed}: {failure} ({became}), {case}"
        if case.twin == "none":
            assert "rank" in became, (seed, case)
