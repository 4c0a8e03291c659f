"""Rows in the order of tokens that have places counted in another one: all first slots first, or by their priority."""

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.zoo import catalogue as zoo
from tests.rewrite.shaped.test_places import Layer, counted
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


def _stored(self, x, weights, ids, place, clamped=None, last=None):
    """Rows at their places, and what experts make of them; those of which there is no room are left out."""
    last = self.places - 1 if last is None else last
    flat, at, rows = ids.reshape(-1), place.reshape(-1), x.repeat_interleave(ids.shape[1], 0)
    kept = (at >= 0) & (at <= last)
    buffer = x.new_zeros(zoo.E, self.places, zoo.D).index_put((flat[kept], at[kept]), rows[kept], accumulate=True)
    y = self.of_places(buffer)[ids, place.clamp(0, self.places - 1) if clamped is None else clamped]
    return ((y * (place <= last)[..., None]) * weights[..., None]).sum(1)


def first_slots_first(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    return _stored(self, x, weights, ids, counted(ids))


def tokens_first(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    return _stored(self, x, weights, ids, counted(ids, first_slots_first=False))


def of_three_slots(self, x, probabilities):
    weights, ids = probabilities.topk(3)
    T = x.shape[0]
    chosen = F.one_hot(ids.t().reshape(-1), zoo.E).int()
    return _stored(self, x, weights, ids, (chosen.cumsum(0) * chosen - 1).view(3, T, zoo.E).transpose(0, 1).max(2).values)


def of_one_slot(self, x, probabilities):
    weights, ids = probabilities.topk(1)
    return _stored(self, x, weights, ids, counted(ids))


def by_priority(self, x, probabilities, back=torch.argsort, order=None):
    weights, ids = probabilities.topk(2)
    order = torch.argsort(-weights[:, 0]) if order is None else order
    return _stored(self, x, weights, ids, counted(ids[order])[back(order)])


def above_zero_alone(self, x, probabilities):
    """A count of the slots before is no less than zero."""
    weights, ids = probabilities.topk(2)
    place = counted(ids)
    return _stored(self, x, weights, ids, place, place.clamp(min=0).clamp(max=self.places - 1))


SPELLINGS = (first_slots_first, tokens_first, of_three_slots, of_one_slot, by_priority, above_zero_alone)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_rows_at_counted_places(spelling):
    backend = check_against_eager(Layer(spelling, 6), torch.randn(20, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("spelling", [first_slots_first, by_priority], ids=lambda f: f.__name__)
def test_few_tokens(spelling, num_tokens):
    """Of as many tokens as slots, too."""
    check_against_eager(Layer(spelling, 2), torch.randn(num_tokens, zoo.D))


@pytest.mark.parametrize("places", [1, 3, 20])
@pytest.mark.parametrize("spelling", [first_slots_first, by_priority], ids=lambda f: f.__name__)
def test_all_to_one_expert(spelling, places):
    layer = Layer(spelling, places)
    with torch.no_grad():
        layer.gate.bias[2] = 50
    check_against_eager(layer, torch.randn(12, zoo.D))


# Near misses.


def left_in_that_order(self, x, probabilities):
    return by_priority(self, x, probabilities, back=lambda order: order)


def put_back_by_favourites(self, x, probabilities):
    return by_priority(self, x, probabilities, back=lambda order: probabilities.argmax(1))


def in_no_order(self, x, probabilities):
    """Tokens that are counted several times, others never."""
    return by_priority(self, x, probabilities, order=probabilities.argmax(1))


def in_an_order_of_more(self, x, probabilities):
    """The first half of an order of twice as many."""
    T, order = x.shape[0], torch.cat([probabilities, -probabilities])[:, 0].argsort()
    return by_priority(self, x, probabilities, order=order % T, back=lambda _: order.argsort()[:T] % T)


def places_of_other_slots(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    return _stored(self, x, weights, ids, counted(ids).flip(1))


def read_at_the_next(self, x, probabilities):
    weights, ids = probabilities.topk(2)
    place = counted(ids)
    return _stored(self, x, weights, ids, place, (place + 1).clamp(0, self.places - 1))


def the_last_for_all(self, x, probabilities):
    """Slots that have no room are read at the last place, where another one stands."""
    weights, ids = probabilities.topk(2)
    return _stored(self, x, weights, ids, counted(ids).clamp(max=self.places - 1))


def counted_by_tokens(self, x, probabilities):
    """The counts of tokens first, taken as those of first slots first."""
    weights, ids = probabilities.topk(2)
    return _stored(self, x, weights, ids, counted(ids, first_slots_first=False).reshape(2, -1).t())


def less_one_more(self, x, probabilities):
    """The first slot is at -1, and left out."""
    weights, ids = probabilities.topk(2)
    return _stored(self, x, weights, ids, counted(ids) - 1)


TWINS = (left_in_that_order, put_back_by_favourites, in_no_order, in_an_order_of_more, places_of_other_slots, read_at_the_next,
         the_last_for_all, counted_by_tokens, less_one_more)  # fmt: skip


@pytest.mark.parametrize("spelling", TWINS, ids=lambda f: f.__name__)
def test_twins(spelling):
    assert not check_against_eager(Layer(spelling, 6), torch.randn(20, zoo.D)).rewritten
