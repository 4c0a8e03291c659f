"""Ids of which no token has one twice."""

from torch import fx

from moeblaze_ops.lowering.graph.functional_view import target_name
from moeblaze_ops.lowering.index_notation.expr import Expr


def are_distinct(ids: Expr) -> bool:
    """Whether the elements of ``ids`` along its slot differ: they are indices of a top-k or a sort along their last axis."""
    if ids.kind != "leaf" or ids.args[0].op not in ("output", "opaque"):
        return False
    made_by, which = ids.args[0].args[:2]
    name = target_name(made_by)
    if (name, which) not in _POSITIONS:
        return False
    return _dim(made_by, name) in (-1, len(ids.args[1]) - 1) and _slot_is_last(ids.args[1])


_POSITIONS = {("topk", 1): 2, ("sort", 1): 1, ("argsort", None): 1}
"""What gives places of the elements of an axis, no place twice, by the number of its output; and where its ``dim`` stands."""


def _dim(made_by: fx.Node, name: str) -> int:
    at = next(at for (known, _), at in _POSITIONS.items() if known == name)
    return made_by.args[at] if len(made_by.args) > at else made_by.kwargs.get("dim", -1)


def _slot_is_last(indices: tuple[Expr, ...]) -> bool:
    """The slot variable is the last index (or an offset of it), and in no other."""
    *others, last = indices
    plain = last.kind == "var" or (last.kind == "linear" and len(last.args[1]) == 1)
    return plain and not any(v in other.free for v in last.free for other in others)
