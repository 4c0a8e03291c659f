"""What stays of a tensor where experts store their rows over it, for the search for layers to find what their sum starts from.

    out = x.clone()                             rest = x.clone()
    out[kept[:, e]] = expert(e, x[kept[:, e]])  rest = rest.masked_fill(kept[:, e, None], 0)        for each e

A token that no expert keeps passes through. The layer adds to ``rest`` what its experts make; nobody else reads it.
"""

import torch
from torch import fx

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, inplace_name, target_name
from moeblaze_ops.lowering.graph.sizes import Size, same_size
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
        if not _stores(store) or not isinstance(value, Value) or value.op != "put":
            continue
        x, (rows, *_), *_ = value.args
        mask, insert = _mask_of(view, store, rows, x.shape[:-1]), Inserter(edits, store.prev)
        if x not in rest_of:
            rest_of[x] = None if x.op == "full" else insert.call("clone", target)  # nothing stays of zeros
        if (rest := rest_of[x]) is None or mask is None:
            rest_of[value] = None
            continue
        rest = rest_of[value] = insert.call("masked_fill", rest, insert.call("unsqueeze", mask, -1), 0)
        rest.meta[STAYS] = True


def _stores(node: fx.Node) -> bool:
    """True if a node stores floating-point numbers by a subscript."""
    if (inplace_name(node) or target_name(node)) not in ("setitem", "__setitem__", "index_put", "index_copy"):
        return False
    return getattr(fake_of(node.all_input_nodes[0]), "dtype", torch.int64).is_floating_point


def _mask_of(view: GraphView, store: fx.Node, rows: Value, sizes: tuple[Size, ...]) -> fx.Node | None:
    """The mask of these sizes whose true elements the first axis of a subscript has."""
    mask = rows.args[0] if rows.op == "nonzero" else None
    if mask is None or mask.dtype != torch.bool or len(mask.shape) != len(sizes) or not all(map(same_size, mask.shape, sizes)):
        return None  # out[torch.where(kept[:-1, e])] = y is a store by a shorter one
    return mask.node if view.value_at(mask.node, view.position[store]) is mask else None
