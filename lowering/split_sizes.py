"""What is known about sizes that only the data tell: parts of rows add up to the rows.

    parts = rows.split(counts.tolist())         the last size is what the others leave of the rows: a split raises otherwise
    part = rows[start : start + counts[e]]      so it is for slices of all groups of rows, which are counts of all ids

Slices with the same bounds have the same size.
"""

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.elements import Evaluator, Unroll
from moeblaze_ops.lowering.elements_groups import rows_counted
from moeblaze_ops.lowering.expressions import size_of
from moeblaze_ops.lowering.forms import TABLE
from moeblaze_ops.lowering.values import GraphView, Value, fake_of, target_name


def known_sizes(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """Sizes that only the data tell, by their symbols, as what they are by others."""
    of_splits = sizes_of_splits(graph)
    return _sizes_of_slices(graph) if not of_splits and any(map(_is_sliced_by_data, graph.nodes)) else of_splits


def _is_sliced_by_data(node: fx.Node) -> bool:
    parts = node.args[1] if node.op == "call_function" and target_name(node) == "getitem" else ()
    parts = parts if isinstance(parts, tuple) else (parts,)
    bounds = [bound for part in parts if isinstance(part, slice) for bound in (part.start, part.stop)]
    return any(isinstance(bound, fx.Node) and free_unbacked_symbols(fake_of(bound)) for bound in bounds)


def _sizes_of_slices(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    view, evaluator = GraphView(graph, TABLE, numbers_only=True), Evaluator()
    symbols: dict[Value, sympy.Symbol] = {}
    known: dict[sympy.Symbol, sympy.Expr] = {}
    for symbol, value in view.numbers.items():
        if value.op == "sum" and value.args[0].op == "between" and symbols.setdefault(value.args[0], symbol) is not symbol:
            known[symbol] = symbols[value.args[0]]
    groups: dict[tuple, dict[int, sympy.Symbol]] = {}
    for mask, symbol in symbols.items():
        try:
            run = evaluator.run(mask)
        except Unroll:
            continue
        if run is not None:
            groups.setdefault((run.var, run.counts, mask.shape[0]), {})[run.number] = symbol
    for (var, counts, num_rows), sizes in groups.items():
        if sorted(sizes) == list(range(len(sizes))) and rows_counted(evaluator.algebra, var, counts, num_rows, len(sizes)):
            *others, last = (sizes[number] for number in range(len(sizes)))
            known[last] = sympy.sympify(num_rows) - sum(others)
    return known


def sizes_of_splits(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """The last sizes of splits, by their symbols, as what the others leave of the whole."""
    known: dict[sympy.Symbol, sympy.Expr] = {}
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and target_name(node) in ("split", "split_with_sizes"):
            symbols, whole = _symbols(node)
            if symbols and not known.keys() & {*symbols}:
                known[symbols[-1]] = sympy.sympify(whole) - sum(symbols[:-1])
    return known


def _symbols(split: fx.Node) -> tuple[list[sympy.Symbol], int | sympy.Expr]:
    """The sizes of the parts where each is a symbol of its own that only the data tell, and the size of the whole."""
    x, parts = fake_of(split.args[0] if split.args else split.kwargs["tensor"]), fake_of(split)
    axes = [axis for axis in range(x.dim()) if free_unbacked_symbols(parts[0].shape[axis])]
    if len(axes) != 1 or free_unbacked_symbols(x):
        return [], 0
    sizes = [part.shape[axes[0]] for part in parts]
    symbols = [size.node.expr for size in sizes if isinstance(size, torch.SymInt) and free_unbacked_symbols(size)]
    distinct = len(set(symbols)) == len(sizes) and all(isinstance(symbol, sympy.Symbol) for symbol in symbols)
    return (symbols if distinct else []), size_of(x.shape[axes[0]])
