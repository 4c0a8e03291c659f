"""A short run of `fuzz.run`: random layers behave as eager does, and the unchanged ones are rewritten."""

from dataclasses import replace

import pytest
import torch

from tests.corpus.fuzz import adapters, graphs
from tests.corpus.fuzz.modes import GathersByInt64
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


@pytest.mark.filterwarnings("ignore")
def test_random_changes_to_graphs():
    results = [graphs.check(seed) for seed in range(2 * graphs.GROUP)]
    assert not [result for result in results if result[0].startswith("wrong")]
    assert {"rewritten", "left alone"} <= {became for became, _ in results}


def test_gathers_by_int64():
    """Without it torch's own gradient of a scatter was said to be a wrong one of the rewritten graph."""
    token, y, dout = torch.tensor([3, 0, 1, 3, 2]), torch.ones(5, 4, requires_grad=True), torch.arange(16.0).view(4, 4)
    with GathersByInt64():
        out = torch.zeros(4, 4).scatter_add(0, token.int()[:, None].expand(-1, 4), y)
        assert torch.autograd.grad(out, y, dout)[0].equal(dout[token])


@pytest.mark.parametrize("off, is_noise", [(2e-4, True), (2e-3, False), (float("nan"), False)])
def test_noise_is_of_the_largest_number(off, is_noise):
    wanted = torch.tensor([1e-3, -40.0], dtype=torch.float64)
    actual, expected = ([t, [], []] for t in ([wanted + torch.tensor([off, 0.0])], [wanted]))
    assert (graphs._difference(actual, expected) == "") == is_noise


@pytest.mark.parametrize("through_moe", [False, True])
def test_random_adapters(through_moe):
    for seed in range(200 if through_moe else 10):
        case = adapters.case_of(seed)
        failure, became = adapters.failure_of(case, seed, through_moe)
        assert not failure, f"seed {seed}: {failure} ({became}), {case}"
        if case.twin == "none":
            assert "rank" in became, (seed, case)


@pytest.mark.parametrize("seed", [902, 1324, 1610, 1644, 2512])
def test_adapters_whose_error_only_drawn_rounding_explains(seed):
    """One pre-activation of a relu that is next to zero, and in 1644 a product of rank one that cancels to a hundredth."""
    failure, became = adapters.failure_of(adapters.case_of(seed), seed, True)
    assert not failure and became.endswith(" by rounding")


@pytest.mark.parametrize("twin", [name for name in adapters.TWINS if name != "none"])
def test_rounding_explains_no_other_function(twin):
    """In bf16, where it explains most. What runs reads the factors as the twin does, and the plain layer is asked for."""
    sizes = {"E": 4, "T": 17, "K": 2, "rank": 3, "scale": 2.0, "adapters": 1}
    case = replace(adapters.case_of(1), **sizes, activation="relu", dtype="bf16")
    assert not adapters.failure_of(case, 1, True)[0]
    assert adapters.failure_of(replace(case, twin=twin), 1, True, wanted="none")[0]
