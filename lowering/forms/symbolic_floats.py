"""Python's numbers that may be others at the next call, as Dynamo has them where it compiles for dynamic shapes."""

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type

from moeblaze_ops.lowering.graph.functional_view import GraphView, NotCanonical, Value, at_least_fp32
from moeblaze_ops.lowering.index_notation.expr import Expr


@dataclass(frozen=True)
class ChangingNumber:
    expr: sympy.Expr
    number: torch.SymFloat = field(compare=False)  # comparing it would be a guard

    @property
    def present(self) -> float:
        return present(self.number)

    def guard(self) -> None:
        """From now on the graph is that of the present number alone."""
        float(self.number)


def present(number: torch.SymFloat) -> float | None:
    """What a number is in this call; None where the graph computes it."""
    return number.node.hint


def changing(view: GraphView, number: torch.SymFloat, dtype: torch.dtype) -> Value:
    """The number as a tensor of rank 0, which is as exact as what operators compute in."""
    if present(number) is None:
        raise NotCanonical("a number that the graph computes")
    return view.make("number", ChangingNumber(number.node.expr, number), shape=(), dtype=at_least_fp32(dtype))


def guarded(number: Any) -> Any:
    """A number of the program beside the tensor of a function that compilers make for one number alone: a guard, as their own.

    F.leaky_relu(h, self.slope)
    """
    if not isinstance(number, torch.SymFloat):
        return number
    of_program = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in number.node.expr.free_symbols)
    return float(number) if of_program else number


def is_changing(e: Expr) -> bool:
    return e.kind == "leaf" and e.args[0].op == "number"
