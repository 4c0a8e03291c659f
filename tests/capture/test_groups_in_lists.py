"""Groups that a list holds because a branch on data appended them, in loops over the list."""

import pytest
import torch

from tests.capture.test_branches import E, check

pytestmark = pytest.mark.usefixtures("scratch")


def groups(self, x, weights, ids):
    found = []
    for e in range(E):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            found.append((token, self.experts[e](x[token]) * weights[token, slot, None]))
    return found


def one_by_one(self, x, weights, ids):
    out = torch.zeros_like(x)
    for token, y in groups(self, x, weights, ids):
        out.index_add_(0, token, y)
    return out


def work_in_the_second_loop(self, x, weights, ids):
    used = []
    for e in range(E):
        token, slot = torch.where(ids == e)
        if len(token) == 0:
            continue
        used.append((e, token, slot))
    out = torch.zeros_like(x)
    for e, token, slot in used:
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    return out


def in_comprehensions(self, x, weights, ids):
    found = groups(self, x, weights, ids)
    return torch.zeros_like(x).index_add(0, torch.cat([t for t, _ in found]), torch.cat([y for _, y in found]))


def in_a_branch_of_a_branch(self, x, weights, ids):
    found = []
    for e in range(E):
        token, slot = torch.where(ids == e)
        if (ids == e).any():
            chosen = weights[token, slot, None]
            if token.numel() > 0:
                found.append((token, self.experts[e](x[token]) * chosen))
    out = torch.zeros_like(x)
    for token, y in found:
        out.index_add_(0, token, y)
    return out


def adds_one_a_group(self, x, weights, ids):
    out = torch.zeros_like(x)
    for token, y in groups(self, x, weights, ids):
        out.index_add_(0, token, y)
        out = out + 1
    return out


def counts_groups(self, x, weights, ids):
    out, count = torch.zeros_like(x), 0
    for token, y in groups(self, x, weights, ids):
        out.index_add_(0, token, y)
        count += 1
    return out * count


def reads_how_many(self, x, weights, ids):
    out, found = torch.zeros_like(x), groups(self, x, weights, ids)
    for token, y in found:
        out.index_add_(0, token, y)
    return out * len(found)


def reads_the_first(self, x, weights, ids):
    out, found = torch.zeros_like(x), groups(self, x, weights, ids)
    for token, y in found:
        out.index_add_(0, token, y)
    return out.index_add(0, *found[0])


def reads_the_last(self, x, weights, ids):
    out = torch.zeros_like(x)
    for token, y in groups(self, x, weights, ids):
        out.index_add_(0, token, y)
    return out + y.sum()


def adds_a_group_again(self, x, weights, ids):
    out, found = torch.zeros_like(x), groups(self, x, weights, ids)
    for token, y in found:
        out.index_add_(0, token, y)
        if len(found) < 5:
            found.append((token, y))
    return out


def writes_to_conditions(self, x, weights, ids):
    found = []
    for e in range(E):
        token, slot = torch.where(ids == e)
        used = (ids == e).any()
        if used:
            found.append((token, self.experts[e](x[token]) * weights[token, slot, None]))
        used.fill_(False)
    out = torch.zeros_like(x)
    for token, y in found:
        out.index_add_(0, token, y)
    return out + 1


def adds_to_others(self, x, weights, ids):
    out = torch.zeros_like(x)
    for token, y in groups(self, x, weights, ids):
        out[:2] += 1
        out.index_add_(0, token, y)
    return out


@pytest.mark.parametrize(
    "combine", [one_by_one, work_in_the_second_loop, in_comprehensions, in_a_branch_of_a_branch], ids=lambda f: f.__name__
)
def test_groups_are_rewritten(combine):
    assert check(combine) == 1


NEAR_MISSES = [
    adds_one_a_group, counts_groups, reads_how_many, reads_the_first, reads_the_last, adds_a_group_again, adds_to_others,
]  # fmt: skip


@pytest.mark.parametrize("combine", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_tells_the_number_of_groups_is_left(combine):
    assert check(combine) == 0


def test_conditions_are_as_they_were_when_a_group_was_appended():
    check(writes_to_conditions)


# Conditions that are proven, by what they say of weights and of ids.


def loop(asks):
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            if asks(ids, e):
                self.add(out, self.experts[e], x, weights, ids, e)
        return out

    return combine


ASKED = {
    "max": lambda ids, e: (ids == e).max(),
    "max of numbers": lambda ids, e: (ids == e).int().max() > 0,
    "isin": lambda ids, e: torch.isin(torch.tensor(e), ids),
    "isin of ids": lambda ids, e: torch.isin(ids, e).any(),
    "count and whether": lambda ids, e: (ids == e).sum().bool() + (ids == e).sum() > 0,
}
ASKED_OTHERWISE = {
    "max of a slot": lambda ids, e: (ids[:, 0] == e).max(),
    "isin of a slot": lambda ids, e: torch.isin(torch.tensor(e), ids[:, 0]),
    "another isin": lambda ids, e: torch.isin(ids, (e + 1) % E).any(),
    "max of some": lambda ids, e: (ids == e)[:3].max(),
    "more than whether": lambda ids, e: (ids == e).sum().bool() < (ids == e).sum(),
    "rounded": lambda ids, e: (ids == e).sum().bfloat16() + 256 > 256,
    "underflows": lambda ids, e: (ids == e).sum().half() * 2e-8 > 0,
}


@pytest.mark.parametrize("name", ASKED)
def test_questions_to_ids(name):
    assert check(loop(ASKED[name])) == 1


@pytest.mark.parametrize("name", ASKED_OTHERWISE)
def test_other_questions_to_ids(name):
    assert check(loop(ASKED_OTHERWISE[name])) == 0


def weighted(asks, shift=0.0):
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            gate = ((weights - shift) * (ids == e)).sum(-1, keepdim=True)
            if asks(gate):
                out = out + self.experts[e](x) * gate
        return out

    return combine


@pytest.mark.parametrize("asks", [lambda g: (g > 0).any(), lambda g: g.sum() > 0, lambda g: g.sum() != 0])
def test_weights_that_are_all_zero(asks):
    assert check(weighted(asks)) == 1


OTHERS = [
    (lambda g: (g > 0).any(), 0.3),
    (lambda g: (g > 0.3).any(), 0.0),
    (lambda g: (g[:3] > 0).any(), 0.0),
    (lambda g: g.sum() + 100 > 100, 0.0),
]


@pytest.mark.parametrize("asks, shift", OTHERS)
def test_weights_that_may_be_others(asks, shift):
    assert check(weighted(asks, shift)) == 0


def hits(use):
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for i, e in enumerate(ids.unique()):
            self.add(out, self.experts[e], x, weights, ids, e)
            out = use(out, i)
        return out

    return combine


def test_numbers_of_hits_that_nobody_reads():
    assert check(hits(lambda out, i: out)) == 1


USES = [lambda out, i: out * (i + 1), lambda out, i: out if i else out + 1, lambda out, i: out + len(f"{i}")]


@pytest.mark.parametrize("use", USES)
def test_numbers_of_hits_that_are_read(use):
    if use is USES[2] and torch.__version__ < "2.13":
        pytest.skip("Dynamo 2.11 takes a number in a text for a number, whoever compiles")
    assert check(hits(use)) == 0
