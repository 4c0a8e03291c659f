"""What is true of numbers because tensors are indexed by them: they are in range, or the program raises an error."""

import operator

from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_order
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


def of_experts_alone(algebra: Algebra, term: Expr, feature: Expr) -> Expr:
    """A term without comparisons that say the same of every id of an expert: other ids choose no weights, and get nothing.

    An id below 0 chooses an expert, too, from the last one on.

        out.masked_fill(ids >= E, 0)                of W[ids] @ x, or a grouped product, where W has E experts: as it is
        out.masked_fill(ids >= E - 1, 0)            the mask stays: expert E - 1 is masked
    """
    found = set[tuple[Expr, Size]]()
    for weight in subexpressions(term, lambda e: e.kind == "leaf" and feature in e.args[1]):
        found |= {axis for axis in zip(weight.args[1], weight.args[0].shape, strict=True) if axis[0].kind in ("leaf", "call")}
    if len(found) != 1:
        return term
    ((ids, count),) = found
    masks: dict[Expr, Expr] = {}
    for mask in subexpressions(term, lambda e: is_order(e) and e.args[1][0] is ids):
        number, compare = mask.args[1][1], getattr(operator, mask.args[0])
        if number.kind == "const" and isinstance(count, int):
            first, last = compare(-count, number.args[0]), compare(count - 1, number.args[0])
            masks |= {mask: algebra.const(int(first))} if first == last else {}
    return algebra.substitute(term, masks) if masks else term
