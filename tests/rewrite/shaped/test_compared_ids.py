"""Masks of an expert that compare ids otherwise than by ``ids == e``: with bounds, differences, bits and complements."""

import pytest
import torch

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

ONE_EXPERT = {
    "difference": lambda ids, e: ids - e == 0,
    "difference the other way round": lambda ids, e: e - ids == 0,
    "no difference": lambda ids, e: ~(ids - e).bool(),
    "not a difference": lambda ids, e: torch.logical_not(ids - e),
    "distance": lambda ids, e: (ids - e).abs() == 0,
    "sum": lambda ids, e: ids + e == zoo.E - 1,
    "both bounds": lambda ids, e: (ids >= e) & (ids <= e),
    "below the next": lambda ids, e: (ids >= e) & (ids < e + 1),
    "above the former": lambda ids, e: (ids > e - 1) & (ids <= e),
    "bounds the other way round": lambda ids, e: (-ids <= -e) & (-ids > -e - 1),
    "bounds of multiples": lambda ids, e: (2 * ids >= 2 * e - 1) & (2 * ids < 2 * e + 2),
    "neither below nor above": lambda ids, e: ~((ids < e) | (ids > e)),
    "not above": lambda ids, e: (ids >= e) & ~(ids > e),
    "without the next": lambda ids, e: (ids >= e) & (ids < e + 2) & (ids != e + 1),
    "product of bounds": lambda ids, e: ((ids >= e).long() * (ids <= e).long()).bool(),
    "bits": lambda ids, e: ids ^ e == 0,
    "int32": lambda ids, e: (ids.int() - e >= 0) & (ids.int() < e + 1),
    "fp32": lambda ids, e: (ids.float() >= e) & (ids.float() < e + 1),
    "a tensor of numbers": lambda ids, e: ids - torch.arange(zoo.E)[e] == 0,
}

OTHERS = {
    "two experts": lambda ids, e: (ids >= e) & (ids < e + 2),
    "no expert": lambda ids, e: (ids >= e) & (ids < e),
    "one bound": lambda ids, e: ids >= e,
    "all others": lambda ids, e: (ids < e) | (ids > e),
    "a hole": lambda ids, e: (ids >= e) & (ids < e + 3) & (ids != e + 1),
    "half of the numbers": lambda ids, e: 2 * ids - e == 0,
    "bounds of multiples": lambda ids, e: (2 * ids >= 2 * e - 1) & (2 * ids < 2 * e + 3),
    "bytes that wrap around": lambda ids, e: ids.to(torch.uint8) - e < 1,
    "multiples that wrap around": lambda ids, e: ids.int() * 2**30 - e * 2**30 == 0,
}


def masked(mask):
    def combine(self, x, weights, ids):
        return sum(expert(x) * (weights * mask(ids, e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))

    return combine


def picked(mask):
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(mask(ids, e))
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out

    return combine


def in_turns(names):
    return pytest.mark.parametrize(("name", "spelling"), [(name, (masked, picked)[n % 2]) for n, name in enumerate(names)])


@in_turns(ONE_EXPERT)
def test_one_expert(name, spelling):
    assert_replaced(check_against_eager(zoo.ModuleListMoE(spelling(ONE_EXPERT[name])), torch.randn(9, zoo.D)))


@in_turns(OTHERS)
def test_other_numbers(name, spelling):
    backend = check_against_eager(zoo.ModuleListMoE(spelling(OTHERS[name])), torch.randn(9, zoo.D))
    assert not backend.rewritten


def test_differences_with_all_experts():
    def stacked(self, x, weights, ids):
        numbers = torch.arange(zoo.E)
        hits = (ids[..., None] - numbers >= 0) & (ids[..., None] <= numbers)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("tk,tke,ted->td", weights, hits.to(x.dtype), outputs)

    assert_replaced(check_against_eager(zoo.ModuleListMoE(stacked), torch.randn(9, zoo.D)))


def test_experts_in_a_range():
    """The experts of a rank, where weights of all others are zero: a bound and a comparison with a number in it are both kept."""

    def local(self, x, weights, ids):
        is_local = (ids >= 1) & (ids < 3)
        return masked(lambda ids, e: ids == e)(self, x, weights * is_local, ids)

    assert_replaced(check_against_eager(zoo.ModuleListMoE(local), torch.randn(9, zoo.D)))


def test_numbers_that_are_shifted():
    """Expert 3 has the id 4, which no token has; that of expert 0 is 1."""
    backend = check_against_eager(zoo.ModuleListMoE(masked(lambda ids, e: ids - e == 1)), torch.randn(9, zoo.D))
    assert [found.E for found in backend.rewritten] == [zoo.E - 1]


BYTES = {
    "a number": lambda numbers, e: numbers == 256 + e,
    "below zero": lambda numbers, e: numbers == e - 256,
    "an element": lambda numbers, e: numbers == torch.arange(256, 256 + zoo.E)[e],
    "a tensor without axes": lambda numbers, e: numbers == torch.tensor(256 + e),
}


@pytest.mark.parametrize("name", BYTES)
def test_numbers_that_no_byte_holds(name):
    """Bytes are compared with what these numbers are as bytes."""
    layer = zoo.ModuleListMoE(masked(lambda ids, e: BYTES[name](ids.to(torch.uint8), e)))
    assert_replaced(check_against_eager(layer, torch.randn(9, zoo.D)))


NOT_BYTES = {
    "a float": lambda numbers, e: numbers == 256.0 + e,
    "a tensor of long numbers": lambda numbers, e: numbers == torch.tensor([256 + e]),
}


@pytest.mark.parametrize("name", NOT_BYTES)
def test_numbers_that_bytes_are_never(name):
    check_against_eager(zoo.ModuleListMoE(masked(lambda ids, e: NOT_BYTES[name](ids.to(torch.uint8), e))), torch.randn(9, zoo.D))
