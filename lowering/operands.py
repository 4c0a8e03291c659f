"""Which node of the graph holds a tensor that a proof describes by its elements."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from moeblaze_ops.lowering.elements import Evaluator, Unroll
from moeblaze_ops.lowering.expressions import Expr, Size, same_size
from moeblaze_ops.lowering.values import GraphView, Value


@dataclass(frozen=True)
class Operand:
    """A node that holds an operand of the ops, up to a reshape to ``[T, C]`` and a cast to ``dtype``."""

    node: fx.Node
    dtype: torch.dtype


class Finder:
    """Looks for operands among the nodes that one result depends on, the latest first."""

    def __init__(
        self, view: GraphView, evaluator: Evaluator, root: fx.Node, tokens: tuple[Expr, ...], sizes: tuple[Size, ...]
    ):
        self._view, self._evaluator, self._tokens, self._sizes = view, evaluator, tokens, sizes
        self._position = view.position[root]
        self._nodes = sorted(dependencies(view, root), key=view.position.__getitem__, reverse=True)
        self._found: dict[tuple, Operand | None] = {}

    def find(self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int = 0) -> Operand | None:
        """The node ``[..., width]`` whose element at (token, column) is the target, for every column."""
        key = (targets, columns, depth)
        if key not in self._found:
            self._found[key] = self._search(targets, columns, width, depth)
        return self._found[key]

    def _search(self, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int) -> Operand | None:
        for node in self._nodes:
            value = self._view.value_at(node, self._position)
            if isinstance(value, Value) and self._holds(value, targets, columns, width, depth):
                return Operand(node, value.dtype)
        casts = {t.args[0] if t.kind == "cast" else None for t in targets}
        if len(casts) == 1 and None not in casts:
            found = self._search(tuple(t.args[1] for t in targets), columns, width, depth)
            return found and Operand(found.node, casts.pop())
        return None

    def _holds(self, value: Value, targets: tuple[Expr, ...], columns: tuple[Expr, ...], width: Size, depth: int) -> bool:
        for token in self._token_indices(value.shape, width):
            rank = len(token)
            try:
                if all(
                    self._evaluator.element(value, (*token, column)[: len(value.shape)], depth) is target
                    for target, column in zip(targets, columns, strict=True)
                ) and len(value.shape) in (rank, rank + 1):
                    return True
            except Unroll:
                continue
        return False

    def _token_indices(self, shape: tuple[Size, ...], width: Size) -> Iterable[tuple[Expr, ...]]:
        """Token indices that fit ``[*tokens, width]``, its flattened form, or ``[*tokens]`` when width is 1."""
        forms = [(self._sizes, self._tokens)]
        if len(self._sizes) > 1:
            terms, count = [], 1
            for token, size in zip(self._tokens[::-1], self._sizes[::-1], strict=True):
                terms.append((count, token))
                count = count * size
            flat = self._evaluator.algebra.linear(0, terms)
            forms.append(((count,), (flat,)))
        for own, token in forms:
            for wanted in ((*own, width), own) if width == 1 else ((*own, width),):
                if len(wanted) == len(shape) and all(map(same_size, wanted, shape)):
                    yield token


def dependencies(view: GraphView, root: fx.Node, stop: frozenset[fx.Node] = frozenset()) -> set[fx.Node]:
    """Nodes that ``root`` depends on, writes into shared buffers included, not past ``stop``."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for writer, written in view.writes.items():
        for alias in view.aliases(written):
            writers.setdefault(alias, []).append(writer)
    seen: set[fx.Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in stop and node is not root:
            continue
        stack.extend(node.all_input_nodes)
        stack.extend(w for w in writers.get(node, ()) if view.position[w] <= view.position[root])
    return seen
