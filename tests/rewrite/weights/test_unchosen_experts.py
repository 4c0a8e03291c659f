"""More experts than the router has scores, as where they are padded to a number that devices share evenly."""

import pytest
import torch

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.modules import Router
from tests.tools.rewrite_harness import check_against_eager

CHOSEN = zoo.E - 2


def padded(combine, **options):
    """The last two experts are there, and nobody can choose them."""
    layer = zoo.separate(combine, **options)
    layer.router = Router(CHOSEN, zoo.K)
    return layer


SPELLINGS = (*zoo.MASKED[::3], *zoo.LOOPS[::2], *zoo.JOINED[::2], *zoo.NONZERO, *zoo.BATCHED)
WRITTEN = (zoo.masked_sum, zoo.masked_addcmul, zoo.loop_mixtral, zoo.loop_boolean_mask, zoo.loop_minimind)


@pytest.mark.parametrize("combine", [f for f in SPELLINGS if f not in WRITTEN], ids=lambda f: f.__name__)
def test_their_gradients_are_as_written(fp64, combine):
    """Zeros where a product of no rows, or of zero shares, gives zeros; None where nothing of them runs."""
    check_against_eager(padded(combine), torch.randn(10, zoo.D))


@pytest.mark.parametrize("combine", WRITTEN, ids=lambda f: f.__name__)
def test_the_others_are_one_layer(fp64, combine):
    backend = check_against_eager(padded(combine), torch.randn(10, zoo.D))
    assert [candidate.E for candidate in backend.rewritten] == [CHOSEN]
    assert "linear" in backend.operators()[backend.operators().index("expert_down.default") :]


def test_without_gradients_they_are_gone(fp64):
    layer = padded(zoo.loop_boolean_mask).requires_grad_(False)
    backend = check_against_eager(layer, torch.randn(10, zoo.D))
    assert [candidate.E for candidate in backend.rewritten] == [CHOSEN]
    assert "linear" not in backend.operators()[backend.operators().index("expert_down.default") :]
