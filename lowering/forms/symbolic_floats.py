"""Python's numbers that may be others at the next call, as Dynamo has them where it compiles for dynamic shapes."""

from dataclasses import dataclass, field

import sympy
import torch

from moeblaze_ops.lowering.graph.functional_view import GraphView, NotCanonical, Value, at_least_fp32


@dataclass(frozen=True)
class ChangingNumber:
    expr: sympy.Expr
    number: torch.SymFloat = field(compare=False)  # comparing it would be a guard

    @property
    def present(self) -> float:
        """What it is in this call."""
        return self.number.node.hint

    def guard(self) -> None:
        """From now on the graph is that of the present number alone."""
        float(self.number)


def changing(view: GraphView, number: torch.SymFloat, dtype: torch.dtype) -> Value:
    """The number as a tensor of rank 0, which is as exact as what operators compute in."""
    if number.node.hint is None:
        raise NotCanonical("a number that the graph computes")
    return view.make("number", ChangingNumber(number.node.expr, number), shape=(), dtype=at_least_fp32(dtype))
