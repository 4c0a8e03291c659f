"""Elements of products of row groups, and which group a row is in.

Groups stand one behind another and are given by where each ends, a running count of ids. In what was sorted by these
ids, the group of a row is the row's id.
"""

from collections.abc import Callable

from moeblaze_ops.lowering.facts.unique_ids import are_distinct
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices, Size, same_size
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


class GroupRules:
    """Rules of `searched` and `grouped_mm`; mixed into `Evaluator`."""

    algebra: Algebra
    element: Callable[..., Expr]
    _with_number: Callable[..., Expr]

    def _element_searched(self, value: Value, indices: "Indices", depth: int) -> Expr:
        ends, x = value.args
        row = self.element(x, indices, depth)
        in_place = x.op == "arange" and x.args == (0, 1)
        if in_place and row.kind == "nonzero" and (number := _group_of_true(row.args[0], value)) is not None:
            return self.algebra.const(number)
        group = self._group(ends, ends.shape[0], row, indices, depth)
        return self.algebra.leaf(value, indices) if group is None else group

    def _group(self, ends: Value, num_groups: Size, row: Expr, indices: "Indices", depth: int) -> Expr | None:
        """The group in which a row stands, where the ends of the groups are running counts."""
        number = self.algebra.fresh(indices, num_groups)
        end = self.element(ends, (number,), depth)
        running = end.kind == "prefix" and end.args[2] is number
        return self.algebra.group(*self.algebra.open(end), row) if running else None

    def _element_grouped_mm(self, value: Value, indices: "Indices", depth: int) -> Expr:
        rows, weights, offsets = value.args
        row, column = indices
        group = self._group(offsets, weights.shape[0], row, indices, depth)
        if group is None:
            return self.algebra.leaf(value, indices)
        width = self.algebra.fresh(indices, rows.shape[1], "d")
        row_element = self._with_number(self.element(rows, (row, width), depth + 1), (width,))
        product = self.algebra.mul(row_element, self.element(weights, (group, width, column), depth + 1))
        return self.algebra.sum(width, product)

    def _resolve_group(self, group: Expr) -> Expr:
        """The expert of a row that a sort by expert put in place, as the sorted key itself."""
        row = group.args[2]
        if row is self.algebra.zero:
            return self._only_group(group)
        if row.kind != "inverse" or row.args[0].op != "argsort":
            return group
        keys = row.args[0].args[0]
        return self.element(keys, (row.args[1],)) if self._counts(*self.algebra.open(group), keys) else group

    def _counts(self, number: Expr, counts: Expr, keys: Value) -> bool:
        """Whether ``counts`` is how many of the keys equal ``number``, summed over the axes that the keys had once."""
        slot = self.algebra.fresh((), keys.shape[0])
        if counts is self.algebra.sum(slot, self.algebra.eq(self.element(keys, (slot,)), number)):
            return True
        axes: list[Expr] = []
        while counts.kind == "sum":
            var, counts = self.algebra.open(counts)
            axes.append(var)
        position, size = [], 1
        for var in reversed(axes):
            position.append((size, var))
            size = size * var.args[1]
        if not axes or not same_size(size, keys.shape[0]):
            return False
        key = self.element(keys, (self.algebra.linear(0, position),))
        once = self.algebra.distinct(key, axes[-1])
        hit = self.algebra.eq(key, number)
        return counts is hit or (counts is self.algebra.mul(hit, once) and are_distinct(key))

    def _only_group(self, group: Expr) -> Expr:
        """The expert of the first row, where there is one row in all."""
        opened, counts = self.algebra.open(group)
        key = [side for side in counts.args if side is not opened] if counts.kind == "eq" else []
        return key[0] if len(key) == 1 and opened not in key[0].free else group


def _group_of_true(mask: Value, groups: Value) -> int | None:
    """The group of the rows where ``mask`` is true, if it compares ``groups`` with a number."""
    if mask.op != "pointwise" or mask.args[0] != "eq":
        return None
    a, b = mask.args[1]
    return b.args[0] if a is groups and b.op == "full" else None
