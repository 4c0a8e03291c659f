"""How low-rank products are joined with those of weights may be anything: a value that is another sum is not taken for it.

So `forms/low_rank.py` is not among the trusted lines, and `test_layering.py` names it.
"""

import functools

import pytest
import torch

from moeblaze_ops.lowering.forms import low_rank, pointwise
from tests.rewrite.weights import test_low_rank
from tests.rewrite.weights.test_low_rank import D, Dense, Listed, Split, SplitGroups, T, parameter
from tests.tools.rewrite_harness import Captured

pytestmark = pytest.mark.usefixtures("fp64")


class ByFeature(Split):
    """A number for each feature is no scale of the factors."""

    def __init__(self):
        super().__init__()
        self.scales = parameter(64)

    def project(self, x, w, a, b):
        return x @ w.T + self.scales[: len(w)] * ((x @ a.T) @ b.T)


LAYERS = (
    Split, lambda: Split(torch.sin), lambda: Split(lambda x: 2 * x), lambda: Split(lambda x: x.flip(1)), Dense,
    lambda: Dense(lambda w: w[:1]), lambda: SplitGroups(None), lambda: Listed(bias=True), ByFeature,
)  # fmt: skip


def _inside(value):
    """The operand of a function of one number, or of a product with one."""
    while value.op in ("cast", "pointwise", "index"):
        parts = [x for x in value.args[1] if x.op != "full"] if value.op == "pointwise" else list(value.args[:1])
        if len(parts) != 1:
            break
        value = parts[0]
    return value


SEARCHES = {
    "numbers_lost": ("_without_numbers", lambda found: lambda *args: ([], found(*args)[1])),
    "numbers_twice": ("_without_numbers", lambda found: lambda *args: (2 * found(*args)[0], found(*args)[1])),
    "any_size": ("_fits", lambda found: lambda *args: True),
    "functions_of_the_input": ("without_casts", lambda found: _inside),
    "factors_turned": ("_labels", lambda found: lambda *args: (of := found(*args)) and tuple(label[::-1] for label in of)),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_whatever_is_joined(name, monkeypatch):
    function, change = SEARCHES[name]
    monkeypatch.setattr(low_rank, function, change(getattr(low_rank, function)))
    _check_all()


@pytest.mark.parametrize("ends", [lambda joined: [], lambda joined: [joined[0]], lambda joined: joined[1][:1]])
def test_wherever_it_ends(ends, monkeypatch):
    def found(*args):
        joined = low_rank.low_rank_sum(*args)
        return joined and (joined[0], ends(joined))

    monkeypatch.setattr(pointwise, "low_rank_sum", found)
    _check_all()


@pytest.fixture(autouse=True)
def _sizes_that_do_not_tell_axes_apart(monkeypatch):
    monkeypatch.setattr(test_low_rank, "H", D)
    monkeypatch.setattr(test_low_rank, "R", D)


@functools.cache
def _captured():
    torch.manual_seed(0)
    return [Captured(layer(), torch.randn(T, D)) for layer in LAYERS]


def _check_all():
    for layer in _captured():
        layer.check_against_eager()
