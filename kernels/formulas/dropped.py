"""Dropout as a part of a formula: ``act(h) * where(draw(p0, n, f) >= p, 1 / (1 - p), 0)``, whose last parameter is the seed."""

from moeblaze_ops.kernels.formulas.expression import PARAMETER_SYMBOLS, PLACE_SYMBOLS, ZERO, apply, number, symbol
from moeblaze_ops.kernels.formulas.named import formula_of
from moeblaze_ops.kernels.formulas.text import to_text


def factor_of_kept(p: float) -> float:
    """What elements are multiplied by that are dropped with probability ``p``, where they are not."""
    return 1 / (1 - p) if p < 1 else 0.0


def dropped(activation: str, p: float, num_parameters: int) -> str:
    """The formula of an activation of ``num_parameters`` parameters, three at most, with dropout behind it."""
    drawn = apply("draw", *map(symbol, (PARAMETER_SYMBOLS[num_parameters], *PLACE_SYMBOLS)))
    factor = apply("where", apply("ge", drawn, number(p)), number(factor_of_kept(p)), ZERO)
    return to_text(apply("mul", formula_of(activation), factor))
