"""What stays of a tensor where experts store their rows over it, for the search for layers to find what their sum starts from.

    out = x.clone()                             rest = x.clone()
    out[kept[:, e]] = expert(e, x[kept[:, e]])  rest = rest.masked_fill(kept[:, e, None], 0)        for each e

A token that no expert keeps passes through. The layer adds to ``rest`` what its experts make; nobody else reads it.
"""

import torch
from torch import fx

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, inplace_name, target_name
from moeblaze_ops.lowering.match.matcher import view_of
from moeblaze_ops.lowering.match.residual import STAYS
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.undoable_edits import Edits


def hold_what_stays(edits: Edits) -> None:
    """Insert it before each store of rows that a mask selects; what stays unread is erased later."""
    if not any(map(_stores, edits.graph.nodes)):
        return
    view, rest_of = view_of(edits.graph), dict[Value, fx.Node | None]()
    for store, target in view.all_writes():
        value = view.result(store)
        if not _stores(store) or not isinstance(value, Value) or value.op != "put" or not value.dtype.is_floating_point:
            continue
        x, (rows, *_), *_ = value.args
        mask, insert = _mask_of(view, store, rows), Inserter(edits, store.prev)
        if x not in rest_of:
            rest_of[x] = None if x.op == "full" else insert.call("clone", target)  # nothing stays of zeros
        if (rest := rest_of[x]) is None or mask is None:
            rest_of[value] = None
            continue
        rest = rest_of[value] = insert.call("masked_fill", rest, insert.call("unsqueeze", mask, -1), 0)
        rest.meta[STAYS] = True


def _stores(node: fx.Node) -> bool:
    return (inplace_name(node) or target_name(node)) in ("setitem", "__setitem__", "index_put", "index_copy")


def _mask_of(view: GraphView, store: fx.Node, rows: Value) -> fx.Node | None:
    """The mask of all axes but the last whose true elements the first axis of a subscript has."""
    mask = rows.args[0] if rows.op == "nonzero" else None
    fake = None if mask is None else fake_of(mask.node)
    is_held = mask is not None and view.value_at(mask.node, view.position[store]) is mask and fake.dtype == torch.bool
    return mask.node if is_held and fake.dim() == fake_of(view.writes[store]).dim() - 1 else None
