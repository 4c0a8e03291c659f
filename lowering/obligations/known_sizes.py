"""What is known about sizes that only the data tell: parts of rows add up to the rows.

    parts = rows.split(counts.tolist())         the last size is what the others leave of the rows: a split raises otherwise
    part = rows[start : start + counts[e]]      so it is for slices of all groups of rows, which are counts of all ids
    sum(counts.tolist())                        and for the counts themselves

Slices with the same bounds have the same size, and so has all that one mask selects, in whatever shape it stands, and tokens
that have a slot which is alone in having it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.evaluate.groups import sum_of_counts
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.graph.sizes import Size, same_size, size_of

_PARTS = frozenset((
    "split", "split_with_sizes", "getitem", "rows_between", "item", "where", "nonzero", "masked_select",
))  # fmt: skip


def cut_of(size: Any) -> tuple[Any, int | None]:
    """Return how many rows there are, and to how many they are cut: u and C of ``Min(u, C)``; any other size, and None."""
    parts = size.args if isinstance(size, sympy.Basic) and size.func.__name__ == "Min" else ()
    whole, numbers = ([part for part in parts if part.is_Integer is is_number] for is_number in (False, True))
    return (whole[0], int(numbers[0])) if len(whole) == len(numbers) == 1 and numbers[0] >= 0 else (size, None)


def known_sizes(view: GraphView) -> dict[sympy.Symbol, sympy.Expr]:
    """Sizes that only the data tell, by their symbols, as what they are by others."""
    if not any(map(_may_depend_on_data, view.position)):
        return {}
    known: dict[sympy.Symbol, sympy.Expr] = {}
    view = view.of_numbers
    for zero in _zeros(view):
        rest = sympy.expand(sympy.sympify(zero).xreplace(known))
        symbols = [s for s, times in rest.as_coefficients_dict().items() if abs(times) == 1 and free_unbacked_symbols(s)]
        if symbols and all(isinstance(symbol, sympy.Symbol) for symbol in symbols):
            # What a tensor holds says more than how many elements of a mask are true.
            last = max(symbols, key=lambda symbol: (symbol not in view.numbers, int(symbol.name.lstrip("u"))))
            solved = {last: sympy.expand(last - rest * rest.coeff(last))}
            known = {symbol: size.xreplace(solved) for symbol, size in known.items()} | solved
    return known


def known_sizes_of(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """The same for a graph that is being traced."""
    return known_sizes(GraphView(graph, TABLE, numbers_only=True))


def have_rows(parts: list[fx.Node]) -> bool:
    """True if tensors of a graph that is being traced have a row in all: as many as the rows of which they are all groups.

        parts of x[: counts[0]], x[counts[0] : counts[0] + counts[1]], ...      as many as x, which has one
    """
    sizes = [fake_of(part).shape[0] for part in parts]
    total = sympy.expand(sympy.sympify(sum(map(size_of, sizes))).xreplace(known_sizes_of(parts[0].graph)))
    environment = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    if total.is_Integer or environment is None:
        return bool(total > 0)
    return not free_unbacked_symbols(total) and bool(environment.bound_sympy(total).lower > 0)


def rows_of_groups(graph: fx.Graph, counts: fx.Node) -> Size | None:
    """How many rows groups have in all, of which a tensor holds how many each has; None where it is not known to count all."""
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    held = view.value_at(counts, len(view.position))
    if not isinstance(held, Value) or len(held.shape) != 1 or held.shape[0] == 1:  # one number is that of all groups
        return None
    if (element := evaluator.try_element(held)) is None:
        return None
    return sum_of_counts(evaluator.algebra, evaluator.variables(held)[0], element, held.shape[0])


def _may_depend_on_data(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or target_name(node) not in _PARTS:
        return False
    parts = fake_of(node)
    if isinstance(parts, torch.SymInt):
        return True
    return any(free_unbacked_symbols(part) for part in (parts if isinstance(parts, (tuple, list)) else [parts]))


def _zeros(view: GraphView) -> Iterator[Size]:
    """Sums of sizes that are zero."""
    for lengths, whole in view.splits:
        yield sum(lengths) - whole
    of_masks: dict[Value, list[Size]] = {}
    for mask, lengths in view.lengths.items():
        of_masks.setdefault(_unshaped(mask), []).extend(lengths)
    for first, *others in of_masks.values():
        yield from (other - first for other in others)
    evaluator = Evaluator()
    slices: dict[tuple, dict[int, Size]] = {}
    for mask, lengths in of_masks.items():
        if mask.op == "any" and mask.args[0] in of_masks and _or_none(_has_one_true, evaluator, mask.args[0], mask.args[1]):
            yield lengths[0] - of_masks[mask.args[0]][0]
        run = _or_none(evaluator.run, mask) if mask.op == "between" else None
        if run is not None:
            slices.setdefault((run.var, run.counts, mask.shape[0]), {})[run.number] = lengths[0]
    numbers: dict[tuple, dict[int, Size]] = {}
    for symbol, value in view.numbers.items():
        count = _or_none(evaluator.element, value, ()) if not value.shape else None
        if count is not None and (run := evaluator.numbered(count)) is not None:
            numbers.setdefault((run.var, run.counts), {}).setdefault(run.number, symbol)
    for (var, counts, *num_rows), sizes in (slices | numbers).items():
        if sorted(sizes) == list(range(len(sizes))):
            total = sum_of_counts(evaluator.algebra, var, counts, len(sizes))
            if total is not None and all(same_size(total, rows) for rows in num_rows):
                yield sum(sizes.values()) - total


def _unshaped(mask: Value) -> Value:
    """The mask of which it is another view, which has as many true elements."""
    while mask.op in ("reshape", "permute"):
        mask = mask.args[0]
    return mask


def _has_one_true(evaluator: Evaluator, mask: Value, dims: tuple[int, ...]) -> bool:
    """True if at most one element of a mask is true along an axis, as of one that compares ids that differ with a number.

        (ids == e).any(dim=-1).nonzero()        as many rows as weights[ids == e]
    """
    at = evaluator.variables(mask)
    slots = [at[dim] for dim in dims if mask.shape[dim] != 1]
    return not slots or (len(slots) == 1 and evaluator.algebra.tells((), slots[0], [evaluator.element(mask, at)]))


def _or_none(compute: Callable, *args: Any) -> Any:
    try:
        return compute(*args)
    except Unroll:
        return None
