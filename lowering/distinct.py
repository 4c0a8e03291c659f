"""Ids of which no token has one twice."""

from torch import fx

from moeblaze_ops.lowering.expressions import Expr
from moeblaze_ops.lowering.values import fake_of, target_name


def are_distinct(ids: Expr) -> bool:
    """Whether the elements of ``ids`` along its slot differ: they are the indices of a top-k along their last axis."""
    if ids.kind != "leaf" or ids.args[0].op != "output" or target_name(ids.args[0].args[0]) != "topk":
        return False
    return ids.args[0].args[1] == 1 and _last_axis(ids.args[0].args[0]) and _slot_is_last(ids.args[1])


def _slot_is_last(indices: tuple[Expr, ...]) -> bool:
    """The slot variable is the last index (or an offset of it), and in no other."""
    *others, last = indices
    plain = last.kind == "var" or (last.kind == "linear" and len(last.args[1]) == 1)
    return plain and not any(v in other.free for v in last.free for other in others)


def _last_axis(topk: fx.Node) -> bool:
    dim = topk.args[2] if len(topk.args) > 2 else topk.kwargs.get("dim", -1)
    return dim in (-1, len(fake_of(topk)[1].shape) - 1)
