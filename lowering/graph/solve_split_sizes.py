"""What a split of rows tells about sizes that are numbers of the host: they add up to the rows."""

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.graph.functional_view import fake_of, target_name
from moeblaze_ops.lowering.index_notation.expr import size_of


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
