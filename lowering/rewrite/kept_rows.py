"""Tensors that say which tokens experts keep, where a program takes the first of an expert's rows and no tensor of it says so.

    token, k = torch.where(chosen == e)
    token, k = token[:C], k[:C]                 kept[..., e] = mask.flatten().cumsum(0).view_as(mask) <= C,  mask = chosen == e
"""

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.match.matcher import view_of
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.undoable_edits import Edits


def hold_kept(edits: Edits) -> None:
    """Insert such tensors where rows are cut, for the search for operands to find; those that stay unread are erased later."""
    cuts = {node: stop for node in edits.graph.nodes if (stop := _stop(node)) is not None}
    view = view_of(edits.graph) if cuts else None
    masks: dict[tuple, dict[fx.Node, None]] = {}
    for node, stop in cuts.items():
        if (mask := _mask(view.value_at(node, view.position[node]))) is not None:
            masks.setdefault((stop, mask.shape, _compared(mask)), {})[mask.node] = None
    for (stop, *_), alike in masks.items():
        kept = []
        for mask in alike:
            insert = Inserter(edits, mask)
            counted = insert.call("view_as", insert.call("cumsum", insert.call("flatten", mask), 0), mask)
            kept.append(insert.call(torch.le, counted, stop))
        insert.at(*kept).call(torch.stack, kept, -1)


def _compared(mask: Value) -> Value:
    """What is compared with the numbers of experts, as of one slot of each token."""
    while mask.op in ("any", "reshape", "cast"):
        mask = mask.args[0]
    return mask.args[1][0] if mask.op == "pointwise" else mask


def _stop(node: fx.Node) -> int | None:
    """The number of rows that a node takes from the first on, of as many as only the data tell."""
    key = node.args[1] if node.target is operator.getitem else None
    first = key[0] if isinstance(key, tuple) and key else key
    is_cut = isinstance(first, slice) and not first.start and first.step in (None, 1) and isinstance(first.stop, int)
    return first.stop if is_cut and free_unbacked_symbols(fake_of(node.args[0]).shape[:1]) else None


def _mask(rows: Value) -> Value | None:
    """The mask of whose true elements a value has the first rows."""
    while rows.op in ("reshape", "stack", "index"):
        parts = rows.args[1] if rows.op == "index" else rows.args[0] if rows.op == "stack" else rows.args
        rows = next(part for part in parts if part is not None)
    if rows.op != "nonzero" or rows.args[0].op != "pointwise" or rows.args[0].args[0] != "and":
        return None
    mask = rows.args[0].args[1][0]
    fake = fake_of(mask.node)
    return mask if isinstance(fake, torch.Tensor) and fake.dtype == torch.bool and fake.dim() == len(mask.shape) else None
