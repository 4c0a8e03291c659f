"""Which numbers fade: they are never negative, and where they are zero no gradient gets through to what they are made of.

So is a softmax that underflows, whose derivative is a multiple of it. A token whose weight is such a zero may be left out
of an expert as well as computed and multiplied by zero: neither the result tells nor any gradient, that of the router
included. Hence a mask of the weights that are not zero can go where it is multiplied by the weights themselves.
"""

import torch

from moeblaze_ops.lowering.graph.functional_view import ELEMENTS_OF_FIRST, Value
from moeblaze_ops.lowering.graph.stored_numbers import underflows_no_earlier
from moeblaze_ops.lowering.index_notation.expr import CHOSEN, Expr, split_number, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


def chosen(algebra: Algebra, number: Expr) -> Expr | None:
    """1 where ``number`` is not zero, if it fades."""
    if not fades(number):
        return None
    return algebra.call(CHOSEN, (algebra.mul(*split_number(number)[1]),))


def fades(e: Expr) -> bool:
    kind = e.kind
    if kind == "leaf":
        return e.args[0].fades
    if kind == "call":
        return e.args[0] == "sigmoid"
    if kind == "cast":
        return fades(e.args[1]) and all(underflows_no_earlier(e.args[0], d) for d in _dtypes(e.args[1]))
    if kind == "mul":
        return any(map(fades, e.args)) and all(fades(f) or _is_positive_or_mask(f) for f in e.args)
    if kind == "sum":
        return fades(e.args[1])
    return kind == "add" and all(map(fades, e.args))


def is_rectified(value: Value) -> bool:
    """True if all elements of a tensor are those of a ReLU: of a clamp, the gradient of a number at the bound is one."""
    while value.dtype.is_floating_point and (value.op in ELEMENTS_OF_FIRST or value.op == "cast"):
        value = value.args[0]
    return value.op == "pointwise" and value.args[0] == "relu"


def _is_positive_or_mask(e: Expr) -> bool:
    """A number above zero, or one of 0 and 1 that says which token has which expert."""
    if e.kind == "const":
        return e.args[0] > 0
    divides = e.kind == "call" and e.args[0] == "reciprocal" and _is_not_negative(*e.args[1])
    return is_indicator(e) or divides


def _is_not_negative(e: Expr) -> bool:
    if fades(e) or _is_positive_or_mask(e):
        return True
    if e.kind == "call" and e.args[0] == "clamp":
        return e.args[2][0] is not None and e.args[2][0] >= 0
    return e.kind in ("add", "mul", "sum", "cast") and all(map(_is_not_negative, e.args[e.kind in ("sum", "cast") :]))


def _dtypes(e: Expr) -> set[torch.dtype]:
    """Dtypes of the tensors of numbers behind an expression."""
    leaves = subexpressions(e, lambda s: s.kind == "leaf")
    return {leaf.args[0].dtype for leaf in leaves if leaf.args[0].dtype.is_floating_point}
