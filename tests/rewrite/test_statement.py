"""What a match states is what its graph computes; a match that was changed states something else.

The statement is made of the operands of a match alone. So it refuses wrong matches, whatever the proofs behind them say.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moeblaze_ops import config
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView
from moeblaze_ops.lowering.rewrite import rewrite
from moeblaze_ops.lowering.statement.certify import certified
from tests.corpus import twins
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")

SPELLINGS = [function.__name__ for function in (*zoo.SEPARATE, *(entry[0] for entry in zoo.STACKED))]
ACTIVATIONS = {"swiglu": "geglu", "geglu": "swiglu", "silu": "gelu", "gelu": "silu", "relu": "silu", "swiglu_clamped": "swiglu"}


@pytest.fixture
def matches(monkeypatch):
    """The matches of what is rewritten, each with the view of the graph that it was found in."""
    found: list[tuple] = []
    original = rewrite._matches

    def recorded(view):
        results, views = original(view)
        found.extend((views[match.root], match) for match in results if isinstance(match, MoEMatch))
        return results, views

    monkeypatch.setattr(rewrite, "_matches", recorded)
    return found


def layer_of(name: str) -> torch.nn.Module:
    separate = {function.__name__: function for function in zoo.SEPARATE}
    return zoo.ModuleListMoE(separate[name]) if name in separate else zoo.stacked(name)


def _next(view: WeightView) -> WeightView:
    """The same tensors, of which each expert has another one's."""
    return replace(view, values=(*view.values[1:], view.values[0]))


def _doubled(operand: Operand) -> Operand:
    return replace(operand, factor=2 * operand.factor)


def _turned(view: WeightView) -> WeightView:
    *others, a, b = view.order
    return replace(view, order=(*others, b, a))


def _mutants(match: MoEMatch, formulas) -> Iterator[tuple[str, MoEMatch]]:
    yield "x doubled", replace(match, x=_doubled(match.x))
    yield "ids of one expert more", replace(match, numbers=tuple(range(1, match.E + 1)))
    yield "D and F exchanged", replace(match, w_down=_turned(match.w_down))
    if match.K > 1:
        yield "the first slot alone", replace(match, K=1)
    if match.weights is not None:
        yield "no weights", replace(match, weights=None)
        yield "weights doubled", replace(match, weights=_doubled(match.weights))
        yield "weights that are the ids", replace(match, weights=match.experts)
        yield "weights on the other side", replace(match, weights_on_input=not match.weights_on_input)
    if len(match.w_up) == 2:
        yield "gate and up exchanged", replace(match, w_up=match.w_up[::-1])
        yield "gate twice", replace(match, w_up=(match.w_up[0], match.w_up[0]))
    if match.w_down.apart:
        yield "down of the next expert", replace(match, w_down=_next(match.w_down))
        yield "one expert less", replace(match, E=match.E - 1)
    if match.w_up[0].apart:
        yield "up of the next expert", replace(match, w_up=(_next(match.w_up[0]), *match.w_up[1:]))
    for name in ("b_up", "b_down"):
        if getattr(match, name):
            yield f"{name} lost", replace(match, **{name: () if name == "b_up" else None})
    if match.activation in ACTIVATIONS:
        other = ACTIVATIONS[match.activation]
        formulas._read[other] = {formulas._algebra.call("tanh", (e,)): None for e in formulas.spellings(match.activation)}
        yield "another activation", replace(match, activation=other)


@pytest.mark.parametrize("name", SPELLINGS)
def test_statement_of_a_changed_match_is_another(name, matches):
    rewrite_of(layer_of(name), torch.randn(10, zoo.D))
    (view, match), *_ = matches
    assert certified(view, match) is not None
    mutants = list(_mutants(match, match.reading.formulas))
    lived = [what for what, mutant in mutants if certified(view, mutant) is not None]
    assert not lived and len(mutants) >= 6


# What comes of these is right, and declined since it is worth nothing: a mixture of all experts.
RIGHT = {"dense_cat", "dense_einsum"}


@pytest.mark.parametrize("name", sorted(set(twins.TWINS) - twins.STILL_LAYERS - RIGHT))
def test_statement_refuses_a_near_miss_without_any_proof(name, matches, monkeypatch):
    """With each proof of the matcher switched off, what comes of a twin is not certified."""
    monkeypatch.setattr(config, "strict", False)  # without proofs a producer may raise
    _without_proofs(monkeypatch)
    with contextlib.suppress(Exception):
        rewrite_of(twins.build(name), torch.randn(10, zoo.D))
    # The first expert alone is a layer, which is declined since it is worth nothing.
    assert [match.spelling for view, match in matches if match.E > 1 and certified(view, match) is not None] == []


def proven(condition: object, *_: object, **__: object) -> None:
    """In the place of ``prove``: whatever the condition, it holds."""


def _without_proofs(monkeypatch) -> None:
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("moeblaze_ops.lowering.match") and hasattr(module, "prove"):
            monkeypatch.setattr(module, "prove", proven)
