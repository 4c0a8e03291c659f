"""That an activation's name, or its text, is the formula of what was read as it."""

import torch

from moeblaze_ops.kernels.formulas.expression import GATED_SYMBOLS, PARAMETER_SYMBOLS, UNGATED_SYMBOLS, symbol
from moeblaze_ops.kernels.formulas.named import is_formula_of, is_gated
from moeblaze_ops.lowering.index_notation.expr import Expr, is_changing, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.pointwise_formula import to_formula


def is_activation(algebra: Algebra, match: MoEMatch, formulas: Formulas, read: Expr) -> bool:
    """True if ``read`` is the activation of a match, in the symbols of ``formulas``: numbers that may change stay as they are."""
    numbers = {e: e.args[0].args[0] for e in subexpressions(read, is_changing)}
    present = algebra.substitute(read, {e: algebra.const(number.present) for e, number in numbers.items()})
    halves = GATED_SYMBOLS if is_gated(match.activation) else UNGATED_SYMBOLS
    symbols = dict(zip((formulas.gate, formulas.up), map(symbol, halves), strict=False))
    symbols |= dict(zip(formulas.parameters, map(symbol, PARAMETER_SYMBOLS), strict=True))
    double = any(value.dtype == torch.float64 for view in match.views for value in view.values)
    try:
        alike = is_formula_of(match.activation, to_formula(present, symbols), double=double)
    except ValueError:
        return False
    for number in numbers.values() if alike else ():
        number.guard()
    return alike
