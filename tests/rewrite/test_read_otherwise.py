"""How a layer was read may be anything: its terms, what it starts from, which sums were multiplied out, what its formula is.

The statement of a match is compared with what its graph computes. So a wrong reading loses a layer, and no rewrite is wrong.
"""

import functools
import sys

import pytest
import torch

from moeblaze_ops.lowering.index_notation.expr import factors_of
from moeblaze_ops.lowering.match import region
from moeblaze_ops.lowering.match.matcher import Matcher
from moeblaze_ops.lowering.match.terms import sums
from moeblaze_ops.lowering.match.terms.activation import Formulas
from tests.corpus import lookalikes
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import Captured, check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


def onto_another(self, x, weights, ids):
    out = 2 * x
    for e, expert in enumerate(self.experts):
        out += expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def zero_computation(self, x, weights, ids):
    """The last expert gives the token, and a constant."""
    parts = [expert(x) if e < zoo.E - 1 else x + 2 * x for e, expert in enumerate(self.experts)]
    return sum(part * (weights * (ids == e)).sum(-1, keepdim=True) for e, part in enumerate(parts))


def a_mean_beside(self, x, weights, ids):
    return zoo.masked_sum(self, x, weights, ids) + x.mean(-1, keepdim=True)


def one_twice(self, x, weights, ids):
    return zoo.masked_sum(self, x, weights, ids) + self.experts[0](x) * (weights * (ids == 0)).sum(-1, keepdim=True)


def squared_scores(self, x, weights, ids):
    """Each score is a sum of those of slots, and so is its square."""
    parts = [expert(x) * ((weights * (ids == e)).sum(-1, keepdim=True)) ** 2 for e, expert in enumerate(self.experts)]
    return torch.stack(parts).sum(0)


LAYERS = (
    zoo.dense_then_gather, zoo.joined_slots, zoo.loop_minimind, zoo.masked_sum, zoo.dense_buffer,
    onto_another, zero_computation, a_mean_beside, one_twice, squared_scores,
)  # fmt: skip


EXPERTS = (zoo.GluMLP, zoo.PlainMLP, lambda: zoo.PlainMLP(lambda h: h * h.tanh()), lambda: zoo.GluMLP(torch.sin))


def _others_lost(terms, is_expert):
    return tuple(filter(is_expert, terms))


def _each_once(terms, is_expert):
    return tuple(dict.fromkeys(terms))


def _the_last_lost(terms, is_expert):
    return terms[:-1]


def _the_first_twice(terms, is_expert):
    return (*terms[:1], *terms)


@pytest.mark.parametrize("change", [_others_lost, _each_once, _the_last_lost, _the_first_twice])
def test_terms(change, monkeypatch):
    original = Matcher._terms

    def changed(self, value):
        _, feature = self._evaluator.of_token(value)
        return change(original(self, value), lambda term: self._is_expert(term, feature))

    monkeypatch.setattr(Matcher, "_terms", changed)
    _check_all()


def _none(self, root, value, terms, experts, feature):
    return None, list(experts), []


def _an_input(self, root, value, terms, experts, feature):
    alike = (n for n in self.view.position if (v := self.view.value(n)) is not None and getattr(v, "shape", 0) == value.shape)
    return next(alike), list(experts), []


def _the_buffer(self, root, value, terms, experts, feature):
    return self.view.writes.get(root, root), list(experts), []


@pytest.mark.parametrize("base", [_none, _an_input, _the_buffer])
def test_what_the_sum_starts_from(base, monkeypatch):
    monkeypatch.setattr(Matcher, "_onto_base", base)
    _check_all()


SUMS = {
    "none": lambda e: (), "all": factors_of, "itself": lambda e: (e,),
    "something_else": lambda e: [part for factor in factors_of(e) for part in factors_of(factor)[::-1]],
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_multiplied_out(name, monkeypatch):
    for function, answer in ((sums.sums_of_experts, SUMS[name]), (sums.sums_of_vectors, lambda feature: SUMS[name])):
        for module in [m for n, m in sys.modules.items() if n.startswith("moeblaze_ops.lowering.")]:
            if getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, answer)
    _check_all()


def _another_name(name):
    return {"silu": "gelu", "swiglu": "geglu", "h * tanh(h)": "tanh(h)"}.get(name, "relu")


def _turned(order):
    return order[::-1]


def _as_it_is(found):
    return found


@pytest.mark.parametrize(("rename", "reorder"), [(_another_name, _as_it_is), (_as_it_is, _turned)])
@pytest.mark.parametrize("method", ["name", "text"])
def test_activations(method, rename, reorder, monkeypatch):
    original = getattr(Formulas, method)

    def changed(self, activation, halves, *others):
        if (found := original(self, activation, halves, *others)) is None:
            return None
        name, order = rename(found[0]), reorder(found[1])
        symbols = dict(zip(order, (self.gate, self.up), strict=False))
        self._read[name] = {self._algebra.substitute(activation, symbols): None}
        return name, order

    monkeypatch.setattr(Formulas, method, changed)
    _check_all()


@functools.cache
def _captured() -> list[Captured]:
    torch.manual_seed(0)
    layers = [zoo.ModuleListMoE(layer, EXPERTS[number % len(EXPERTS)]) for number, layer in enumerate(LAYERS)]
    return [Captured(layer, torch.randn(8, zoo.D)) for layer in layers]


def _check_all() -> None:
    for layer in _captured():
        layer.check_against_eager()


@pytest.mark.parametrize("name", ["partial_sum_read", "expert_output_read", "hidden_read"])
def test_layers_that_are_read_inside_are_right(name, monkeypatch):
    """They are left alone since they would be computed twice. Rewritten, what is read stays, and the writes to it."""
    monkeypatch.setattr(region, "_prove_alone", lambda *others: None)
    assert check_against_eager(lookalikes.build(name), torch.randn(10, zoo.D)).rewritten
