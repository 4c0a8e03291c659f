"""Which products are projections: products with a matrix that the caller passes in, or that is computed of the model's state.

This decides how deep is looked, and how bound variables are called; an element is the same whatever is said here.
"""

from collections.abc import Callable, Sequence

import torch

from moeblaze_ops.lowering.graph.computed_weights import VIEWS, is_computed_weight
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


def is_weight(value: Value, *, gathered: bool) -> bool:
    """A matrix that the caller passes in, through views, casts and gathers only; ``gathered``: there must be one.

    One that is computed of the model's state, or that has a low-rank addition, is a matrix like any other.
    """
    while value.op in (*VIEWS, "index") and not is_computed_weight(value):
        gathered = gathered and value.op != "index"
        value = value.args[0][0] if value.op in ("stack", "cat") else value.args[0]
    return (value.op in ("input", "low_rank") or is_computed_weight(value)) and not gathered


def is_no_projection(contract: Value) -> bool:
    """True if one of what is multiplied is a mask, or nothing is summed."""
    xs, labels, out = contract.args
    return any(map(is_mask, xs)) or set("".join(labels)) <= set(out)


def projects(value: Value) -> bool:
    """True if a value is a product with a matrix that the caller passes in."""
    return value.op == "grouped_mm" or (value.op == "contract" and any(is_weight(x, gathered=False) for x in value.args[0]))


def is_mask(value: Value) -> bool:
    """Truth values, as numbers of some type, products of such and choices between them and a number."""
    while value.dtype != torch.bool and value.op in ("reshape", "permute", "slice", "select", "cast", "expand"):
        value = value.args[0]
    if value.op == "contract":
        return all(map(is_mask, value.args[0]))
    name, parts = value.args[:2] if value.op == "pointwise" else ("", ())
    if name in ("mul", "where"):
        return all(is_mask(x) or (name == "where" and x.op == "full" and x.args[0] in (0, 1)) for x in parts)
    return value.dtype == torch.bool or name == "eq"


def moves_with_token(index: Expr) -> bool:
    """True if an index is made of a token's position, not only of what a tensor holds there."""
    ends = subexpressions(index, lambda e: e.kind == "var" or (e.kind == "leaf" and not e.args[0].is_permutation))
    return any(e.kind == "var" and e.args[2] == "t" for e in ends)


def letters_of_choices(
    algebra: Algebra,
    letters: Sequence[str],
    sizes: dict[str, Size],
    used: Indices,
    factors: Callable[[dict[str, Expr]], list[Expr]],
) -> set[str]:
    """Of the letters that a projection sums over, those of experts or slots: ids are compared with them, or read at them.

    ``factors`` gives what is multiplied at an index for each of them, nothing where that is not known.
    """
    if len(letters) < 2:
        return set()
    level = max((v.args[0] for e in used for v in e.free), default=-1) + 1
    index = {letter: algebra.var(level + i, sizes[letter], "r") for i, letter in enumerate(letters)}
    choices = [e for factor in factors(index) for e in subexpressions(factor, _is_choice)]
    return {letter for letter, var in index.items() if any(var in choice.free for choice in choices)}


def _is_choice(e: Expr) -> bool:
    """True if ``e`` is a comparison, or what a tensor of ids holds where it is an index."""
    return e.kind == "eq" or (e.kind == "leaf" and not e.args[0].dtype.is_floating_point)
