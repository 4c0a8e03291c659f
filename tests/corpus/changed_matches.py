"""Matches that state something else than their graph computes: a right match that was changed, and what is found of a twin
where each proof of the matcher is switched off.

A statement is made of the operands of a match alone. So it refuses wrong matches, whatever the proofs behind them say.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from torch import fx

from moeblaze_ops import config
from moeblaze_ops.lowering.graph.functional_view import GraphView
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView
from moeblaze_ops.lowering.rewrite import rewrite
from moeblaze_ops.lowering.statement.certify import certified

ACTIVATIONS = {"swiglu": "geglu", "geglu": "swiglu", "silu": "gelu", "gelu": "silu", "relu": "silu", "swiglu_clamped": "swiglu"}


@contextlib.contextmanager
def matches() -> Iterator[list[tuple[GraphView, MoEMatch]]]:
    """The matches of what is rewritten, each with the view of the graph that it was found in."""
    found: list[tuple] = []
    original = rewrite._matches

    def recorded(view):
        results, views = original(view)
        found.extend((views[match.root], match) for match in results if isinstance(match, MoEMatch))
        return results, views

    with mock.patch.object(rewrite, "_matches", recorded):
        yield found


def assert_changes_are_refused(view: GraphView, match: MoEMatch) -> None:
    assert certified(view, match) is not None
    mutants = list(_mutants(match, match.reading.formulas))
    lived = [what for what, mutant in mutants if certified(view, mutant) is not None]
    assert not lived and len(mutants) >= 6


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
        for what, read in (("another activation", lambda e: formulas._algebra.call("tanh", (e,))), ("another name", lambda e: e)):
            formulas._read[other] = {read(e): None for e in formulas.spellings(match.activation)}
            yield what, replace(match, activation=other)


def certified_without_proofs(gm: fx.GraphModule) -> list[str]:
    """The spellings of what is found in a graph and certified, where whatever is to be proven holds."""
    with without_proofs(), matches() as found, contextlib.suppress(Exception):
        rewrite.rewrite_graph(gm)
    # The first expert alone is a layer, which is declined since it is worth nothing.
    return [match.spelling for view, match in found if match.E > 1 and certified(view, match) is not None]


@contextlib.contextmanager
def without_proofs() -> Iterator[None]:
    """A context in which whatever the matcher proves holds; then a producer may raise."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(config, "strict", False))
        for name, module in [*sys.modules.items()]:
            if name.startswith("moeblaze_ops.lowering.match") and hasattr(module, "prove"):
                stack.enter_context(mock.patch.object(module, "prove", _proven))
        yield


def _proven(condition: object, *_: object, **__: object) -> None:
    """In the place of ``prove``: whatever the condition, it holds."""
