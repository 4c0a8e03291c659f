"""Operators of a layer that raise an error for ids out of range, where these may be: what goes with the layer is asserted.

    F.one_hot(ids, E), scores.scatter_add(1, ids, weights)      asserted of ids that a caller gives
    F.one_hot(scores.topk(2).indices, E)                        not: a place among E scores is below E
    ids == e                                                    nor here: it says of any number that it is another
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.facts.non_negative import never_negative
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, inplace_name, target_name
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.match.reasons import Reason, prove

_ALONG_AN_AXIS = {
    "gather": 2, "take_along_dim": 1, "scatter": 2, "scatter_add": 2, "scatter_reduce": 2,
    "index_select": 2, "index_add": 2, "index_copy": 2,
}  # fmt: skip
"""Operators that take no number below zero for an index, and where the index stands among their arguments."""

_INDEX, _AXIS = ("index", "indices"), ("dim",)
_SAME_NUMBERS = ("reshape", "permute", "expand")


@dataclass(frozen=True)
class CheckedIds:
    """Ids, and the number that an operator wants them to be below, if any; and not below zero."""

    ids: fx.Node
    operator: str
    end: int | None


def checked_ids(view: GraphView, evaluator: Evaluator, root: fx.Node, nodes: Iterable[fx.Node]) -> tuple[CheckedIds, ...]:
    """What the operators among ``nodes`` check of ids of which nothing else tells that it holds.

    Raises:
        Declined: such ids are written to before ``root``, where they are asserted.
    """
    found: dict[tuple[fx.Node, int | None], CheckedIds] = {}
    for node in nodes:
        operator = inplace_name(node) or target_name(node)
        index, end = _read(node, operator)
        if index is None or free_unbacked_symbols(fake_of(index)):
            continue
        value = view.value_at(index, view.position[node])
        element = evaluator.try_element(value) if isinstance(value, Value) else None
        if element is None or not _may_be_any(element) or _is_known(evaluator, element, end):
            continue
        ids = _source(value).node
        prove(view.value_at(ids, view.position[root]) is _source(value), Reason.OPERAND_CHANGED, "ids that are checked", node)
        found.setdefault((ids, end), CheckedIds(ids, operator, end))
    return tuple(found.values())


def _read(node: fx.Node, operator: str) -> tuple[fx.Node | None, int | None]:
    """The index that an operator checks, and the number that it has to be below."""
    if operator in ("one_hot", "bincount"):
        index = _argument(node, 0, ("tensor", "input", "self"))
        end = fake_of(node).shape[-1] if operator == "one_hot" else None
    elif operator == "embedding":
        index, table = _argument(node, 0, ("input",)), _argument(node, 1, ("weight",))
        end = fake_of(table).shape[0] if isinstance(table, fx.Node) else None
    elif operator in _ALONG_AN_AXIS:
        at = _ALONG_AN_AXIS[operator]
        index, axis = _argument(node, at, _INDEX), _argument(node, 3 - at, _AXIS)
        x = _argument(node, 0, ("input", "self"))
        end = fake_of(x).shape[axis] if isinstance(x, fx.Node) and isinstance(axis, int) else None
    else:
        return None, None
    known = isinstance(index, fx.Node) and isinstance(end, int | None)
    return (index, end) if known else (None, None)


def _argument(node: fx.Node, position: int, names: tuple[str, ...]) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _may_be_any(e: Expr) -> bool:
    """Whether numbers are in an index that somebody gives, or that an operator gives of which nothing is known."""
    if e.kind == "leaf":
        return e.args[0].bound is None and not e.args[0].is_permutation
    if e.kind == "linear":
        return any(_may_be_any(atom) for _, atom in e.args[1])
    return e.kind in ("cast", "add", "mul") and any(isinstance(arg, Expr) and _may_be_any(arg) for arg in e.args)


def _is_known(evaluator: Evaluator, element: Expr, end: int | None) -> bool:
    if evaluator.algebra.extent(element) is None or not never_negative(element):
        return False
    return end is None or evaluator.algebra.fits(element, end)


def _source(value: Value) -> Value:
    """What holds the same numbers in the order in which they were made."""
    while True:
        sorts = value.op == "index" and all(i is None or i.is_permutation for i in value.args[1]) and len(value.shape) == 1
        cast = value.op == "cast" and not {value.dtype, value.args[0].dtype} - {torch.int32, torch.int64}
        if not (sorts or cast or value.op in _SAME_NUMBERS):
            return value
        value = value.args[0]
