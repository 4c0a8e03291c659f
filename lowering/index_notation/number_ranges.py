"""Which integers a dtype holds as they are: elsewhere they wrap around, or are rounded, and are no sums of numbers any more.

    ids * 2 + 1, (ids + 256).float()            but not  ids.int() * 2**30 * 4, which is 0
"""

import math

import torch

from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.normal_form import Algebra

_LARGEST = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1, torch.float32: 2**24, torch.float64: 2**53}
_GIVEN = 2**15
"""Numbers of which nothing is known, such as ids that the graph is given, are taken to be no larger."""


def holds(algebra: Algebra, dtype: torch.dtype, e: Expr) -> bool:
    """Whether ``dtype`` holds all that an index may be; sizes that are symbols are those of tensors in memory."""
    if dtype not in _LARGEST or e.kind not in ("const", "linear"):
        return True
    constant, terms = e.args if e.kind == "linear" else (e.args[0], ())
    largest: float = abs(constant) if isinstance(constant, int) else 0
    for coefficient, atom in terms:
        extent = algebra.extent(atom)
        if isinstance(coefficient, int) and (extent is None or isinstance(extent, int)):
            largest += abs(coefficient) * (_most_given(atom) if extent is None else max(extent - 1, 0))
    return largest <= _LARGEST[dtype]


def _most_given(atom: Expr) -> float:
    """The largest number that an atom without a bound may be; one that wrapped around before may be any."""
    return math.inf if atom.kind == "leaf" and atom.args[0].op == "pointwise" else _GIVEN
