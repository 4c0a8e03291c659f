"""What comes of a candidate: a proven layer, or a reason why not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.find_scales import Scale
from moeblaze_ops.lowering.match.operands.find_scored import Named
from moeblaze_ops.lowering.match.operands.low_rank import Factors
from moeblaze_ops.lowering.match.operands.weight_layout import WeightView
from moeblaze_ops.lowering.match.reasons import Reason
from moeblaze_ops.lowering.match.region import Region
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm
from moeblaze_ops.lowering.match.zero_computation import ZeroComputation


@dataclass(frozen=True)
class Reading:
    """How a layer was read: terms of a sum, each with the expert that it was read as. Nothing of it is believed."""

    evaluator: Evaluator
    formulas: Formulas
    experts: tuple[tuple[Expr, ExpertTerm], ...]


@dataclass(frozen=True)
class MoEMatch:
    """A proven layer: its operands as nodes and views, ready to be rewritten."""

    root: fx.Node
    reading: Reading = field(compare=False, repr=False)
    region: Region
    x: Operand
    experts: Operand | None  # None where a token may go to every expert: its ids are all numbers from 0 on
    weights: Operand | None
    scales: tuple[Scale, ...]  # what the weights are multiplied by
    weights_on_input: bool
    w_up: tuple[WeightView, ...]
    b_up: tuple[WeightView, ...]
    w_down: WeightView
    b_down: WeightView | None
    activation: str
    spelling: str
    T: Size
    K: int
    E: int
    D: int
    F: int
    out_width: Size  # D, but for experts whose output is as wide as something else
    dropout: tuple[float, float]  # how likely an element is dropped: of the activation, of an expert's output
    dtype: torch.dtype
    chosen: Counter = field(default_factory=Counter, compare=False)  # of ``Chosen``
    base: fx.Node | None = None  # what the layer is added to, in the shape of the result
    kept: Operand | None = None  # [T, E], 0 where an expert drops a token that chose it; of each slot, [T, K, E]
    numbers: tuple[int, ...] = ()  # the ids of experts 0 to E-1, where there are others
    zero_computation: tuple[ZeroComputation, ...] = ()  # experts without projections
    named: Named | None = None  # the tokens that experts name themselves
    parameters: tuple[Operand, ...] = ()  # what the activation reads, of one element or [E] each
    low_rank_up: tuple[tuple[Factors, ...], ...] = ()  # what adapters add to each half of the up weights
    low_rank_down: tuple[Factors, ...] = ()
    subscripts: bool = False  # the ids are subscripts of weights and may be negative, or no expert's: that is an error
    copied: frozenset[fx.Node] = frozenset()  # operands, not weights, that are written before the backward: it reads copies

    @property
    def has_low_rank(self) -> bool:
        return any(self.low_rank_up) or bool(self.low_rank_down)

    @property
    def views(self) -> list[WeightView]:
        """The weights and biases of experts, without adapters."""
        return [*self.w_up, *self.b_up, self.w_down, *([self.b_down] if self.b_down else [])]

    @property
    def copied_bytes(self) -> int:
        """Bytes of separate expert weights and biases that are joined by a copy, in forward and again in backward."""
        return sum(view.copied_bytes for view in self.views)


@dataclass(frozen=True)
class Decline:
    """A candidate that is left alone."""

    root: fx.Node
    node: fx.Node
    reason: Reason
    detail: str
    ids: frozenset[Value] = field(default_factory=frozenset)
    chosen: Counter = field(default_factory=Counter, compare=False)  # of ``Chosen``, the experts of its sum
    rows: frozenset[Value] = frozenset()  # products of row groups that nothing was read from
    has_experts: bool = True  # whether any term of its sum is an expert with a projection of its own

    @property
    def progress(self) -> tuple[int, int]:
        """How far the proof came, and for how many experts."""
        return self.reason.rank, self.chosen.total()


def furthest(declined: Sequence[Decline]) -> list[Decline]:
    """The best attempt for each set of ids, innermost of equals; ``declined`` is in reversed graph order."""
    best: dict[frozenset[Value], Decline] = {}
    for decline in declined:
        known = best.get(decline.ids)
        if known is None or decline.progress >= known.progress:
            best[decline.ids] = decline
    return list(best.values())
