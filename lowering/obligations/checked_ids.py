"""Operators that raise an error for ids out of range, where these may be: what goes with them is asserted in their place.

    F.one_hot(ids, E), scores.scatter_add(1, ids, weights)      asserted of ids that a caller gives
    torch.bincount(ids, minlength=E).cumsum(0), as offs         asserted: more counts are no offsets of E groups
    F.one_hot(scores.topk(2).indices + 1, E)                    asserted, since the last one may be E
    F.one_hot(scores.topk(2).indices, E)                        not: a place among E scores is below E
    ids == e                                                    nor here: it says of any number that it is another
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.fake_values import fake_of, has_storage
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, inplace_name, target_name
from moeblaze_ops.lowering.graph.operators import GROUPED_PRODUCTS
from moeblaze_ops.lowering.graph.sizes import Size, size_of
from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative
from moeblaze_ops.lowering.undoable_edits import Edits, NodeInserter

_ALONG_AN_AXIS = {
    "gather": 2, "take_along_dim": 1, "scatter": 2, "scatter_add": 2, "scatter_reduce": 2,
    "index_select": 2, "index_add": 2, "index_copy": 2,
}  # fmt: skip
"""Operators with an axis and an index, and where the index stands among their arguments."""

_WRITES_AT = ("setitem", "__setitem__", "index_put")
_SAME_NUMBERS = ("reshape", "permute", "expand")


@dataclass(frozen=True)
class CheckedIds:
    """An operator, the ids that it checks, and the number that they have to be below, if any."""

    node: fx.Node
    operator: str
    ids: fx.Node
    end: int | None


def checked_ids(view: GraphView, nodes: Iterable[fx.Node]) -> list[CheckedIds]:
    """What operators among ``nodes`` check of ids of which nothing else tells that it holds."""
    found: dict[tuple, CheckedIds] = {}
    evaluator, nodes = Evaluator(), list(nodes)
    groups = _numbers_of_groups(nodes)
    for node in nodes:
        name = inplace_name(node) or target_name(node)
        read = [(index, end) for index, end in _read(node, name, groups) if isinstance(index, fx.Node)]
        values = [view.value_at(index, view.position[node]) for index, _ in read]
        elements = [evaluator.try_element(value) if isinstance(value, Value) else None for value in values]
        for (index, end), value, element in zip(read, values, elements, strict=True):
            if not isinstance(end, int | None) or not _is_of_ids(index) or not isinstance(value, Value):
                continue
            if element is not None and _is_known(evaluator, element, end):
                continue
            made = _source(value)
            holds = view.writes.get(made.node, made.node)  # what a node writes, that itself gives nothing: ids[0] = ids[1]
            ids = holds if view.value_at(holds, view.position[node]) is made else index
            found.setdefault((name in _WRITES_AT, made, end), CheckedIds(node, name, ids, end))
    return list(found.values())


def assert_in_range(edits: Edits, checked: CheckedIds) -> fx.Node:
    """Assert behind an operator what it checks, as torch compiles ``one_hot``: the host does not wait for it."""
    ids, end, call = checked.ids, checked.end, NodeInserter(edits, checked.node).call
    if checked.operator in (*_WRITES_AT, "index_select", "embedding"):  # these raise an `IndexError`
        numbers_E = call(torch.arange, end, device=fake_of(ids).device)
        if checked.operator in _WRITES_AT:
            ids = call(operator.getitem, numbers_E, ids)
        else:
            ids = call(torch.index_select, numbers_E, 0, call("reshape", ids, (-1,)))
    in_range, rule = call(torch.ge, ids, 0), "non-negative"
    if end is not None:
        in_range, rule = call(torch.logical_and, in_range, call(torch.lt, ids, end)), f"numbers below {end}"
    return call(torch._assert_async, call("all", in_range), f"{checked.operator}: ids must be {rule}")


def _is_of_ids(index: fx.Node) -> bool:
    """True if an index holds whole numbers, as many as the graph tells. Under vmap ``one_hot`` checks none."""
    fake = fake_of(index)
    integers = isinstance(fake, torch.Tensor) and not fake.is_floating_point() and fake.dtype != torch.bool
    return integers and has_storage(index) and not free_unbacked_symbols(fake)


def _numbers_of_groups(nodes: Iterable[fx.Node]) -> dict[Size, int]:
    """How many groups grouped products have, by the number of their offsets that only the data tell."""
    groups: dict[Size, int] = {}
    for node in nodes:
        if target_name(node) in GROUPED_PRODUCTS:
            weights, offs = _argument(node, 1, "mat2", "mat_b", "weight"), _argument(node, 2, "offs")
            if isinstance(weights, fx.Node) and isinstance(offs, fx.Node) and free_unbacked_symbols(fake_of(offs)):
                groups[size_of(fake_of(offs).shape[0])] = fake_of(weights).shape[0]
    return groups


def _read(node: fx.Node, name: str, groups: dict[Size, int]) -> Iterable[tuple[Any, Any]]:
    """The indices that an operator checks, each with the number that it has to be below."""
    x = _argument(node, 0, "input", "self")
    if name in ("one_hot", "bincount", "counts_below"):
        size = fake_of(node).shape[-1]
        return [(_argument(node, 0, "tensor", "input", "ids"), size if name == "one_hot" else groups.get(size_of(size)))]
    if name == "embedding":
        table = _argument(node, 1, "weight")
        return [(x, fake_of(table).shape[0])] if isinstance(table, fx.Node) else []
    if name in _ALONG_AN_AXIS:
        at = _ALONG_AN_AXIS[name]
        axis = _argument(node, 3 - at, "dim")
        known = isinstance(x, fx.Node) and isinstance(axis, int)
        return [(_argument(node, at, "index", "indices"), fake_of(x).shape[axis])] if known else []
    if name in _WRITES_AT and isinstance(x, fx.Node):
        key = _argument(node, 1, "indices")
        keys = key if isinstance(key, tuple | list) else (key,)
        return list(zip(keys, fake_of(x).shape, strict=False)) if all(isinstance(one, fx.Node) for one in keys) else []
    return []


def _argument(node: fx.Node, position: int, *names: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _is_known(evaluator: Evaluator, element: Expr, end: int | None) -> bool:
    if evaluator.algebra.extent(element) is None or not never_negative(element):
        return False
    return end is None or evaluator.algebra.fits(element, end)


def _source(value: Value) -> Value:
    """What holds the same numbers in the order in which they were made."""
    while True:
        sorts = value.op == "index" and len(value.shape) == 1 and all(i is not None and i.is_permutation for i in value.args[1])
        cast = value.op == "cast" and not {value.dtype, value.args[0].dtype} - {torch.int32, torch.int64}
        if not (sorts or cast or value.op in _SAME_NUMBERS):
            return value
        value = value.args[0]
